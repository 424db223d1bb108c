"""What is noted in SQL as set aside."""

from sqlalchemy import select

from db.engine import create_engine
from db.set_aside import Kind
from db.tables import SetAsideRow


async def is_set_aside(database_url: str, kind: Kind, item: str, reason: str) -> bool:
    """Whether an item is noted, with a reason that has these words."""
    engine = create_engine(database_url)
    found = select(SetAsideRow.reason).where(SetAsideRow.kind == kind, SetAsideRow.item == item)
    try:
        async with engine.connect() as connection:
            return any(reason in one for one in await connection.scalars(found))
    finally:
        await engine.dispose()
