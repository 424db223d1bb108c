from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from ledger.queries.log import Cursor, extreme_requests, request_history, request_page
from ledger.store import store_records
from tests.usage_records import attempt_record, request_record

START_MS = 1_700_000_000_000


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    # Three at a time in the same millisecond; every seventh fails.
    records = [
        request_record(
            request_id=f"r{number:03}",
            received_unix_ms=START_MS + number // 3,
            outcome="ok" if number % 7 else "failed",
            model=f"m{number % 2}",
            pool=None if number % 5 == 0 else "p",
        )
        for number in range(60)
    ]
    await store_records(engine, records)
    yield engine
    await engine.dispose()


async def all_pages(engine: AsyncEngine, limit: int, **rest: object) -> list[str]:
    found: list[str] = []
    after: Cursor | None = None
    async with engine.connect() as connection:
        for _ in range(200):
            page = await request_page(
                connection,
                START_MS,
                START_MS + 1000,
                after=after,
                limit=limit,
                **rest,  # type: ignore[arg-type]
            )
            assert len(page.requests) <= limit
            found += [row["request_id"] for row in page.requests]
            after = page.next
            if after is None:
                return found
    raise AssertionError("the pages do not end")


def newest_first(numbers: list[int]) -> list[str]:
    return [f"r{number:03}" for number in sorted(numbers, key=lambda number: (number // 3, number), reverse=True)]


@pytest.mark.parametrize("slice_rows", [1, 4, 1000])
@pytest.mark.parametrize("search_limit_s", [0.0, 5.0])
async def test_pages_hold_every_request_once(engine: AsyncEngine, slice_rows: int, search_limit_s: float) -> None:
    limits = {"slice_rows": slice_rows, "search_limit_s": search_limit_s}
    assert await all_pages(engine, 7, **limits) == newest_first(list(range(60)))
    failed = [number for number in range(60) if number % 7 == 0]
    assert await all_pages(engine, 2, where={"outcome": ("failed",)}, **limits) == newest_first(failed)
    both = [number for number in range(60) if number % 2 == 1 and number % 5 == 0]
    assert await all_pages(engine, 50, where={"model": ("m1",), "pool": ("",)}, **limits) == newest_first(both)
    assert await all_pages(engine, 50, where={"model": ("none such",)}, **limits) == []


@pytest.mark.parametrize("slice_rows", [1, 1000])
async def test_requests_of_a_tag_are_found_and_no_others(engine: AsyncEngine, slice_rows: int) -> None:
    of_tags: list[dict[str, str] | None] = [
        {"app": "search", "env": "prod"},
        {"app": "Search"},
        {"app": "search2"},
        {"my app": "search"},
        {"note": '"app":"search"'},
        {"note": '{"app":"search"', "run": ',"app":"search"'},
        {'x"app': "search"},
        {"env": "prod", "app": "search"},
        None,
        {"a:b": "c"},
        {"a": "b:c"},
        {"größe": '50 % "groß"'},
    ]
    rows = [request_record(f"t{n:02}", received_unix_ms=START_MS + 900, tags=tags) for n, tags in enumerate(of_tags)]
    await store_records(engine, rows)
    rest = {"slice_rows": slice_rows, "search_limit_s": 0.0}
    for tags, numbers in (
        ([("app", "search")], [7, 0]),
        ([("env", "prod")], [7, 0]),
        ([("a", "b:c"), ("a:b", "c")], [10, 9]),
        ([("größe", '50 % "groß"')], [11]),
        ([("none", "such")], []),
    ):
        assert await all_pages(engine, 2, tags=tags, **rest) == [f"t{number:02}" for number in numbers]
    async with engine.connect() as connection:
        found = await extreme_requests(
            connection, START_MS, START_MS + 1000, where={}, tags=[("app", "search")], by="total_ms", limit=9
        )
    assert {row["request_id"] for row in found} == {"t00", "t07"}


async def test_the_time_asked_for_has_no_end_of_its_own(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        page = await request_page(connection, START_MS + 5, START_MS + 7)
    assert [row["received_unix_ms"] - START_MS for row in page.requests] == [6, 6, 6, 5, 5, 5]


async def test_a_story_is_a_request_with_its_attempts_in_order(engine: AsyncEngine) -> None:
    await store_records(
        engine,
        [
            attempt_record(request_id="r001", attempt=2, worker_id="w2"),
            attempt_record(request_id="r001", attempt=1, worker_id="w1", outcome="failed"),
            attempt_record(request_id="running", attempt=1),
        ],
    )
    async with engine.connect() as connection:
        history = await request_history(connection, "r001")
        running = await request_history(connection, "running")
        assert await request_history(connection, "none such") is None
    assert history is not None
    assert history.request is not None
    assert history.request["request_id"] == "r001"
    assert [(row["attempt"], row["worker_id"]) for row in history.attempts] == [(1, "w1"), (2, "w2")]
    assert running is not None
    assert running.request is None
    assert len(running.attempts) == 1
