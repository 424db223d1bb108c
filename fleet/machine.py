"""A machine, from the decision to launch it until the provider no longer has it.

    wanted ──launch──> launched ──heartbeat──> serving ──drain──> draining ──end──> ending ──> gone
      │                   │                       │                   │
      │                   │                       └───────────────────┴─ no longer at the provider ─> lost
      └─ not launched ────┴─ not serving in time ──────────────────────────────────────────────────> failed

A row is written before the launch is requested, and the provider's machine carries its id. If a controller dies at any
point, the next one finds the row or the machine and continues.
"""

import enum
import re
import secrets
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

FLEET_LABEL: Final = "spillway-fleet"  # on every machine: the installation that pays for it
MACHINE_LABEL: Final = "spillway-machine"  # Machine.machine_id: also the token that makes a launch idempotent
POOL_LABEL: Final = "spillway-pool"


class State(enum.StrEnum):
    """States of a machine. What a provider may still charge for is ``PAID``."""

    WANTED = "wanted"  # has a row; the launch may have been requested
    LAUNCHED = "launched"  # the provider has it; its worker has not sent a heartbeat
    SERVING = "serving"
    DRAINING = "draining"  # its worker accepts no new jobs
    ENDING = "ending"  # its end has been requested from the provider
    GONE = "gone"  # ended by the controller
    LOST = "lost"  # ended by the provider
    FAILED = "failed"  # not launched, or no heartbeat in time


PAID: Final = frozenset({State.WANTED, State.LAUNCHED, State.SERVING, State.DRAINING, State.ENDING})
STARTING: Final = frozenset({State.WANTED, State.LAUNCHED})
OVER: Final = frozenset({State.GONE, State.LOST, State.FAILED})


class Machine(Struct, frozen=True):
    """One row of ``fleet_machines``."""

    machine_id: str
    pool: str
    place: str  # zone and type of machine, as named by its driver; "": the pool has only one
    state: State
    wanted_unix_ms: int
    provider_id: str | None = None  # None until the provider has answered
    worker_id: str | None = None  # of its worker, from the first heartbeat
    launched_unix_ms: int | None = None
    serving_unix_ms: int | None = None
    drained_unix_ms: int | None = None  # when its drain began
    over_unix_ms: int | None = None
    reason: str = ""  # of its latest change of state, one sentence


class Order(Struct, frozen=True):
    """Everything that a driver needs to launch a machine."""

    machine_id: str
    pool: str
    place: str
    labels: Mapping[str, str]
    # Of the worker: its pool, its machine, how to reach the queue. A provider of replicas gives all of them the same,
    # which is configured there; a worker of such a machine calls it by the provider's id.
    environment: Mapping[str, str]


class ProviderMachine(Struct, frozen=True):
    """One of our machines, as its provider lists it."""

    provider_id: str
    labels: Mapping[str, str]
    is_ending: bool = False  # it will be gone without another request

    @property
    def machine_id(self) -> str | None:
        """The machine id in its label; None: it has no such label (``fleet.matching``)."""
        return self.labels.get(MACHINE_LABEL)


_MACHINE_ID: Final = re.compile(r"m-[0-9a-f]{16}")


def new_machine_id() -> str:
    """Return an id for a machine, which is also its launch's idempotency token."""
    return f"m-{secrets.token_hex(8)}"


def labels_of(fleet_id: str, machine_id: str, pool: str) -> dict[str, str]:
    """Return the labels that a machine must carry."""
    return {FLEET_LABEL: fleet_id, MACHINE_LABEL: machine_id, POOL_LABEL: pool}


def name_of(labels: Mapping[str, str]) -> str:
    """Return a name that says what the labels say, for providers whose machines have no labels but a name."""
    return f"spillway.{labels[FLEET_LABEL]}.{labels[POOL_LABEL]}.{labels[MACHINE_LABEL]}"


def labels_in(name: str, fleet_id: str, pool: str) -> dict[str, str] | None:
    """Return the labels that a name says; None: it is no machine of this installation and pool."""
    mine = f"spillway.{fleet_id}.{pool}."
    machine_id = name.removeprefix(mine)
    if not name.startswith(mine) or not _MACHINE_ID.fullmatch(machine_id):
        return None
    return labels_of(fleet_id, machine_id, pool)
