"""Each kind of host killed, paused and cut off; a region at once; then an upgrade and a further model: nobody notices.

The exception is a stream of a gateway that is killed: it is cut, its caller asks again, and the ledger says "failed".
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.chaos.agreement import Agreement
from tests.chaos.hosts.installation import SECOND_MODEL, WORKERS_PER_REGION, Installation
from tests.chaos.ledger import LedgerRow
from tests.chaos.load import Call, Load
from tests.chaos.mix import Question, questions
from tests.chaos.report import Report, cut_replies, judge_answers, longest_pause_s, measure_gaps
from tests.chaos.run import IDLE_LIMIT_S, SHUTTLE_S, ChaosError, Progress, add_log_lines, no_progress, reckon_ledger
from tests.chaos.strikes import VICTIM_LIMIT_S, Strike
from tests.chaos.watcher import Watcher
from tests.waiting import HANGS_S

ABOUT: Final = "containers as hosts: each kind killed, paused, cut off; a region; an upgrade and a model under load"
MODEL: Final = "spillway-demo"
CALLERS: Final = 8
DISTINCT: Final = 48  # different questions, beside the long ones
LONG: Final = 4  # that take longer than a gateway is away
AWAY_S: Final = (2.0, 9.0)
CHANGE_REQUESTS: Final = 500  # that are asked during the upgrade, and during the model change, at least
HOSTS: Final = {
    "worker": ("worker", "worker-b"),
    "gateway": ("gateway-1", "gateway-2"),
    "queue server": ("nats", "nats-b", "nats-c"),
    "database": ("postgres",),
}
REGIONS: Final = ("worker", "worker-b")
WORKERS: Final = WORKERS_PER_REGION * len(REGIONS)

LOSSES: Final = {"killed": Installation.kill, "paused": Installation.pause, "cut off": Installation.cut_off}
LOST: Final = [(what, how) for how in LOSSES for what in HOSTS]  # in this order, again and again
HOSTS_FAULTS: Final = len(LOST)


@dataclass(frozen=True)
class HostsPlan:
    """The parameters of a run. ``faults``: how many single hosts are lost, before the regions."""

    seed: int
    faults: int = HOSTS_FAULTS


@dataclass
class Stage:
    """The run so far."""

    installation: Installation
    load: Load
    rng: random.Random
    strikes: list[Strike] = field(default_factory=list)

    async def strike(self, kind: str) -> Strike:
        """Write down what happens from now on, once all hosts are back from what happened before."""
        await self.installation.wait_until_whole(WORKERS)
        async with asyncio.timeout(VICTIM_LIMIT_S):
            while not (streams := self.load.mid_stream(lambda _: True)):
                await asyncio.sleep(0.005)
        self.strikes.append(Strike(kind, time.monotonic(), None, streams, len(self.load.open)))
        return self.strikes[-1]


async def run_hosts(plan: HostsPlan, folder: Path, progress: Progress = no_progress) -> Report:
    """Run the scenario in an empty folder. Raises ChaosError if the installation does not even work undisturbed."""
    began_s = time.monotonic()
    asked = _questions(plan.seed)
    async with Installation(folder) as installation:
        load = Load(installation.port, installation.api_key, lambda: installation.gateway_killed_s)
        await load.wait_until_served(asked[0], [installation.port])
        agreement = Agreement({"scripted": {call.question.number: call for call in await load.ask_all(asked, CALLERS)}})
        if failed := [call.error for call in agreement.all_calls() if call.answer is None]:
            raise ChaosError(f"undisturbed, and yet: {failed[0]}")
        before = len(load.calls)
        stage = Stage(installation, load, random.Random(f"hosts {plan.seed}"))
        load.start(asked, CALLERS, plan.seed)
        second = await _disturb(stage, plan, progress)
        await asyncio.sleep(SHUTTLE_S)
        await load.finish()
        report = Report("hosts", plan.seed, len(stage.strikes))
        await _expect_idle(report, installation)
        await _reckon(report, stage, load.calls[before:], agreement)
        _judge_second_model(report, second)
        report.duration_s = time.monotonic() - began_s
        await installation.keep_logs()
        add_log_lines(report, installation.log_lines)
    return report


def _questions(seed: int) -> list[Question]:
    short = questions(seed, DISTINCT, MODEL, scripted=True, tokens=(30, 90))
    long = questions(seed + 1, LONG, MODEL, scripted=True, tokens=(700, 900))
    return short + [replace(question, number=DISTINCT + question.number) for question in long]


async def _disturb(stage: Stage, plan: HostsPlan, progress: Progress) -> Call:
    """Let everything happen; returns the question that was put to the added model."""
    lost = list(itertools.islice(itertools.cycle(LOST), plan.faults))
    for number, (what, how) in enumerate(lost):
        progress("hosts", number, len(lost))
        host = stage.rng.choice(await stage.installation.hosts(*HOSTS[what]))
        await _lose(stage, what, how, [host])
    progress("hosts", len(lost), len(lost))
    for number, how in enumerate(LOSSES):
        progress("regions", number, len(LOSSES))
        await _lose(stage, "region", how, await stage.installation.hosts(stage.rng.choice(REGIONS)))
    progress("regions", len(LOSSES), len(LOSSES))
    progress("changes", 0, 2)
    await _change(stage, "upgrade", stage.installation.roll)
    progress("changes", 1, 2)
    await _change(stage, "model added", stage.installation.add_second_model)
    progress("changes", 2, 2)
    message = {"role": "user", "content": "What is there to say? [[tokens=40]]"}
    body = {"model": SECOND_MODEL, "messages": [message], "stream": True}
    return await stage.load.ask(Question(-1, "/v1/chat/completions", body))


async def _lose(stage: Stage, what: str, how: str, hosts: Sequence[str]) -> None:
    """Lose these hosts at once for some seconds."""
    strike = await stage.strike(f"{what} {how}")
    mends = await asyncio.gather(*(LOSSES[how](stage.installation, host) for host in hosts))
    await asyncio.sleep(stage.rng.uniform(*AWAY_S))
    await asyncio.gather(*(mend() for mend in mends))
    strike.mended_s = time.monotonic()


async def _change(stage: Stage, kind: str, change: Callable[[], Awaitable[None]]) -> None:
    """Change something while requests are asked, many of them."""
    strike = await stage.strike(kind)
    asked = len(stage.load.calls)
    await change()
    async with asyncio.timeout(HANGS_S):
        while len(stage.load.calls) - asked < CHANGE_REQUESTS:
            await asyncio.sleep(0.1)
    strike.mended_s = time.monotonic()


# --- the verdict ------------------------------------------------------------------------------------------------------


async def _expect_idle(report: Report, installation: Installation) -> None:
    deadline_s = time.monotonic() + IDLE_LIMIT_S
    while (running := await installation.running()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
    report.orphans = running
    if running:
        report.offend(f"{running} requests still run for nobody {IDLE_LIMIT_S:g} s after the last answer")


async def _reckon(report: Report, stage: Stage, calls: list[Call], agreement: Agreement) -> None:
    oracle = agreement.settled()
    calls = [call for call in calls if call.question.number in oracle]
    judge_answers(report, calls, oracle, exact_logprobs=True)
    measure_gaps(report, stage.strikes, calls, Watcher())
    rows = await reckon_ledger(report, stage.installation.database, stage.load.calls, agreement)
    judge_cut(report, stage.load.calls, rows)
    for kind in dict.fromkeys(strike.kind for strike in stage.strikes):
        report.extras[kind] = told([strike for strike in stage.strikes if strike.kind == kind], calls)


def judge_cut(report: Report, calls: Sequence[Call], rows: dict[str, LedgerRow]) -> None:
    """Streams are cut by the death of their gateway only, and count as failed."""
    cut = [rows[reply.request_id] for reply in cut_replies(calls) if reply.request_id in rows]
    failed = [row for row in cut if row.outcome == "failed"]
    report.extras["cut_with_their_gateway"] = report.cut
    report.extras["of_these_accepted"] = len(cut)
    report.extras["of_these_failed_in_the_ledger"] = len(failed)
    for row in cut:
        if row.outcome != "failed":
            report.offend(f'cut with its gateway, and in the ledger as "{row.outcome}"', row.request_id)


def told(strikes: Sequence[Strike], calls: Sequence[Call]) -> str:
    """Return what callers saw of one kind of loss."""
    met = [call for call in calls if any(_meets(call, strike) for strike in strikes)]
    silences_s = [
        silence_s for strike in strikes for call in met if (silence_s := _silence_s(call, strike)) is not None
    ]
    away_s = max((strike.mended_s or strike.at_s) - strike.at_s for strike in strikes)
    failed, cut = sum(call.answer is None for call in met), len(cut_replies(met))
    return (
        f"up to {away_s:.1f} s: {len(met)} requests, {failed} failed, {cut} cut, "
        f"longest silence {max(silences_s, default=0.0):.1f} s"
    )


def _meets(call: Call, strike: Strike) -> bool:
    return call.replies[0].due_s < (strike.mended_s or strike.at_s) and call.reply.ended_s > strike.at_s


def _silence_s(call: Call, strike: Strike) -> float | None:
    """The longest time that a caller waited for more, around a loss."""
    moments_s = [call.replies[0].due_s, *call.arrivals(), call.reply.ended_s]
    return longest_pause_s(moments_s, strike.at_s, (strike.mended_s or strike.at_s))


def _judge_second_model(report: Report, call: Call) -> None:
    if call.answer is None:
        report.offend(f"the added model does not answer: {call.error}", call.request_id)
