"""Tables of the fleet controller."""

from msgspec import Struct
from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from db.models import Base


class MachineRow(Base):
    """A machine that the fleet controller wanted: written before its provider is asked (fleet.machine.Machine)."""

    __tablename__ = "fleet_machines"
    __table_args__ = (Index(None, "state"),)

    machine_id: Mapped[str] = mapped_column(primary_key=True)  # "m-…"
    pool: Mapped[str]
    place: Mapped[str]  # in its pool: a zone and a type; "": there is only one
    state: Mapped[str]  # fleet.machine.State
    wanted_unix_ms: Mapped[int]
    provider_id: Mapped[str | None]  # NULL: the provider has not answered
    worker_id: Mapped[str | None]  # NULL: no heartbeat yet
    launched_unix_ms: Mapped[int | None]
    serving_unix_ms: Mapped[int | None]
    drained_unix_ms: Mapped[int | None]
    over_unix_ms: Mapped[int | None]
    reason: Mapped[str]  # of its latest change of state


class DecisionRow(Base):
    """A change of a pool's size that the fleet controller has decided, with its reason in one sentence."""

    __tablename__ = "fleet_decisions"

    decided_unix_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    pool: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int]  # machines it was to have
    serving: Mapped[int]  # workers it had
    starting: Mapped[int]
    reason: Mapped[str]


class Decision(Struct, frozen=True):
    """A row of decisions: a size that was decided for a pool, and why."""

    decided_unix_ms: int
    pool: str
    size: int
    serving: int
    starting: int
    reason: str
