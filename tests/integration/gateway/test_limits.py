"""Limits of keys over HTTP, as the official client sees them, at one gateway and at three."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.engine import create_engine
from gateway.http.body import LARGE_BODY_BYTES
from gateway.limits.account import AccountStore
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.gateways import RATES, Account, Kind
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, ScriptedWorker, answer_hello, until_cancelled
from tests.waiting import HANGS_S, until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
# Who has a budget asks a fresh gateway: that of others waits until a ledger has taken their records.
MakeKey = Callable[[Policy], Awaitable[tuple[str, str]]]


@pytest.fixture
def make_key(sqlite_url: str) -> MakeKey:
    """Makes a key with limits, before its gateways start; returns its id and its plaintext."""

    async def make(policy: Policy) -> tuple[str, str]:
        engine = create_engine(sqlite_url)
        key, token = await create_key(engine, "limited", PEPPER, Grant(policy=policy))
        await engine.dispose()
        return key.key_id, token

    return make


async def say_hello(gateway: GatewayUnderTest, key: str, **rest: Any) -> Any:
    """The answer with its headers, or the error."""
    client = gateway.client(api_key=key)
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 16, **rest}
    try:
        return await client.chat.completions.with_raw_response.create(**body)
    except openai.APIStatusError as error:
        return error


def is_refused(answer: Any) -> bool:
    return isinstance(answer, openai.RateLimitError)


async def the_account(bus: Bus, key_id: str) -> Account:
    found = await AccountStore(bus).load(key_id)
    assert found is not None
    return found[0]


async def test_headers_and_refusal_of_a_rate(share_gateway: Share) -> None:
    gateway = await share_gateway()
    _, key = await gateway.make_key(policy=Policy(requests_per_minute=2, tokens_per_minute=1000))
    await gateway.add_worker()
    first, second, third = [await say_hello(gateway, key) for _ in range(3)]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert 900 < int(second.headers["x-ratelimit-remaining-tokens"]) < 984  # the first is settled, the second reserved
    assert is_refused(third)
    assert (third.code, third.type) == ("rate_limit_exceeded", "requests")
    assert "key's requests per minute: limit 2, used 2" in third.message
    assert third.response.headers["x-should-retry"] == "true"
    assert 30 < int(third.response.headers["retry-after"]) <= 60
    assert third.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert 55 <= int(third.response.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 61


async def test_a_request_that_is_more_than_the_limit_is_not_to_be_tried_again(share_gateway: Share) -> None:
    gateway = await share_gateway()
    _, key = await gateway.make_key(policy=Policy(tokens_per_minute=100))
    refused = await say_hello(gateway, key, max_tokens=60, n=2)
    assert (refused.status_code, refused.code, refused.type) == (429, "rate_limit_exceeded", "tokens")
    assert refused.response.headers["x-should-retry"] == "false"
    assert "limit 100, requested 1" in refused.message


async def test_who_has_no_limit_sees_no_headers(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    answer = await say_hello(gateway, gateway.key)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def taken(worker: ScriptedWorker) -> set[str]:
    """Requests, each once: a worker that is slow to answer may get one again, as its next attempt."""
    return {attempt.job.request_id for attempt in worker.attempts}


async def test_concurrency_at_three_gateways_is_exact_and_comes_back(
    start_gateway: Start, make_key: MakeKey, bus: Bus
) -> None:
    key_id, key = await make_key(Policy(max_concurrent=6))
    gateways = [await start_gateway(), await start_gateway(), await start_gateway()]
    worker = await gateways[0].add_worker(script=until_cancelled)
    running: list[asyncio.Task[Any]] = []
    async with asyncio.timeout(HANGS_S):
        while len(taken(worker)) < 6:
            gateway = gateways[len(running) % 3]
            running.append(asyncio.create_task(say_hello(gateway, key, max_tokens=400)))
            await asyncio.sleep(0.02)
    refused = await asyncio.gather(*(say_hello(gateways[number % 3], key) for number in range(9)))
    assert all(is_refused(answer) for answer in refused)
    assert len(taken(worker)) == 6
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    async def is_free() -> bool:
        account = await the_account(bus, key_id)
        return not any(lease.held[Kind.CONCURRENT] for lease in account.leases.values())

    await until(is_free)
    worker.script = answer_hello
    assert not is_refused(await say_hello(gateways[2], key))


async def test_what_admission_refuses_is_refunded(start_gateway: Start, make_key: MakeKey) -> None:
    _, key = await make_key(Policy(requests_per_minute=1))
    gateway = await start_gateway()  # that knows of no worker
    for _ in range(3):
        refused = await say_hello(gateway, key, extra_body={"do_not_queue": True})
        assert refused.status_code == 503
    await gateway.add_worker()
    assert not is_refused(await say_hello(gateway, key))
    assert is_refused(await say_hello(gateway, key))


async def test_a_budget_is_spent_by_the_price_and_then_refuses(
    start_gateway: Start, make_key: MakeKey, bus: Bus
) -> None:
    # Prompts are free; of the answer, at most 16 tokens, each costs 1000 nano-USD, and two are made.
    key_id, key = await make_key(Policy(budget_nano_usd=20_000, budget_period="day"))
    price = {"prompt": 0.0, "completion": 1.0}
    gateway = await start_gateway(models={MODEL: {"aliases": ("short",), "price": price}})
    await gateway.add_worker()
    answers = [await say_hello(gateway, key) for _ in range(4)]
    *served, refused = answers
    assert not any(is_refused(answer) for answer in served)
    assert is_refused(refused)
    assert (refused.code, refused.type) == ("insufficient_quota", "insufficient_quota")
    assert refused.response.headers["x-should-retry"] == "false"
    assert "limit 0.00002 USD, used 0.000006 USD, this request may cost up to 0.000016 USD" in refused.message
    assert not is_refused(await say_hello(gateway, key, max_tokens=14))

    async def is_spent() -> bool:
        return (await the_account(bus, key_id)).spent_nano_usd == 8_000

    await until(is_spent)


async def test_a_replayed_answer_counts_once(share_gateway: Share) -> None:
    gateway = await share_gateway()
    _, key = await gateway.make_key(policy=Policy(requests_per_minute=2))
    await gateway.add_worker()
    for _ in range(4):
        assert not is_refused(await say_hello(gateway, key, extra_headers={"Idempotency-Key": "once"}))
    assert not is_refused(await say_hello(gateway, key))
    assert is_refused(await say_hello(gateway, key))


async def test_a_rescued_request_is_charged_once_for_what_was_made(share_gateway: Share) -> None:
    gateway = await share_gateway()
    key_id, key = await gateway.make_key(policy=Policy(tokens_per_minute=1000))

    async def fail_once(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens("a", (1,))
            await attempt.fail("engine_died", "gone", retryable=True)
        else:
            await attempt.tokens("b", (2,), finish_reason="stop")
            await attempt.finish()

    await gateway.add_worker(script=fail_once)
    answer = await say_hello(gateway, key)
    usage = answer.parse().usage
    assert usage.completion_tokens == 2

    async def counted() -> bool:
        account = await the_account(gateway.bus, key_id)
        return bool(sum(account.used[Kind.TOKENS].values()) == usage.total_tokens)

    await until(counted)


async def test_who_leaves_while_waiting_pays_nothing(share_gateway: Share) -> None:
    gateway = await share_gateway()
    key_id, key = await gateway.make_key(policy=Policy(tokens_per_minute=1000, max_concurrent=1))
    asking = asyncio.create_task(say_hello(gateway, key))

    async def used() -> int:
        return sum((await the_account(gateway.bus, key_id)).used[Kind.TOKENS].values())

    async def is_reserved() -> bool:
        return await AccountStore(gateway.bus).load(key_id) is not None and await used() > 0

    await until(is_reserved)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def is_refunded() -> bool:
        return await used() == 0

    await until(is_refunded)


async def test_limits_outlive_the_gateway(start_gateway: Start, make_key: MakeKey) -> None:
    _, key = await make_key(Policy(requests_per_minute=3))
    first = await start_gateway()
    await first.add_worker()
    for _ in range(2):
        assert not is_refused(await say_hello(first, key))
    await first.end()
    second = await start_gateway()
    assert not is_refused(await say_hello(second, key))
    assert is_refused(await say_hello(second, key))


async def head_alone(gateway: GatewayUnderTest, path: str, key: str) -> bytes:
    """The answer to a request whose 4 MB of body are never sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode())
    writer.write(b"Content-Length: 4000000\r\n\r\n")
    async with asyncio.timeout(HANGS_S):
        answer = await reader.readuntil(b"}}")
    writer.close()
    return answer


