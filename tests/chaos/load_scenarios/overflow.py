"""Our own workers full, gone and back beside a hosted API: whose prompts leave, for how much money, and who is served.

The API keeps what it was sent and sends bills, which are what is judged: nothing of ours is asked who left the house.
"""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from db.accounts.principal import Policy
from db.money import TokenPrice, nano_usd
from db.tables import AttemptRow
from gateway.limits.account import AccountStore
from gateway.limits.prices import cap_account
from pool_worker.settings import ServerEngineSettings
from protocol.errors import BusError
from tests.chaos.load_scenarios.callers import Asked
from tests.chaos.load_scenarios.hosted_api import Bill, HostedApi, hosted_api
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.system import MODEL, Shape
from tests.chaos.workers import LiveWorker

API, PROVIDER, TIER, OUR_TIER = "api", "openai", "hosted", "spot"
OUR_SLOTS, API_SLOT = (0, 1), 2
TOKENS, TOKEN_S, SEQUENCES = 20, 0.05, 8  # of an answer, of each worker and of the API
CEILING_PER_S = len(OUR_SLOTS) * SEQUENCES / (TOKENS * TOKEN_S)
IN_HEALTH, TOO_MUCH, GONE = 0.5, 1.75, 0.75  # of that: what is offered while our workers are there, full, away
PRICE = TokenPrice(*(nano_usd(usd) for usd in (100.0, 100.0, 1000.0)))  # for a million
CALL_USD = 0.0235  # about what one call costs
CAP_CALLS = 900  # that the cap holds: more than leave before the last stage
NEARLY_ALL = 0.9  # of the cap, which is spent at last
EXCESS = 0.02  # what the cap's account may hold beyond the bills: calls that were broken off count in full
CAP_LIMIT_S, SEEN_LIMIT_S, BACK_LIMIT_S, POLL_S = 180.0, 60.0, 60.0, 0.05
LEAVES = "leaves"


@dataclass(frozen=True)
class Kind:
    """Some callers of one key, how often they ask beside the others, and whether their prompts may leave."""

    key: str
    may_leave: bool
    share: float
    rest: dict[str, Any] = field(default_factory=dict)


POLICIES = {
    LEAVES: Policy(allow_hosted=(f"{PROVIDER}/{MODEL}",)),
    "leaves-anywhere": Policy(allow_hosted=("*",)),
    "stays": Policy(),
    "never": Policy(allow_hosted=()),
    "elsewhere": Policy(allow_hosted=("anthropic", f"azure/{MODEL}")),
    "other-model": Policy(allow_hosted=(f"{PROVIDER}/gpt-*",)),
}
KINDS = (
    Kind(LEAVES, may_leave=True, share=0.25),
    Kind("leaves-anywhere", may_leave=True, share=0.25),
    Kind(LEAVES, may_leave=False, share=0.1, rest={"allow_hosted": False}),
    Kind(LEAVES, may_leave=False, share=0.05, rest={"service_tier": "flex"}),
    Kind("stays", may_leave=False, share=0.2),
    Kind("never", may_leave=False, share=0.05),
    Kind("elsewhere", may_leave=False, share=0.05),
    Kind("other-model", may_leave=False, share=0.05),
)


PRICES = {"prompt": 100.0, "cached": 100.0, "completion": 1000.0}
OVERFLOW_SHAPE = Shape(
    workers=0,  # the scenario starts them
    gateways=2,  # which share the cap
    max_sequences=SEQUENCES,
    inter_token_s=TOKEN_S,
    gateway_timeouts={"overflow_after_s": 0.5},
    limited=POLICIES,
    other_pools={
        API: {
            "tier": TIER,
            "provider": PROVIDER,
            "models": [MODEL],
            # Gateways need not know where the API is, and its address is not known yet.
            "engine": {"kind": "vllm", "url": "http://127.0.0.1:1", "tokenizer": "none"},
            "prices": {MODEL: PRICES},
            "usd_per_day": CAP_CALLS * CALL_USD,
            "usd_per_month": 2 * CAP_CALLS * CALL_USD,
        }
    },
)


