"""``spillway payloads``: requests and answers stored with consent."""

from typing import Annotated

import msgspec
import typer

from db.accounts.keys import list_keys
from db.accounts.teams import means
from ledger.payloads.sealing import Sealer, parse_keys
from ledger.payloads.store import Erasure, erase, read_payload
from spillway.cli.connections import database
from spillway.cli.context import ResolvedConfig, command, out, this_actor


@command
async def show(
    request_id: Annotated[str, typer.Argument(help="The request's id, from its x-request-id header.")],
    *,
    config: ResolvedConfig,
) -> None:
    """Decrypt a request and its answer and print them as JSON."""
    sealer = Sealer(parse_keys(config.payload_settings().key))
    async with database(config) as engine:
        payload = await read_payload(engine, request_id, sealer, this_actor())
    out.print_json(msgspec.json.encode(payload).decode())


@command
async def delete(
    *,
    user: Annotated[
        str | None, typer.Option(help="All payloads of this end user: the field `user` of the requests.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="All payloads of this API key, by id or name.")] = None,
    request: Annotated[str | None, typer.Option(help="The payload of this request, by id.")] = None,
    config: ResolvedConfig,
) -> None:
    """Delete payloads permanently. Usage and cost of the requests are kept.

    The newest payloads may not be in the database yet. Run the command again after a minute to delete them too.
    """
    if [user, key, request].count(None) != 2:
        raise typer.BadParameter("use exactly one of --user, --key and --request")
    async with database(config) as engine:
        key_id = key
        for known in await list_keys(engine, include_revoked=True) if key is not None else ():
            if known.revoked_unix_ms is None and means(key or "", known.key_id, known.name):
                key_id = known.key_id
        deleted = await erase(engine, Erasure(user, key_id, request), this_actor())
    out.print(f"deleted {deleted} payloads")
