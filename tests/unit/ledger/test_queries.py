"""Queries of dashboards: the rollups answer as the rows do when read one by one."""

import asyncio
import math
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from db.engine import create_engine
from db.money import Price
from db.prices import add_price
from db.tables import InstanceRow
from ledger.check import check_rollups
from ledger.queries.cost import costs, hosted_costs
from ledger.queries.distributions import distributions, merge, percentile_series, percentiles
from ledger.queries.reading import rollup_coverage
from ledger.queries.traffic import OTHER, Series, Traffic, choices, heat_map, series, totals
from ledger.queries.traffic import merge as all_traffic
from ledger.queries.window import DAY_MS, HOUR_MS, MINUTE_MS, QUARTER_MS, Step, TooManySteps, Window
from ledger.rollups import delete_minutes
from ledger.store import store_records
from protocol.usage import RequestRecord
from tests.postgres import TEMPLATE, PostgresServer
from tests.usage_records import request_record

KOLKATA, BERLIN, KATHMANDU = ZoneInfo("Asia/Kolkata"), ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kathmandu")
NEW_YORK = ZoneInfo("America/New_York")  # its days begin early in UTC's, those of Kolkata late
# Clocks went back in Berlin on 25 October 2026, at 1:00 UTC.
START_UNIX_MS = int(datetime(2026, 10, 23, tzinfo=UTC).timestamp()) * 1000
DAYS = 4


def any_request(source: random.Random, number: int) -> RequestRecord:
    return request_record(
        f"r{number}",
        received_unix_ms=START_UNIX_MS + source.randrange(DAYS * DAY_MS),
        model=source.choice(["small", "small", "large"]),
        team_id=source.choice(["team_a", "team_b", "team_c"]),
        outcome=source.choice(["ok", "ok", "ok", "failed"]),
        attempts=source.choice([1, 1, 1, 3]),
        prompt_tokens=round(source.lognormvariate(5, 1)) + 1,
        completion_tokens=source.randrange(2, 300),
        ttft_ms=source.lognormvariate(5, 1),
        total_ms=source.lognormvariate(7, 1) + 5000,
        pool=source.choice(["spot", "dear"]),
    )


RECORDS = [any_request(random.Random(number), number) for number in range(500)]
ALL = Window(START_UNIX_MS, START_UNIX_MS + DAYS * DAY_MS)


async def _fill(url: str) -> None:
    engine = create_engine(url)
    await store_records(engine, RECORDS)
    await engine.dispose()