class Play:
    """One run of the scenario."""

    def __init__(self, stage: Stage, api: HostedApi) -> None:
        self._stage = stage
        self._api = api
        self._account_store = AccountStore(stage.system.bus)
        self._cap_nano_usd = nano_usd(stage.system.shape.other_pools[API]["usd_per_day"])
        self._ours: list[LiveWorker] = []
        self._are_back = asyncio.Event()
        self._in_health_calls = 0
        self._last_spent = 0

    async def run(self, engine: ServerEngineSettings) -> None:
        """``plan.count`` times: room, too much, nobody; then nobody until the cap is reached, and room again."""
        system, plan, report = self._stage.system, self._stage.plan, self._stage.report
        await self._bring_back()
        await self._stage.callers.wait_until_served()
        change = {"pool": API, "tier": TIER, "provider": PROVIDER, "region": "global", "engine": engine}
        await self._until_beats([await system.farm.spawn(API_SLOT, change)])
        await self._until(self._is_cap_known, SEEN_LIMIT_S, "gateways do not know the cap")
        calls: Counter[str] = Counter()
        for _ in range(plan.count):
            await self._in_health()
            calls["while_full"] += await self._offer(TOO_MUCH)
            offered = self._offer(GONE, plan.seconds + TOKENS * TOKEN_S)
            calls["while_gone"] += await self._lose_ours(offered, asyncio.sleep(plan.seconds))
        calls["until_cap"] += await self._lose_ours(self._offer_until_back(), self._cap())
        await self._in_health()
        await self._until(self._is_settled, SEEN_LIMIT_S, "the ledger and the cap's account do not know all calls")
        expect(report, "hosted_calls_in_health", self._in_health_calls, at_most=plan.slack - 1)
        report.faults = (plan.count + 1) * len(OUR_SLOTS)
        report.extras |= {f"hosted_calls_{when}": number for when, number in calls.items()}
        for when in ("while_full", "while_gone", "until_cap"):
            if not calls[when]:
                report.offend(f"nothing left the house {when}")
        await self._judge()

    async def _offer(self, share_of_ceiling: float, seconds: float | None = None) -> int:
        """Offer so much for a stage's time, and wait for all answers; returns how many calls the API has had."""
        before = len(self._api.bodies)
        offers = []
        for kind in KINDS:
            rate = share_of_ceiling * CEILING_PER_S * kind.share
            offers.append(
                self._stage.callers.offer(
                    rate, seconds or self._stage.plan.seconds, tokens=TOKENS, tenant=kind.key, rest=kind.rest
                )
            )
        await asyncio.gather(*offers)
        return len(self._api.bodies) - before

    async def _in_health(self) -> None:
        """Traffic is back at our own workers by itself, and stays there."""
        await self._until(self._is_back, BACK_LIMIT_S, "traffic does not come back to our own workers")
        self._in_health_calls += await self._offer(IN_HEALTH)

    async def _is_back(self) -> bool:
        asked = await self._stage.callers.ask(tokens=2, tenant=LEAVES)
        return asked.record.headers.get("x-spillway-tier") == OUR_TIER

    async def _lose_ours(self, offered: Awaitable[int], away: Awaitable[None]) -> int:
        """Kill our workers under load; bring them back after a time, for those that wait for them."""
        self._are_back.clear()
        task = asyncio.ensure_future(offered)
        await asyncio.sleep(TOKENS * TOKEN_S)  # some are in mid-stream
        for worker in self._ours:
            worker.send(signal.SIGKILL)
        await away
        await self._bring_back()
        return await task

    async def _offer_until_back(self) -> int:
        """Offer what may leave for as long as our workers are away; beyond a cap it waits for them."""
        callers, before, calls = self._stage.callers, len(self._api.bodies), []
        while not self._are_back.is_set():
            offer = callers.offer(CEILING_PER_S * GONE, 1.0, tokens=TOKENS, tenant=LEAVES)
            calls.append(asyncio.create_task(offer))
            await asyncio.sleep(1.0)
        await asyncio.gather(*calls)
        return len(self._api.bodies) - before

    async def _cap(self) -> None:
        """The cap holds no more, and is asked for more for a while."""
        await self._until(self._is_cap_reached, CAP_LIMIT_S, "the cap is not reached")
        await asyncio.sleep(self._stage.plan.seconds)

    async def _is_cap_reached(self) -> bool:
        return bool(await self._spent() >= NEARLY_ALL * self._cap_nano_usd)

    async def _bring_back(self) -> None:
        farm = self._stage.system.farm
        self._ours = [await farm.spawn(slot, {"pool": "ours", "tier": OUR_TIER}, replace=False) for slot in OUR_SLOTS]
        await self._until_beats(self._ours)
        self._are_back.set()

    async def _until_beats(self, workers: list[LiveWorker]) -> None:
        async def have_beaten() -> bool:
            return all(self._stage.system.watcher.has_beaten(worker.worker_id) for worker in workers)

        await self._until(have_beaten, SEEN_LIMIT_S, "a worker sends no heartbeat")

    async def _until(self, is_so: Callable[[], Awaitable[bool]], limit_s: float, complaint: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while not await is_so():
            assert time.monotonic() < deadline_s, complaint
            await asyncio.sleep(POLL_S)

    # --- money, and who left ------------------------------------------------------------------------------------------

    async def _spent(self) -> int:
        with contextlib.suppress(BusError):  # on a busy machine
            found = await self._account_store.load(cap_account(API, "day"))
            self._last_spent = self._last_spent if found is None else found[0].spent_nano_usd
        return self._last_spent

    async def _is_cap_known(self) -> bool:
        with contextlib.suppress(BusError):
            return all([await self._account_store.load(cap_account(API, period)) for period in ("day", "month")])
        return False

    async def _is_settled(self) -> bool:
        all_billed = len(self._api.bills) == len(self._api.bodies) <= len(await self._in_ledger())
        return all_billed and await self._spent() >= self._owed()

    def _owed(self) -> int:
        return sum(_cost(bill) for bill in self._api.bills)

    async def _in_ledger(self) -> list[int]:
        """Return the cost of each attempt there, as its worker reports it."""
        row = AttemptRow.__table__.c
        statement = select(row.prompt_tokens, row.cached_tokens, row.completion_tokens).where(row.pool == API)
        async with self._stage.system.database.connect() as connection:
            return [PRICE.charge_nano_usd(*map(int, counts)) for counts in await connection.execute(statement)]

    async def _judge(self) -> None:
        report, asked = self._stage.report, {one.prompt: one for one in self._stage.callers.asked}
        for bill in self._api.bills:
            one = asked.get(bill.prompt)
            if one is None or not _may_leave(one):
                report.offend("a prompt left that must stay", one.request_id if one else None, bill.prompt)
        for one in asked.values():
            if one.record.headers.get("x-spillway-tier") == TIER and not _may_leave(one):
                report.offend("a request that must stay says that it left", one.request_id)
        cap, spent, owed = self._cap_nano_usd, await self._spent(), self._owed()
        told = Counter(one.record.headers.get("x-spillway-hosted") for one in asked.values())
        if not told["cap-reached"]:
            report.offend("nobody was told that the cap is reached")
        expect(report, "bill_of_account", owed / spent, at_most=1.0)
        expect(report, "account_of_cap", spent / cap, at_most=1.0)
        expect(report, "account_without_bill", spent / owed - 1, at_most=EXCESS * self._stage.plan.slack)
        report.extras |= {
            "hosted_calls": len(self._api.bills),
            "prompts_that_may_leave": sum(map(_may_leave, asked.values())),
            "prompts_that_must_stay": sum(not _may_leave(one) for one in asked.values()),
            "went_on_at_the_api": sum(_is_rescue(bill) for bill in self._api.bills),
            "usd_cap": cap / 1e9,
            "usd_billed": owed / 1e9,
            "usd_in_account": spent / 1e9,
            "usd_in_ledger": sum(await self._in_ledger()) / 1e9,
        }


def _cost(bill: Bill) -> int:
    return PRICE.charge_nano_usd(bill.prompt_tokens, 0, bill.completion_tokens)


def _may_leave(asked: Asked) -> bool:
    return any(kind.may_leave for kind in KINDS if (kind.key, kind.rest) == (asked.tenant, asked.rest))


def _is_rescue(bill: Bill) -> bool:
    return bill.completion_tokens < TOKENS


async def overflow(stage: Stage) -> None:
    """Implement ``Play.run``."""
    with contextlib.ExitStack() as stack:
        api, tokenizer = stack.enter_context(hosted_api(stage.system.folder / "api", TOKEN_S))
        url, sequences = api.url, len(OUR_SLOTS) * SEQUENCES
        engine = {"kind": "vllm", "url": url, "tokenizer": str(tokenizer), "max_sequences": sequences}
        await Play(stage, api).run(ServerEngineSettings.model_validate(engine))
