"""Mixed requests while the ledger writer is killed and NATS is restarted: every one must be counted once."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable

import httpx

from tests.acceptance.system import System
from tests.waiting import HANGS_S

REQUESTS = 150
CONCURRENCY = 64
SEED = 20_26


def body(number: int, kind: str) -> dict[str, object]:
    tokens = 3 + number % 17
    script = {"fail": f"[[fail after={tokens // 2}]]", "long": "[[tokens=400]]"}.get(kind, f"[[tokens={tokens}]]")
    content = f"{script} question {number}"
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": content}],
        "stream": kind != "whole",
        "n": 1 + number % 2,
    }


async def run_one(http: httpx.AsyncClient, number: int, kind: str, patience_s: float) -> str:
    """Make one request; a "long" one is cut off by hanging up some time after its headers. Returns what was seen."""
    seen = "no head"
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body(number, kind)) as answer:
            seen = f"{answer.status_code} {answer.headers['x-request-id']}"
            if kind == "long" and answer.status_code == 200:
                await asyncio.sleep(patience_s)
                return "cancelled"
            text = (await answer.aread()).decode()
    except httpx.HTTPError as error:
        if kind == "fail" and seen.startswith("200"):  # an error after the first byte aborts the connection
            return "failed"
        return f"not served: request {number}, {kind}: {seen}, then {error!r}"
    if answer.status_code == 200 and (kind == "whole" or "[DONE]" in text):
        return "ok"
    return "failed" if kind == "fail" else f"not served: request {number}, {kind}: {seen}: {text[-500:]}"


async def run_all(system: System) -> Counter[str]:
    rng = random.Random(SEED)
    gate = asyncio.Semaphore(CONCURRENCY)
    finished = 0

    async def one(number: int, kind: str, patience_s: float) -> str:
        nonlocal finished
        async with gate:
            outcome = await run_one(http, number, kind, patience_s)
        finished += 1
        return outcome

    limits = httpx.Limits(max_connections=CONCURRENCY * 2)
    headers = {"Authorization": f"Bearer {system.api_key}"}
    async with httpx.AsyncClient(base_url=system.base_url, headers=headers, timeout=HANGS_S, limits=limits) as http:
        kinds = rng.choices(["stream", "whole", "fail", "long"], weights=[5, 3, 1, 1], k=REQUESTS)
        tasks = [asyncio.create_task(one(n, kind, rng.uniform(0.02, 1.0))) for n, kind in enumerate(kinds)]
        await disturb_midway(system, lambda: finished)
        return Counter(await asyncio.gather(*tasks))


async def disturb_midway(system: System, finished: Callable[[], int]) -> None:
    async with asyncio.timeout(HANGS_S):
        while finished() < REQUESTS // 4:
            await asyncio.sleep(0.02)
        for process in system.children(" ledger"):
            process.send_signal(signal.SIGKILL)
        while finished() < REQUESTS // 2:
            await asyncio.sleep(0.02)
        for process in system.children("nats-server"):
            process.send_signal(signal.SIGKILL)


def check_the_records(system: System, seen: Counter[str]) -> None:
    """Check that so many requests are so many rows, with the tokens that were made for them."""
    requests = seen.total()
    assert system.rows("SELECT count(*), count(DISTINCT request_id) FROM requests") == [(requests, requests)]
    counted = system.rows("SELECT outcome, count(*) FROM requests GROUP BY outcome")
    by_outcome = Counter({str(outcome): int(count) for outcome, count in counted})
    assert by_outcome["ok"] >= seen["ok"]  # a client may hang up just when its answer is complete
    assert by_outcome["ok"] - seen["ok"] <= seen["cancelled"]
    assert_tokens_agree(system)


def assert_tokens_agree(system: System) -> None:
    """Each request's tokens are those that its last attempt's engine made, on top of what it resumed from."""
    wrong = system.rows(
        """SELECT r.request_id, r.outcome, r.completion_tokens, sum(a.completion_tokens), count(a.attempt), r.attempts
           FROM requests r JOIN attempts a USING (request_id) GROUP BY r.request_id
           HAVING r.attempts = 1 AND (count(a.attempt) <> 1 OR r.completion_tokens <> sum(a.completion_tokens))""",
    )
    assert wrong == []
    made = system.rows("SELECT sum(completion_tokens) FROM attempts")[0][0]
    billed = system.rows("SELECT sum(completion_tokens) FROM requests WHERE attempts = 1")[0][0]
    assert billed
    assert made >= billed
