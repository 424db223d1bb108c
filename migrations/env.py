"""Alembic's entry point: runs revisions on the given connection, or on ``-x database_url=…`` for developers."""

import asyncio

from alembic import context
from sqlalchemy import Connection

from db.engine import create_engine
from db.tables import Base


def run_on(connection: Connection) -> None:
    """Run the revisions inside the caller's transaction, if it has one."""
    # SQLite can alter little in place: batch mode rebuilds the table.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_on_url(database_url: str) -> None:
    """Connect, run and commit."""
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(run_on)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is not None:
    run_on(given)
else:
    asyncio.run(run_on_url(context.get_x_argument(as_dictionary=True)["database_url"]))
