"""One run: undisturbed answers first, then the same questions under faults, then the comparison."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from sqlalchemy.ext.asyncio import AsyncEngine

from ledger.check import check_rollups
from protocol import subjects
from tests.chaos import faults, server_faults, upstream_faults  # noqa: F401 - they register theirs
from tests.chaos.agreement import Agreement, ask_each_make, judge_disputed
from tests.chaos.handovers import judge_handovers
from tests.chaos.ledger import LedgerRow, settled_rows, still_open
from tests.chaos.load import Call, Load
from tests.chaos.mix import Question, questions
from tests.chaos.older import NEW_SUMS
from tests.chaos.report import (
    Report,
    accepted_ids,
    judge_answers,
    judge_endings,
    judge_gaps,
    judge_ledger,
    judge_poisoned,
    measure_gaps,
)
from tests.chaos.rescues import judge_rescues
from tests.chaos.scenarios import Scenario
from tests.chaos.strikes import FAULTS, Chaos
from tests.chaos.system import MODEL, System
from tests.chaos.watcher import Run

IDLE_LIMIT_S = 15.0  # after the last answer, nothing may go on running for nobody
SHUTTLE_S = 2.0  # load goes on after the last fault
REAL_SERVER_TOKENS = (150, 350)  # they make short answers of a small model faster than one can strike
Progress = Callable[[str, int, int], None]  # what, done, of how many


def no_progress(_what: str, _done: int, _of: int) -> None:
    """Report no progress."""


class ChaosError(Exception):
    """The run itself went wrong, before any promise could be tested."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a run. The same plan gives the same kinds of fault in the same order with the same pauses."""

    name: str
    scenario: Scenario
    seed: int
    faults: int
    distinct: int = 48  # different questions
    kinds: tuple[str, ...] = ()  # instead of drawing them by the scenario's weights

    def schedule(self) -> list[tuple[str, float]]:
        """The faults in order, each with the time to wait before it."""
        rng = random.Random(f"schedule {self.seed}")
        scenario = self.scenario
        in_turn = tuple(itertools.islice(itertools.cycle(scenario.weights), self.faults)) if scenario.in_turn else ()
        kinds = (
            self.kinds or in_turn or rng.choices(list(scenario.weights), list(scenario.weights.values()), k=self.faults)
        )
        return [(kind, rng.uniform(0.5, 1.5) * scenario.every_s) for kind in kinds]


async def run(plan: Plan, folder: Path, progress: Progress = no_progress) -> Report:
    """Run a plan in an empty folder. Raises ChaosError if the system does not even work undisturbed."""
    began_s = time.monotonic()
    shape = plan.scenario.shape
    is_scripted = shape.engine == "scripted" and not shape.servers
    asked = _questions(plan, folder)
    async with System(folder, shape) as system:
        load = Load(system.port, system.api_key, lambda: system.gateway_killed_s)
        try:
            agreement = await _undisturbed(system, load, asked, plan.scenario.callers, progress)
        except (ChaosError, TimeoutError) as error:
            raise ChaosError("\n".join([str(error), *system.log_lines("")])) from error
        before = len(load.calls)
        chaos = Chaos(system, load, random.Random(f"faults {plan.seed}"), asked=asked)
        load.start(asked, plan.scenario.callers, plan.seed)
        load_began_s = time.monotonic()
        await _strike_all(chaos, plan, progress)
        load_s = time.monotonic() - load_began_s
        report = Report(plan.name, plan.seed, len(chaos.strikes))
        report.orphans = await system.watcher.wait_until_idle(set(system.farm.live), IDLE_LIMIT_S)
        if report.orphans:
            report.offend(f"{report.orphans} requests still run for nobody {IDLE_LIMIT_S:g} s after the last answer")
        await _reckon(report, chaos, load.calls[before:], agreement, exact_logprobs=is_scripted)
        if plan.scenario.asks is not None:
            at_least = round(plan.scenario.rescued_per_fault * plan.faults)
            judge_rescues(report, chaos.strikes, load.calls[before:], system.watcher, at_least=at_least)
        report.extras |= agreement.summary()
        judge_gaps(report, plan.scenario.gap_limits_ms)
        report.extras["requests_per_s"] = round(len(load.calls[before:]) / load_s)
        report.extras["workers_started"] = system.farm.started
        report.extras["in_flight_min"] = min((strike.in_flight for strike in chaos.strikes), default=0)
        report.duration_s = time.monotonic() - began_s
        add_log_lines(report, system.log_lines, system.watcher.runs)
    return report


def _questions(plan: Plan, folder: Path) -> list[Question]:
    scenario = plan.scenario
    if scenario.asks is not None:
        return scenario.asks(plan.seed, plan.distinct, MODEL, folder)
    shape, is_real = scenario.shape, scenario.needs_real_servers
    return questions(
        plan.seed,
        plan.distinct,
        MODEL,
        scripted=shape.engine == "scripted" and not shape.servers,
        tokens=REAL_SERVER_TOKENS if is_real else scenario.answer_tokens,
        greedy=is_real,
        surfaces=scenario.surfaces and not shape.servers,
        background=scenario.background,
    )


