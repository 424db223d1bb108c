"""Defines, runs and judges load scenarios."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.load_scenarios.callers import Callers
from tests.chaos.report import Report
from tests.chaos.run import IDLE_LIMIT_S, Progress, add_log_lines, no_progress
from tests.chaos.system import Shape, System

PROGRESS_PERIOD_S = 0.5


@dataclass(frozen=True)
class LoadPlan:
    """The duration, the amounts and the bounds of a load scenario."""

    name: str
    seed: int
    seconds: float  # that the load is offered
    count: int = 0  # of what the scenario does again and again
    trace: Path | None = None  # what the world does, where a scenario can follow a recorded one
    slack: float = 1.0  # bounds on times and shares are so much wider: a test asks whether it works, not how well


@dataclass(frozen=True)
class Stage:
    """The context of a load scenario."""

    system: System
    callers: Callers
    plan: LoadPlan
    report: Report


@dataclass(frozen=True)
class LoadScenario:
    """One kind of load. ``seconds`` and ``count`` are those of the published figures."""

    about: str
    shape: Shape
    play: Callable[[Stage], Coroutine[Any, Any, None]]
    seconds: float
    count: int = 0


@dataclass(frozen=True)
class Ceiling:
    """The maximum rate of scripted engines, with answers of a given length."""

    shape: Shape
    tokens: int

    @property
    def service_s(self) -> float:
        """The seconds that an answer takes once it runs."""
        return self.tokens * self.shape.inter_token_s

    @property
    def tokens_per_s(self) -> float:
        """With every slot taken."""
        return self.shape.workers * self.shape.max_sequences / self.shape.inter_token_s

    @property
    def requests_per_s(self) -> float:
        """Likewise."""
        return self.tokens_per_s / self.tokens


async def run_load(scenario: LoadScenario, plan: LoadPlan, folder: Path, progress: Progress = no_progress) -> Report:
    """Play a scenario in an empty folder, and judge all answers, what still runs, and the ledger."""
    report = Report(plan.name, plan.seed, 0)
    async with System(folder, scenario.shape) as system:
        callers = Callers(system, plan.seed)
        await callers.listen()
        if scenario.shape.workers:
            await callers.wait_until_served()
        ticker = asyncio.create_task(_tell_progress(callers, plan.name, progress))
        try:
            await scenario.play(Stage(system, callers, plan, report))
        finally:
            ticker.cancel()
        await expect_idle(report, system)
        await callers.reckon(report)
        add_log_lines(report, system.log_lines, system.watcher.runs)
    return report


async def _tell_progress(callers: Callers, name: str, progress: Progress) -> None:
    while True:
        progress(name, len(callers.asked), callers.started)
        await asyncio.sleep(PROGRESS_PERIOD_S)


def expect(report: Report, name: str, value: float | None, *, at_most: float) -> None:
    """Put a figure and its bound into the report; beyond the bound, or without a figure, it is a broken promise."""
    report.extras[name] = None if value is None else round(value, 3)
    report.extras[f"{name}_limit"] = round(at_most, 3)
    if value is None:
        report.offend(f"nothing was measured for {name}")
    elif not value <= at_most:
        report.offend(f"{name} is {value:.3f}, and may be {at_most:.3f} at most")


async def expect_idle(report: Report, system: System) -> None:
    """Nothing may go on running for nobody."""
    orphans = await system.watcher.wait_until_idle(set(system.farm.live), IDLE_LIMIT_S)
    report.orphans += orphans
    if orphans:
        report.offend(f"{orphans} requests still run for nobody {IDLE_LIMIT_S:g} s after the last answer")
