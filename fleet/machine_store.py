"""Machines and decisions of the fleet controller in SQL, and the needs of open batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, changing, describe
from db.tables import Decision, DecisionRow, MachineRow
from fleet.machine import OVER, PAID, Machine, State
from fleet.open_batches import OpenBatch, open_batches


class MachineStore:
    """Reads and writes machines and decisions. All methods raise DatabaseUnavailable."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def machines(self) -> list[Machine]:
        """Return all machines that a provider may still charge for."""
        return await self._select_machines(MachineRow.state.in_(PAID))

    async def over_since(self, unix_ms: int) -> list[Machine]:
        """Return the machines that ended at or after a time."""
        return await self._select_machines(MachineRow.state.in_(OVER), MachineRow.over_unix_ms >= unix_ms)

    async def _select_machines(self, *conditions: Any) -> list[Machine]:  # noqa: ANN401  # SQLAlchemy's expressions
        columns = [getattr(MachineRow, field) for field in Machine.__struct_fields__]
        statement = select(*columns).where(*conditions).order_by(MachineRow.wanted_unix_ms, MachineRow.machine_id)
        try:
            async with self._engine.connect() as connection:
                rows = (await connection.execute(statement)).mappings()
                return [Machine(**{**row, "state": State(row["state"])}) for row in rows]
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error

    async def add(self, machine: Machine) -> None:
        """Add a wanted machine, before its launch is requested."""
        await self._change(insert(MachineRow).values(structs.asdict(machine)))

    async def put(self, machine: Machine) -> None:
        """Replace the row of a machine. An ended machine stays ended."""
        fields = structs.asdict(machine)
        fields.pop("machine_id")
        statement = update(MachineRow).where(MachineRow.machine_id == machine.machine_id, MachineRow.state.not_in(OVER))
        await self._change(statement.values(fields))

    async def add_decisions(self, decisions: Sequence[Decision]) -> None:
        """Write decisions."""
        if decisions:
            await self._change(insert(DecisionRow).values([structs.asdict(decision) for decision in decisions]))

    async def forget_decisions(self, before_unix_ms: int) -> None:
        """Delete old decisions."""
        await self._change(delete(DecisionRow).where(DecisionRow.decided_unix_ms < before_unix_ms))

    async def decisions(self, since_unix_ms: int, pool: str | None = None) -> list[Decision]:
        """Return decisions, latest first."""
        columns = [getattr(DecisionRow, field) for field in Decision.__struct_fields__]
        statement = select(*columns).where(DecisionRow.decided_unix_ms >= since_unix_ms)
        if pool is not None:
            statement = statement.where(DecisionRow.pool == pool)
        try:
            async with self._engine.connect() as connection:
                rows = (await connection.execute(statement.order_by(DecisionRow.decided_unix_ms.desc()))).mappings()
                return [Decision(**row) for row in rows]
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error

    async def batches(self) -> Mapping[str, Sequence[OpenBatch]]:
        """Return the remaining needs of open batches, by queue."""
        return await open_batches(self._engine)

    async def _change(self, statement: Any) -> None:  # noqa: ANN401  # SQLAlchemy's expressions
        try:
            async with changing(self._engine) as connection:
                await connection.execute(statement)
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error
