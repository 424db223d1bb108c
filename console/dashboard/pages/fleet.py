"""Fleet: decided beside serving machines, each decision with its reason, and the requests that each loss affected."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard import formats
from console.dashboard.charts import Chart, Line
from console.dashboard.view import View
from db.tables import Decision
from ledger.queries.fleet import (
    FleetMachine,
    LossCost,
    decided_before,
    decisions,
    loss_costs,
    machines,
)
from ledger.queries.window import Window

MAX_DECISIONS: Final = 5000  # for the chart
MAX_ROWS: Final = 100  # of each table
LOST: Final = "lost"
STARTING: Final = frozenset({"wanted", "launched"})
LEAVING: Final = frozenset({"draining", "ending"})


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool's size at the end of the time span."""

    pool: str
    decided: int | None
    serving: int
    starting: int
    leaving: int
    lost: int  # in the time span
    failed: int
    reason: str
    decided_unix_ms: int | None


@dataclass(frozen=True, slots=True)
class Loss:
    """A machine that its provider took back, and the requests that this affected."""

    machine: FleetMachine
    cost: str


async def fleet(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """Return the values of fleet.html."""
    window = view.window
    there = await machines(connection, window)
    decided = await decisions(connection, window, MAX_DECISIONS)
    before = await decided_before(connection, window)
    lost = [machine for machine in there if machine.state == LOST][:MAX_ROWS]
    costs = await loss_costs(connection, [machine.worker_id for machine in lost if machine.worker_id])
    steps = window.steps(view.step)
    return {
        "page": "Fleet",
        "pools": _sizes(there, decided, before),
        "losses": [Loss(machine, _in_words(costs.get(machine.worker_id or "", LossCost()))) for machine in lost],
        "decisions": decided[:MAX_ROWS],
        "chart": Chart(
            "Machines",
            "machines",
            steps,
            [
                Line("serving", _serving(there, steps), 1, fill=True),
                Line("decided", _decided(decided, before, steps), 2),
            ],
            view,
        ),
    }


def _sizes(there: Sequence[FleetMachine], decided: Sequence[Decision], before: dict[str, int]) -> list[PoolSize]:
    latest: dict[str, Decision] = {}
    for newer in decided:  # the latest first
        latest.setdefault(newer.pool, newer)
    sizes = []
    for pool in sorted({machine.pool for machine in there} | latest.keys() | before.keys()):
        states = Counter(machine.state for machine in there if machine.pool == pool)
        decision = latest.get(pool)
        sizes.append(
            PoolSize(
                pool,
                before.get(pool) if decision is None else decision.size,
                states["serving"],
                sum(states[state] for state in STARTING),
                sum(states[state] for state in LEAVING),
                states[LOST],
                states["failed"],
                "" if decision is None else decision.reason,
                None if decision is None else decision.decided_unix_ms,
            )
        )
    return sizes


def _serving(there: Iterable[FleetMachine], steps: Sequence[Window]) -> list[float]:
    """Return how many machines served in each step, on average."""
    served_ms = [0.0 for _ in steps]
    for machine in there:
        if machine.serving_unix_ms is None:
            continue
        for number, step in enumerate(steps):
            until_ms = step.until_unix_ms if machine.over_unix_ms is None else machine.over_unix_ms
            until_ms = min(until_ms, step.until_unix_ms)
            served_ms[number] += max(0, until_ms - max(machine.serving_unix_ms, step.since_unix_ms))
    return [ms / (step.until_unix_ms - step.since_unix_ms) for ms, step in zip(served_ms, steps, strict=True)]


def _decided(decided: Sequence[Decision], before: dict[str, int], steps: Sequence[Window]) -> list[float]:
    """Return the sum of all pools' decided sizes: the highest of each step."""
    sizes, coming, highest = dict(before), list(decided), []
    for step in steps:
        most = sum(sizes.values())
        while coming and coming[-1].decided_unix_ms < step.until_unix_ms:  # the earliest is the last
            decision = coming.pop()
            sizes[decision.pool] = decision.size
            most = max(most, sum(sizes.values()))
        highest.append(float(most))
    return highest


def _in_words(cost: LossCost) -> str:
    """Describe what a loss affected: ``0 requests``, ``3 requests, 31 ms``, ``3 requests, 1 of them failed``."""
    words = [f"{cost.requests} request{'' if cost.requests == 1 else 's'}"]
    if cost.pause_ms is not None:
        words.append(formats.duration(cost.pause_ms))
    if cost.failed:
        words.append(f"{cost.failed} of them failed")
    return ", ".join(words)