async def _undisturbed(
    system: System, load: Load, asked: list[Question], callers: int, progress: Progress
) -> Agreement:
    """Ask everything while nothing is broken, where there are several makes of engine: of each alone."""
    progress("undisturbed", 0, len(asked))
    if not system.servers:
        await load.wait_until_served(asked[0], system.gateway_ports)
        calls = await load.ask_all(asked, min(callers, len(asked)))
        agreement = Agreement({system.shape.engine: {call.question.number: call for call in calls}})
    else:
        agreement = await ask_each_make(system, load, asked, callers)
    for call in agreement.all_calls():
        if call.answer is None:
            raise ChaosError(f"undisturbed, and yet: {call.error}\n{call.question}")
    for pool in system.pools if system.servers else []:
        if pool != system.shape.standing_by:
            await system.start_pool(pool)
    progress("undisturbed", len(asked), len(asked))
    return agreement


async def _strike_all(chaos: Chaos, plan: Plan, progress: Progress) -> None:
    schedule = plan.schedule()
    for number, (kind, wait_s) in enumerate(schedule):
        progress(plan.name, number, len(schedule))
        await asyncio.sleep(wait_s)
        await FAULTS[kind](chaos)
    progress(plan.name, len(schedule), len(schedule))
    await asyncio.gather(*chaos.left_running)
    await asyncio.sleep(SHUTTLE_S)
    await chaos.load.finish()


async def _reckon(
    report: Report, chaos: Chaos, calls: list[Call], agreement: Agreement, *, exact_logprobs: bool
) -> None:
    system, everything = chaos.system, chaos.load.calls
    poisoned = [task.result() for task in chaos.poisoned]
    own_errors = [ending.call for ending in chaos.endings if ending.wrong.wishes == "own error"]
    calls = [call for call in calls if call not in poisoned and call not in own_errors]
    oracle = agreement.settled()
    judge_answers(report, [c for c in calls if c.question.number in oracle], oracle, exact_logprobs=exact_logprobs)
    judge_disputed(report, [c for c in calls if c.question.number not in oracle], agreement)
    if system.servers:
        judge_handovers(report, [call for call in everything if call.answer], system.watcher.made)
    judge_endings(report, chaos.endings, oracle)
    measure_gaps(report, chaos.strikes, calls, system.watcher)
    unknown = NEW_SUMS if system.shape.older else frozenset[str]()
    await reckon_ledger(report, system.database, everything, agreement, not_compared=unknown)
    if poisoned:
        state = (await system.bus.api(f"STREAM.INFO.{subjects.DEAD_LETTER_STREAM}"))["state"]
        judge_poisoned(report, poisoned, int(state["messages"]))


async def reckon_ledger(
    report: Report,
    database: AsyncEngine,
    everything: list[Call],
    agreement: Agreement,
    *,
    not_compared: frozenset[str] = frozenset(),
) -> dict[str, LedgerRow]:
    """Compare the ledger with all that was asked; returns its rows by request.

    Of rollups, the figures of ``not_compared`` may differ.
    """
    oracle = agreement.settled()
    found = await settled_rows(database, accepted_ids(everything))
    rows = {row.request_id: row for row in found}
    if accepted_ids(everything) - rows.keys():
        report.extras["still_open"] = sorted(await still_open(database))
    if len(found) != len(rows):  # PostgreSQL's key has the time in it
        report.offend(f"{len(found) - len(rows)} requests have a second row")
    tokens_of: dict[int, int] = {}
    for call in agreement.all_calls():
        row, number = rows.get(call.request_id or ""), call.question.number
        if row is not None and number in oracle:
            tokens_of[number] = row.completion_tokens
        usage = call.answer.usage if call.answer else None
        if usage is not None and (row is None or usage["completion_tokens"] != row.completion_tokens):
            report.offend("an undisturbed answer's usage and its ledger row differ", call.request_id)
    judge_ledger(report, everything, rows, tokens_of)
    for day in await check_rollups(database):
        if differing := set(day.columns) - not_compared:
            report.offend(f"{day.wrong} rollups are not what the rows add up to: {sorted(differing)}")
    return rows


def add_log_lines(
    report: Report, log_lines: Callable[[str], list[str]], runs: Mapping[str, Sequence[Run]] = MappingProxyType({})
) -> None:
    """Give the first offences what the processes said about them, while their logs are still there."""
    if report.offences and (died := "\n".join(log_lines('"critical"'))):
        report.offend("processes complained", details=died)
    for number, offence in enumerate(report.offences[:3]):
        if offence.request_id is not None:
            seen = "\n".join(map(str, runs.get(offence.request_id, ())))
            lines = "\n".join(log_lines(offence.request_id))
            report.offences[number] = replace(offence, details=f"{offence.details}\n{seen}\n{lines}")
