"""What the store, the providers and the heartbeats say together: pure functions.

A row says what was wanted, the provider what it charges for, a heartbeat what serves. If they differ, this module
says what becomes of a machine; which of the provider's is which, ``fleet.matching`` says.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fleet.machine import STARTING, Machine, ProviderMachine, State

DRAIN_MARGIN_S: Final = 30.0  # beyond drain_s, until a machine whose worker still answers is ended all the same
SILENCE_LIMIT_S: Final = 60.0  # of a worker that has served: its machine is of no use


class Beat(Struct, frozen=True):
    """What a worker's last heartbeat says of its machine."""

    worker_id: str
    silent_s: float


class Limits(Struct, frozen=True):
    """Limits of time of the fleet and of a pool (fleet.settings)."""

    launch_limit_s: float
    listed_after_s: float
    start_limit_s: float
    drain_s: float
    listened_s: float = float("inf")  # how long heartbeats have been heard: of a silence before, nothing is known
    life_s: float | None = None  # of a machine: credentials that expire are not renewed


def reconciled(
    machine: Machine,
    listed: Mapping[str, ProviderMachine] | None,
    beat: Beat | None,
    limits: Limits,
    now_unix_ms: int,
) -> Machine:
    """Return the updated row of a machine.

    ``listed``: the provider's machines by our id; None: it has not answered, and nothing is concluded from that.
    """
    there = None if listed is None else listed.get(machine.machine_id)
    if there is not None and not there.is_ending:
        return _there(machine, there, beat, limits, now_unix_ms)
    if listed is None or _may_be_listed_later(machine, limits, now_unix_ms):
        return _serving(machine, beat, now_unix_ms)
    if machine.state in {State.DRAINING, State.ENDING}:  # its worker's end may be the machine's own
        return _over(machine, State.GONE, "ended", now_unix_ms)
    if machine.state is State.WANTED:
        return _over(machine, State.FAILED, "the provider has not launched it", now_unix_ms)
    return _over(machine, State.LOST, "the provider has taken it", now_unix_ms)


def _there(machine: Machine, there: ProviderMachine, beat: Beat | None, limits: Limits, now_unix_ms: int) -> Machine:
    """Return the updated row of a machine that the provider lists."""
    if machine.provider_id is None:
        machine = replace(
            machine,
            provider_id=there.provider_id,
            state=State.LAUNCHED if machine.state is State.WANTED else machine.state,
            launched_unix_ms=now_unix_ms,
            reason="found at the provider after its answer was lost",
        )
    machine = _serving(machine, beat, now_unix_ms)
    if machine.state in STARTING and now_unix_ms - machine.wanted_unix_ms > limits.start_limit_s * 1000:
        reason = f"no heartbeat from its worker within {limits.start_limit_s:g} s"
        return replace(machine, state=State.ENDING, reason=reason)
    if machine.state is State.SERVING and _is_silent(beat, limits):
        return replace(machine, state=State.ENDING, reason=f"no heartbeat from its worker for {SILENCE_LIMIT_S:g} s")
    if machine.state is State.SERVING and _is_old(machine, limits, now_unix_ms):
        return replace(machine, state=State.DRAINING, drained_unix_ms=now_unix_ms, reason="its credentials expire soon")
    if machine.state is State.DRAINING and _is_drained(machine, beat, limits, now_unix_ms):
        return replace(machine, state=State.ENDING, reason="drained")
    return machine


def _serving(machine: Machine, beat: Beat | None, now_unix_ms: int) -> Machine:
    if machine.state in STARTING and machine.provider_id is not None and beat is not None:
        return replace(
            machine,
            state=State.SERVING,
            worker_id=beat.worker_id,
            serving_unix_ms=now_unix_ms,
            reason="first heartbeat received",
        )
    return machine


def _is_drained(machine: Machine, beat: Beat | None, limits: Limits, now_unix_ms: int) -> bool:
    if _is_silent(beat, limits):
        return True
    began_ms = machine.drained_unix_ms or now_unix_ms
    return now_unix_ms - began_ms > (limits.drain_s + DRAIN_MARGIN_S) * 1000


def _is_silent(beat: Beat | None, limits: Limits) -> bool:
    return limits.listened_s > SILENCE_LIMIT_S if beat is None else beat.silent_s > SILENCE_LIMIT_S


def _is_old(machine: Machine, limits: Limits, now_unix_ms: int) -> bool:
    return limits.life_s is not None and now_unix_ms - machine.wanted_unix_ms > limits.life_s * 1000


def _may_be_listed_later(machine: Machine, limits: Limits, now_unix_ms: int) -> bool:
    if machine.state is State.WANTED:
        return now_unix_ms - machine.wanted_unix_ms < limits.launch_limit_s * 1000
    launched_ms = machine.launched_unix_ms or 0
    return machine.state is State.LAUNCHED and now_unix_ms - launched_ms < limits.listed_after_s * 1000


def _over(machine: Machine, state: State, reason: str, now_unix_ms: int) -> Machine:
    reason = machine.reason if state is State.GONE and machine.reason else reason
    return replace(machine, state=state, reason=reason, over_unix_ms=now_unix_ms)


def to_end(machines: Sequence[Machine], count: int, running: Mapping[str, int]) -> Iterator[Machine]:
    """Yield the machines to end: those that start, latest first, then those whose workers run the least.

    ``running``: jobs by worker.
    """
    starting = sorted((one for one in machines if one.state in STARTING), key=lambda one: -one.wanted_unix_ms)
    serving = sorted(
        (one for one in machines if one.state is State.SERVING),
        key=lambda one: (running.get(one.worker_id or "", 0), -one.wanted_unix_ms),
    )
    yield from [*starting, *serving][:count]