@pytest.fixture(scope="module")
def filled_sqlite(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with RECORDS to copy."""
    path = Path(shutil.copy(migrated_sqlite, tmp_path_factory.mktemp("queries") / "filled.db"))
    asyncio.run(_fill(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="module")
def filled_postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """The name of a database with RECORDS to copy."""
    name = postgres_server.new_database(template=TEMPLATE)
    asyncio.run(_fill(postgres_server.url(name)))
    yield name
    postgres_server.drop_database(name)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def filled_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database with RECORDS of the test's own; the test runs once for each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{shutil.copy(request.getfixturevalue('filled_sqlite'), tmp_path / 'spillway.db')}"
        return
    template, server = request.getfixturevalue("filled_postgres"), request.getfixturevalue("postgres_server")
    name = server.new_database(template=template)
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
async def connection(filled_url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_engine(filled_url)
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


def days_in(zone: tzinfo) -> Counter[str]:
    return Counter(str(datetime.fromtimestamp(r.received_unix_ms / 1000, zone).date()) for r in RECORDS)


async def test_totals_by_two_dimensions_and_filters(connection: AsyncConnection) -> None:
    found = await totals(connection, ALL, by=("model", "outcome"), where={"team": ["team_a", "team_b"]})
    expected: dict[tuple[str, ...], list[RequestRecord]] = defaultdict(list)
    for record in RECORDS:
        if record.team_id != "team_c":
            expected[record.model, record.outcome].append(record)
    assert {row.group: (row.requests, row.tokens, row.failovers) for row in found} == {
        group: (
            len(records),
            sum(record.prompt_tokens + record.completion_tokens for record in records),
            sum(record.attempts - 1 for record in records),
        )
        for group, records in expected.items()
    }
    assert [row.requests for row in found] == sorted((row.requests for row in found), reverse=True)


async def test_a_window_inside_hours_counts_what_is_in_it_and_nothing_else(connection: AsyncConnection) -> None:
    for since, until in ((5, 6), (3, 9), (1, 250), (97, 300), (0, 96)):
        window = Window(START_UNIX_MS + since * QUARTER_MS, START_UNIX_MS + until * QUARTER_MS)
        expected = sum(window.since_unix_ms <= r.received_unix_ms < window.until_unix_ms for r in RECORDS)
        assert (await totals(connection, window))[0].requests == expected


async def test_minutes_are_exact_until_they_are_deleted(filled_url: str) -> None:
    engine = create_engine(filled_url)
    windows = [
        Window(START_UNIX_MS + since * MINUTE_MS, START_UNIX_MS + until * MINUTE_MS, KOLKATA, MINUTE_MS)
        for since, until in ((7, 67), (7, 3 * 60), (15, 16), (1439, 1441), (2000, 2000 + 15))
    ]
    async with engine.connect() as connection:
        for window in windows:
            [line] = await series(connection, window, "minute") or [Series((), ())]
            steps = window.steps("minute")
            assert [len(steps), steps[0].until_unix_ms - steps[0].since_unix_ms] == [
                (window.until_unix_ms - window.since_unix_ms) // MINUTE_MS,
                MINUTE_MS,
            ]
            for step, point in zip(steps, line.points, strict=True):
                inside = [r for r in RECORDS if step.since_unix_ms <= r.received_unix_ms < step.until_unix_ms]
                assert point.requests == len(inside)
                [measured] = await percentiles(connection, step, "total_ms")
                assert measured.n == len(inside)
            inside = [r for r in RECORDS if window.since_unix_ms <= r.received_unix_ms < window.until_unix_ms]
            assert (await totals(connection, window))[0].requests == len(inside)
    await delete_minutes(engine, ALL.until_unix_ms)
    async with engine.connect() as connection:
        assert not (await totals(connection, windows[2]))[0].requests
        assert (await totals(connection, ALL))[0].requests == len(RECORDS)
        hours = [point.requests for line in await series(connection, ALL, "quarter") for point in line.points]
        assert sum(hours) == len(RECORDS)
    assert not any(day.wrong for day in await check_rollups(engine))
    await engine.dispose()


@pytest.mark.parametrize("zone", [UTC, KOLKATA, KATHMANDU, BERLIN, NEW_YORK])
async def test_days_are_the_viewers_also_when_clocks_change(connection: AsyncConnection, zone: tzinfo) -> None:
    window = Window(ALL.since_unix_ms, ALL.until_unix_ms, zone)
    [line] = await series(connection, window, "day")
    starts = [datetime.fromtimestamp(step.since_unix_ms / 1000, zone) for step in window.steps("day")]
    assert {str(at.date()): p.requests for at, p in zip(starts, line.points, strict=True)} == days_in(zone)
    assert all(at.hour == at.minute == 0 for at in starts[1:])
    lengths = Counter(step.until_unix_ms - step.since_unix_ms for step in window.steps("day")[1:-1])
    assert lengths == ({DAY_MS: 2, DAY_MS + HOUR_MS: 1} if zone is BERLIN else {DAY_MS: len(starts) - 2})


@pytest.mark.parametrize("zone", [KOLKATA, NEW_YORK])
async def test_days_that_begin_within_those_of_utc_are_exact_for_each_group(
    connection: AsyncConnection, zone: tzinfo
) -> None:
    window = Window(ALL.since_unix_ms + 5 * HOUR_MS, ALL.until_unix_ms - 7 * HOUR_MS + QUARTER_MS, zone)
    steps = window.steps("day")
    for line in await series(connection, window, "day", by=("team", "outcome"), where={"model": ["large"]}):
        for step, point in zip(steps, line.points, strict=True):
            asked = [r for r in RECORDS if step.since_unix_ms <= r.received_unix_ms < step.until_unix_ms]
            of_group = [r for r in asked if (r.model, r.team_id, r.outcome) == ("large", *line.group)]
            assert (point.requests, point.tokens) == (
                len(of_group),
                sum(r.prompt_tokens + r.completion_tokens for r in of_group),
            )


def test_a_month_of_days_off_utc_is_read_from_days_and_the_smaller_part_of_each() -> None:
    since = START_UNIX_MS - 5 * HOUR_MS - HOUR_MS // 2
    cover = rollup_coverage(Window(since, since + 30 * DAY_MS, KOLKATA).steps("day"), may_subtract=True)
    read = Counter[int]()
    for (width_s, _), ranges in cover.ranges.items():
        read[width_s] += sum(until - start for start, until in ranges) // (width_s * 1000)
    assert read == {86_400: 30, 3600: 31 * 5, 900: 31 * 2}


@pytest.mark.parametrize("zone", [KOLKATA, BERLIN])
async def test_hours_are_the_viewers_and_the_heat_map_has_them_all(connection: AsyncConnection, zone: tzinfo) -> None:
    window = Window(ALL.since_unix_ms, ALL.until_unix_ms, zone)
    expected = [[0] * 24 for _ in range(7)]
    for record in RECORDS:
        local = datetime.fromtimestamp(record.received_unix_ms / 1000, zone)
        expected[local.weekday()][local.hour] += 1
    assert await heat_map(connection, window) == expected
    # The hour that comes twice is two steps.
    twice = [s for s in window.steps("hour") if datetime.fromtimestamp(s.since_unix_ms / 1000, zone).hour == 2]
    assert len(twice) == DAYS + (zone is BERLIN)


async def test_a_series_of_few_figures_is_the_whole_one_without_the_others(connection: AsyncConnection) -> None:
    for names in (("failovers",), ("ok", "prompt_tokens")):
        [line] = await series(connection, ALL, "hour", names=names)
        [whole] = await series(connection, ALL, "hour")
        kept = {"group", "requests", *names}
        left: dict[str, Any] = {name: 0 for name in Traffic.__dataclass_fields__ if name not in kept}
        assert line.points == tuple(replace(point, **left) for point in whole.points)
    assert all_traffic(await totals(connection, ALL, by=("team",), top=1)) == (await totals(connection, ALL))[0]


async def test_what_top_n_leaves_is_one_group(connection: AsyncConnection) -> None:
    every = await totals(connection, ALL, by=("team", "model"))
    top = await totals(connection, ALL, by=("team", "model"), top=2)
    assert top[:2] == every[:2]
    assert top[2].group == (OTHER, OTHER)
    assert sum(row.requests for row in top) == len(RECORDS)
    lines = await series(connection, ALL, "hour", by=("team",), top=1, order="tokens")
    assert [len(line.points) for line in lines] == [DAYS * 24] * 2
    assert sum(point.requests for line in lines for point in line.points) == len(RECORDS)


async def test_percentiles_are_within_two_percent_of_the_nearest_rank(connection: AsyncConnection) -> None:
    for row in await percentiles(connection, ALL, "ttft_ms", by=("model",), percents=(1, 50, 95, 99, 100)):
        values = sorted(record.ttft_ms or 0.0 for record in RECORDS if record.model == row.group[0])
        assert row.n == len(values)
        exact = [values[max(1, math.ceil(row.n * percent / 100)) - 1] for percent in (1, 50, 95, 99, 100)]
        assert row.values == pytest.approx(exact, rel=0.02)


async def test_percentiles_over_time_and_of_nothing(connection: AsyncConnection) -> None:
    window = Window(ALL.since_unix_ms, ALL.until_unix_ms + DAY_MS, KOLKATA)
    [line] = await percentile_series(connection, window, "day", "tpot_ms")
    ok_days = Counter(
        str(datetime.fromtimestamp(r.received_unix_ms / 1000, KOLKATA).date()) for r in RECORDS if r.outcome == "ok"
    )
    assert [point.n for point in line.points if point.n] == [ok_days[day] for day in sorted(ok_days)]
    assert line.points[-1].values == (None, None, None)


async def test_several_measures_at_once_are_what_each_is_alone_and_groups_make_up_the_whole(
    connection: AsyncConnection,
) -> None:
    found = await distributions(connection, ALL, ["total_ms", "prompt_tokens"], by=("team", "pool"))
    for measure, groups in found.items():
        alone = await percentiles(connection, ALL, measure, by=("team", "pool"))
        assert [one.percentiles() for one in groups] == alone
        assert [merge(groups).percentiles()] == await percentiles(connection, ALL, measure)
        assert len(groups) == 6


async def test_lengths_by_powers_of_two(connection: AsyncConnection) -> None:
    [found] = (await distributions(connection, ALL, ["completion_tokens"]))["completion_tokens"]
    histogram = found.lengths()
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert sum(histogram.counts) == len(RECORDS)
    expected = Counter(next(e for e in histogram.edges[1:] if r.completion_tokens <= e) for r in RECORDS)
    for edge, count in zip(histogram.edges[1:], histogram.counts, strict=True):
        assert abs(count - expected[edge]) <= 0.03 * len(RECORDS)  # values near an edge may be on either side


async def test_filters_can_offer_what_there_is(connection: AsyncConnection) -> None:
    found = await choices(connection, ALL)
    assert (found["model"], found["pool"], found["tier"]) == (["large", "small"], ["dear", "spot"], [])


def test_a_series_of_too_many_points_is_refused() -> None:
    with pytest.raises(TooManySteps):
        Window(0, 365 * DAY_MS).steps("quarter")


def quarter(pool: str, worker: str, number: int, busy_ms: int, usd_per_hour: float) -> dict[str, object]:
    start = START_UNIX_MS + number * QUARTER_MS
    return {
        "bucket_unix_ms": start,
        "worker_id": worker,
        "pool": pool,
        "provider": "local",
        "region": "here",
        "tier": "",
        "up_from_unix_ms": start,
        "up_until_unix_ms": start + QUARTER_MS,
        "busy_from_ms": number * QUARTER_MS,
        "busy_until_ms": number * QUARTER_MS + busy_ms,
        "nano_usd_per_hour": round(usd_per_hour * 1e9),
        "on_demand_nano_usd_per_hour": 4_000_000_000 if pool == "spot" else None,
    }


async def test_cost_has_the_idle_time_in_it(connection: AsyncConnection) -> None:
    rows = [quarter("spot", f"w{n % 2}", n // 2, QUARTER_MS // 4, 1.0) for n in range(8)]  # two workers for an hour
    rows.append(quarter("unused", "w9", 0, 0, 8.0))
    await connection.execute(insert(InstanceRow), rows)
    await add_price(connection, "large", "dear", Price(2_000_000_000, None, 4_000_000_000), from_unix_ms=0, source="x")
    pools, of_models = await costs(connection, ALL)
    spot, dear, unused = [next(cost for cost in pools if cost.pool == name) for name in ("spot", "dear", "unused")]
    assert (spot.machine_nano_usd, spot.up_ms, spot.idle_share) == (2_000_000_000, 2 * HOUR_MS, 0.75)
    assert spot.saving_nano_usd == 6_000_000_000
    assert (unused.cost_nano_usd, unused.idle_share, unused.saving_nano_usd) == (2_000_000_000, 1.0, None)
    in_dear = [record for record in RECORDS if (record.pool, record.model) == ("dear", "large")]
    tokens = (sum(r.prompt_tokens for r in in_dear), sum(r.completion_tokens for r in in_dear))
    assert dear.token_nano_usd == tokens[0] * 2000 + tokens[1] * 4000

    models = {(cost.pool, cost.model): cost for cost in of_models}
    assert set(models) == {(p, m) for p in ("spot", "dear") for m in ("small", "large")} | {("unused", "")}
    shares = [models["spot", "small"], models["spot", "large"]]
    assert sum(cost.cost_nano_usd for cost in shares) == pytest.approx(2_000_000_000, abs=1)
    assert sum(cost.idle_nano_usd for cost in shares) == pytest.approx(1_500_000_000, abs=1)
    per_1k = {cost.nano_usd_per_1k_tokens or 0 for cost in shares}
    assert max(per_1k) - min(per_1k) <= 1  # a machine's token is a machine's token
    assert models["dear", "large"].cost_nano_usd == dear.token_nano_usd  # its own price, not its share of the tokens
    assert models["dear", "small"].cost_nano_usd == 0


async def test_time_without_an_on_demand_price_is_left_out_of_the_saving_and_nothing_else(
    connection: AsyncConnection,
) -> None:
    rows = [quarter("spot", "w0", n, 0, 1.0) for n in range(3)]
    rows[0]["on_demand_nano_usd_per_hour"] = None  # before its price was entered
    await connection.execute(insert(InstanceRow), rows)
    [spot] = [cost for cost in (await costs(connection, ALL))[0] if cost.pool == "spot"]
    assert (spot.up_ms, spot.machine_nano_usd) == (3 * QUARTER_MS, 750_000_000)
    assert (spot.compared_ms, spot.compared_nano_usd) == (2 * QUARTER_MS, 500_000_000)
    assert (spot.on_demand_nano_usd, spot.saving_nano_usd) == (2_000_000_000, 1_500_000_000)


async def test_no_token_is_paid_twice_where_a_price_changes_within_a_quarter(connection: AsyncConnection) -> None:
    in_dear = [record for record in RECORDS if (record.pool, record.model) == ("dear", "large")]
    changed = in_dear[0].received_unix_ms // QUARTER_MS * QUARTER_MS + 1
    for from_unix_ms in (0, changed, changed + 1):
        price = Price(2_000_000_000, None, 4_000_000_000)
        await add_price(connection, "large", "dear", price, from_unix_ms=from_unix_ms, source="x")
    pools, _ = await costs(connection, ALL)
    [dear] = [cost for cost in pools if cost.pool == "dear"]
    assert dear.token_nano_usd == sum(2000 * r.prompt_tokens + 4000 * r.completion_tokens for r in in_dear)


@pytest.mark.parametrize(("step", "zone"), [("quarter", UTC), ("hour", KATHMANDU), ("day", BERLIN)])
async def test_what_hosted_tokens_cost_over_time_adds_up_to_their_cost(
    connection: AsyncConnection, step: Step, zone: tzinfo
) -> None:
    changed = START_UNIX_MS + DAY_MS + 7 * QUARTER_MS + 1  # within a step of each width
    for model, from_unix_ms, factor in (("large", 0, 1), ("large", changed, 3), ("small", changed, 1)):
        price = Price(factor * 2_000_000_000, None, factor * 4_000_000_000)
        await add_price(connection, model, "dear", price, from_unix_ms=from_unix_ms, source="x")
    window = Window(ALL.since_unix_ms, ALL.until_unix_ms, zone)
    steps = window.steps(step)
    found = await hosted_costs(connection, steps)
    [dear] = [cost for cost in (await costs(connection, window))[0] if cost.pool == "dear"]
    assert len(found) == len(steps)
    assert sum(found) == dear.token_nano_usd > 0
    number = next(number for number, cost in enumerate(found) if cost)
    [alone] = await hosted_costs(connection, [steps[number]])
    assert alone == found[number]
    of_large = await hosted_costs(connection, steps, where={"model": ("large",)})
    of_small = await hosted_costs(connection, steps, where={"model": ("small",), "pool": ("dear",)})
    assert [sum(both) for both in zip(of_large, of_small, strict=True)] == found
    assert not any(await hosted_costs(connection, steps, where={"pool": ("spot",)}))
    assert [cost.pool for cost in (await costs(connection, window, where={"pool": ("spot",)}))[0]] == []
