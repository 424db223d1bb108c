"""Matching a provider's machines with the rows of ``fleet_machines``.

By label, if machines can have labels; otherwise by the provider's id, which a row has from its launch on. If the
answer to a launch was lost, a machine without a label is matched with the oldest row that has no provider id.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from fleet.machine import Machine, ProviderMachine, State


class Matched(Struct, frozen=True):
    """The machines that a provider lists, matched with rows."""

    owned: dict[str, ProviderMachine]  # by our id
    unowned: tuple[ProviderMachine, ...]  # also a second machine for one row; those that are ending are left out


def match(machines: Iterable[Machine], listed: Iterable[ProviderMachine]) -> Matched:
    """Match machines and rows. ``machines``: a pool's rows that have not ended."""
    rows = sorted(machines, key=lambda row: (row.wanted_unix_ms, row.machine_id))
    by_id = {row.machine_id: row for row in rows}
    by_provider_id = {row.provider_id: row for row in reversed(rows) if row.provider_id is not None}
    owned: dict[str, ProviderMachine] = {}
    unowned: list[ProviderMachine] = []
    known = set(by_provider_id)
    # Of two machines for one row, the one that the row knows stays; then one that is not ending.
    for there in sorted(listed, key=lambda one: (one.provider_id not in known, one.is_ending, one.provider_id)):
        row = by_provider_id.get(there.provider_id) or by_id.get(there.machine_id or "")
        if row is not None and row.machine_id not in owned:
            owned[row.machine_id] = there
        elif not there.is_ending:
            unowned.append(there)
    waiting = [row for row in rows if _waits_for_machine(row) and row.machine_id not in owned]
    return _adopted(owned, unowned, waiting)


def _waits_for_machine(row: Machine) -> bool:
    return row.state is State.WANTED and row.provider_id is None


def _adopted(
    owned: dict[str, ProviderMachine], unowned: Sequence[ProviderMachine], waiting: Sequence[Machine]
) -> Matched:
    nameless = [there for there in unowned if there.machine_id is None]
    adopted = dict(zip((row.machine_id for row in waiting), nameless, strict=False))
    taken = {there.provider_id for there in adopted.values()}
    return Matched(owned | adopted, tuple(there for there in unowned if there.provider_id not in taken))
