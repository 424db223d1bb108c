"""What a load scenario is, and how its figures are judged."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.report import Report


@dataclass(frozen=True)
class LoadPlan:
    """How long, how many, how strictly."""

    name: str
    seed: int
    seconds: float  # that the load is offered
    count: int = 0  # of what the scenario does again and again
    slack: float = 1.0  # bounds on times and shares are so much wider: a test asks whether it works, not how well


@dataclass(frozen=True)
class LoadScenario:
    """One kind of load. ``seconds`` and ``count`` are those of the published figures."""

    about: str
    run: Callable[[Path, LoadPlan], Coroutine[Any, Any, Report]]
    seconds: float
    count: int = 0


def expect(report: Report, name: str, value: float, *, at_most: float) -> None:
    """Put a figure and its bound into the report; beyond the bound it is a broken promise."""
    report.extras[name] = round(value, 3)
    if not value <= at_most:
        report.offend(f"{name} is {value:.3f}, and may be {at_most:.3f} at most")