async def test_counting_tokens_counts_as_a_request(share_gateway: Share) -> None:
    """A key limited to one request a minute kept everybody waiting by counting tokens again and again."""
    gateway = await share_gateway()
    _, key = await gateway.make_key(policy=Policy(requests_per_minute=2))
    await gateway.add_worker()
    async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {key}"}) as client:
        wrong = await client.post("/tokenize", json={"prompt": 5})
        counted = await client.post("/tokenize", json={"prompt": "a"})
        assert (wrong.status_code, counted.status_code) == (400, 200)
        assert counted.headers["x-ratelimit-remaining-requests"] == "1"
        assert not is_refused(await say_hello(gateway, key))
        refused = await client.post("/tokenize", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert float(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_a_large_body_beyond_the_limit_is_refused_unread(share_gateway: Share, path: str) -> None:
    gateway = await share_gateway()
    _, key = await gateway.make_key(policy=Policy(requests_per_minute=1))
    await gateway.add_worker()
    assert not is_refused(await say_hello(gateway, key))
    answer = await head_alone(gateway, path, key)
    assert answer.startswith(b"HTTP/1.1 429"), answer
    assert b"rate_limit_exceeded" in answer


@pytest.mark.parametrize("limit", [{"budget_nano_usd": 5, "budget_period": "day"}, {"tokens_per_minute": 5}])
async def test_a_request_larger_than_the_limit_says_so_and_names_the_field_to_lower(
    start_gateway: Start, make_key: MakeKey, limit: dict[str, Any]
) -> None:
    _, key = await make_key(Policy(**limit))
    gateway = await start_gateway(models={MODEL: {"aliases": ("short",), "price": {"completion": 1.0}}})
    await gateway.add_worker()
    chat: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/chat/completions", "max_tokens", chat),
        ("/v1/chat/completions", "max_tokens", {**chat, "max_tokens": 16}),
        ("/v1/chat/completions", "max_completion_tokens", {**chat, "max_completion_tokens": 16}),
        ("/v1/completions", "max_tokens", {"model": MODEL, "prompt": "Hi", "max_tokens": 16}),
        ("/v1/completions", "max_tokens", {"model": MODEL, "prompt": ["Hi", "Ho"], "max_tokens": 16}),
        ("/v1/responses", "max_output_tokens", {"model": MODEL, "input": "Hi"}),
        ("/v1/responses", "max_output_tokens", {"model": MODEL, "input": "Hi", "max_output_tokens": 16}),
        ("/v1/messages", "max_tokens", {**chat, "max_tokens": 16}),
    ]
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        for path, field, body in asked:
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 429, (path, answer.text)
            assert answer.headers["x-should-retry"] == "false"
            assert error["message"].startswith("Request too large for the key's "), error
            assert f"(prompt and '{field}', for each choice). Lower '{field}'" in error["message"]
            assert "used up" not in error["message"]
            if path != "/v1/messages":
                assert error["param"] == field
                assert error["code"] == ("insufficient_quota" if "budget_nano_usd" in limit else "rate_limit_exceeded")


async def test_a_spent_budget_refuses_before_anything_is_counted(
    start_gateway: Start, make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = await make_key(Policy(budget_nano_usd=1_000, budget_period="day"))

    async def not_counted(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was counted")

    monkeypatch.setattr(ModelTokens, "encode_chat", not_counted)
    # One token costs more than there is.
    gateway = await start_gateway(models={MODEL: {"aliases": ("short",), "price": {"prompt": 2.0}}})
    refused = await say_hello(gateway, key, messages=[{"role": "user", "content": "a" * LARGE_BODY_BYTES}])
    assert refused.code == "insufficient_quota"


async def test_a_large_request_takes_what_it_uses_and_no_more(
    start_gateway: Start, make_key: MakeKey, bus: Bus
) -> None:
    """It reserves in parts: its place before the body is read, the rest once it is counted."""
    policy = Policy(
        requests_per_minute=2, tokens_per_minute=10**6, max_concurrent=1, budget_nano_usd=10**9, budget_period="day"
    )
    key_id, key = await make_key(policy)
    price = {"prompt": 0.0, "completion": 1.0}
    gateway = await start_gateway(models={MODEL: {"aliases": ("short",), "price": price}})
    await gateway.add_worker()
    refused = await say_hello(gateway, key, messages=[{"role": "user", "content": "a" * LARGE_BODY_BYTES}])
    assert refused.status_code == 400  # too long: gives its place back
    answer = await say_hello(gateway, key, extra_body={"padding": " " * LARGE_BODY_BYTES})
    usage = answer.parse().usage

    async def is_settled() -> bool:
        account = await the_account(bus, key_id)
        lease = account.leases["g0"]
        used = [sum(account.used[kind].values()) for kind in RATES]
        busy = [lease.held[kind] - lease.idle[kind] for kind in (Kind.CONCURRENT, Kind.MONEY)]
        spent = account.spent_nano_usd
        return (used, spent, busy) == ([1, usage.total_tokens], 1000 * usage.completion_tokens, [0, 0])

    await until(is_settled)
    assert not is_refused(await say_hello(gateway, key))
    assert is_refused(await say_hello(gateway, key))
