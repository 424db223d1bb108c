"""Percentiles have the steps of the page's other charts, also where several steps share a value."""

from collections.abc import AsyncIterator, Sequence

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart
from console.dashboard.latency import latency_chart
from console.dashboard.view import View, make_view
from db.engine import create_engine
from ledger.queries.window import DAY_MS, HOUR_MS, QUARTER_MS
from ledger.store import store_records
from tests.usage_records import request_record

NOW_MS = 1_800_000_000_000 // DAY_MS * DAY_MS
SINCE_MS = NOW_MS - DAY_MS


@pytest.fixture
async def connection(sqlite_url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_engine(sqlite_url)
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


async def chart_of(connection: AsyncConnection, per_quarter: int) -> Chart:
    """A day with so many requests in each quarter of an hour, whose TTFT is 100 ms times their hour."""
    received: Sequence[int] = [SINCE_MS + quarter * QUARTER_MS for quarter in range(96) for _ in range(per_quarter)]
    records = [
        request_record(f"r{n}", received_unix_ms=at, ttft_ms=100.0 * (1 + (at - SINCE_MS) // HOUR_MS))
        for n, at in enumerate(received)
    ]
    await store_records(connection.engine, records)
    view: View = make_view({"since": str(SINCE_MS), "until": str(NOW_MS)}, {}, NOW_MS)
    return (await latency_chart(connection, view, "ttft_ms"))["chart"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("per_quarter", "title"), [(40, ""), (10, ", by hour")])
async def test_a_chart_of_percentiles_has_the_steps_of_its_view(
    connection: AsyncConnection, per_quarter: int, title: str
) -> None:
    chart = await chart_of(connection, per_quarter)
    assert chart.title == f"Time to first token (TTFT){title}"
    assert [step.since_unix_ms for step in chart.steps] == [SINCE_MS + n * QUARTER_MS for n in range(96)]
    p50 = chart.lines[0]
    assert p50.values == pytest.approx([100.0 * (1 + n // 4) for n in range(96)], rel=0.02)
    assert p50.stepped == bool(title)


async def test_too_few_values_for_a_percentile_leave_a_gap(connection: AsyncConnection) -> None:
    chart = await chart_of(connection, 0)
    assert chart.is_empty
    assert len(chart.lines[0].values) == len(chart.steps) == 96
