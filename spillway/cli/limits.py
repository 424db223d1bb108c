"""``spillway limits``: compare budgets with the ledger."""

import time

import msgspec

from db.money import NANO_USD
from gateway.limits.account import AccountStore
from gateway.limits.report import Recount, recount_budgets
from spillway.cli.connections import database, queue_server
from spillway.cli.context import ResolvedConfig, command, out
from spillway.cli.output import JsonOption


@command
async def recount(*, as_json: JsonOption = False, config: ResolvedConfig) -> None:
    """Compare each budget's spending in its current period with the ledger, and correct it.

    The reservations of a killed gateway count as spent until you run this command. The queue server must be running.
    Wait until the ledger has written all usage (`spillway status`). Spending that gateways report meanwhile is kept.
    """
    async with queue_server(config, "spillway limits") as bus, database(config) as engine:
        counts = await recount_budgets(engine, AccountStore(bus), time.time())
    if as_json:
        out.print_json(data=[msgspec.structs.asdict(count) for count in counts])
        return
    for count in counts:
        out.print(_text(count), markup=False, soft_wrap=True)
    if not counts:
        out.print("no keys or teams have a budget")


def _text(count: Recount) -> str:
    before, after = (nano / NANO_USD for nano in (count.before_nano_usd, count.after_nano_usd))
    change = "unchanged" if before == after else f"was {before:.9g} USD"
    return f"{count.account_id} ({count.name}), {count.period.rstrip(':')}: {after:.9g} USD spent, {change}"
