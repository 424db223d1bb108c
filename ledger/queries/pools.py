"""Pools that had workers, from their machine time."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import InstanceRow


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """A pool, and when it last had a worker."""

    pool: str
    provider: str
    region: str
    tier: str
    seen_unix_ms: int


async def pools_seen(connection: AsyncConnection, since_unix_ms: int) -> list[PoolSeen]:
    """Return the pools that had a worker since then, the latest first."""
    columns = InstanceRow.__table__.columns
    names = (columns.pool, columns.provider, columns.region, columns.tier)
    seen = func.max(columns.up_until_unix_ms).label("seen_unix_ms")
    statement = select(*names, seen).where(columns.bucket_unix_ms >= since_unix_ms).group_by(*names)
    return [PoolSeen(*row) for row in await connection.execute(statement.order_by(seen.desc(), columns.pool))]
