"""Several prompts in one completion: one answer from independent requests."""

import asyncio
import functools
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from db.accounts.principal import Policy
from gateway.limits.account import AccountStore
from protocol.gateways import Kind
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import unpack_token_ids
from protocol.refusals import RefusalCount, RefusalRecord
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.small_tokenizer import byte_tokenizer
from tests.waiting import HANGS_S, until

TEXTS = ["one", "two", "three"]
IDS = [[70, 71], [72], [73, 74, 75]]


async def say_the_prompt(attempt: Attempt) -> None:
    """Generate the length of the prompt and the index of the choice."""
    await attempt.accept()
    for index in range(attempt.job.sampling.n):
        await attempt.tokens(f"{attempt.job.prompt_tokens}", (1,), index=index)
        await attempt.tokens(f".{index}", (2,), index=index, finish_reason="stop")
    await attempt.finish(cached_tokens=1)


def said(completion: Completion) -> list[str]:
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.text for choice in completion.choices]


async def ids_of(gateway: GatewayUnderTest, count: int) -> set[str]:
    return {record.request_id for record in await gateway.records(count)}


async def test_texts_with_two_choices_each(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=say_the_prompt)
    raw = await gateway.client().completions.with_raw_response.create(
        model=MODEL, prompt=TEXTS, n=2, max_tokens=5, seed=3
    )
    answer = raw.parse()
    lengths = [len(byte_tokenizer().encode(text).ids) for text in TEXTS]
    assert said(answer) == [f"{length}.{index}" for length in lengths for index in range(2)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(lengths), 12)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert raw.headers["x-spillway-attempts"] == "1"
    assert {attempt.job.sampling.seed for attempt in worker.attempts} == {3}

    records = await gateway.records(3)
    request_id = raw.headers["x-request-id"]
    assert {record.request_id for record in records} == {f"{request_id}-{number}" for number in range(3)}
    assert sorted(record.prompt_tokens for record in records) == sorted(lengths)
    assert {(record.outcome, record.http_status, record.completion_tokens) for record in records} == {("ok", 200, 4)}


async def test_lists_of_token_ids(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=say_the_prompt)
    answer = await gateway.client().completions.create(
        model=MODEL, prompt=IDS, extra_body={"return_token_ids": True}, best_of=1
    )
    assert said(answer) == ["2.0", "1.0", "3.0"]
    assert sorted(attempt.prompt_ids for attempt in worker.attempts) == sorted(IDS)
    told = [choice.model_dump() for choice in answer.choices]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in told] == [(ids, [1, 2]) for ids in IDS]


async def test_a_stream_is_interleaved(share_gateway: Share) -> None:
    """The second prompt is answered while the first waits for its last token, and vice versa."""
    gateway = await share_gateway()
    second_is_done = asyncio.Event()

    async def wait_for_each_other(attempt: Attempt) -> None:
        await attempt.accept()
        for index in range(2):
            await attempt.tokens("a", (1,), index=index)
        if attempt.prompt_ids == IDS[0]:
            await second_is_done.wait()
        for index in range(2):
            await attempt.tokens("b", (2,), index=index, finish_reason="stop")
        await attempt.finish()

    await gateway.add_worker(script=wait_for_each_other)
    stream = await gateway.client().completions.create(
        model=MODEL,
        prompt=IDS[:2],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    texts: defaultdict[int, str] = defaultdict(str)
    prompts: dict[int, list[int]] = {}
    ended: list[int] = []
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            prompts.setdefault(choice.index, choice.model_dump().get("prompt_token_ids") or [])
            if choice.finish_reason:
                ended.append(choice.index)
        if {2, 3} <= set(ended):
            second_is_done.set()
    assert texts == dict.fromkeys(range(4), "ab")
    assert prompts == {0: IDS[0], 1: IDS[0], 2: IDS[1], 3: IDS[1]}
    assert sorted(ended[:2]) == [2, 3]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 8)


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_like_evaluation_harnesses(share_gateway: Share, stream: bool) -> None:
    gateway = await share_gateway()

    async def score(attempt: Attempt) -> None:
        await attempt.accept()
        ids = attempt.prompt_ids
        rows = [PromptLogprob(ids[0], chr(ids[0]), None)]
        rows += [PromptLogprob(one, chr(one), -one / 100, 1, ()) for one in ids[1:]]
        await attempt.tokens("", (), prompt_logprobs=tuple(rows))
        await attempt.tokens("", (), finish_reason="length")
        await attempt.finish()

    await gateway.add_worker(script=score)
    asked: dict[str, Any] = {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 0}
    client = gateway.client()
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(model=MODEL, stream=True, **asked)]
        told = {choice.index: choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs}
    else:
        answer = await client.completions.create(model=MODEL, **asked)
        told = {choice.index: choice.logprobs for choice in answer.choices if choice.logprobs}
        assert said(answer) == [byte_tokenizer().decode(ids) for ids in IDS]
    numbers = {index: logprobs.token_logprobs for index, logprobs in told.items()}
    assert numbers == {0: [None, -0.71], 1: [None], 2: [None, -0.74, -0.75]}


async def test_logprobs_of_generated_tokens(share_gateway: Share) -> None:
    gateway = await share_gateway()

    async def with_logprobs(attempt: Attempt) -> None:
        await attempt.accept()
        logprob = TokenLogprob(5, "é", -float(attempt.job.prompt_tokens), "é".encode(), ())
        await attempt.tokens("é", (5,), logprobs=(logprob,), finish_reason="stop")
        await attempt.finish()

    await gateway.add_worker(script=with_logprobs)
    answer = await gateway.client().completions.create(model=MODEL, prompt=IDS, logprobs=0)
    logprobs = [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs]
    assert logprobs == [[-2.0], [-1.0], [-3.0]]


async def error_of(asking: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await asking
    return caught.value


async def test_one_bad_prompt_refuses_all_before_anything_runs(share_gateway: Share) -> None:
    gateway = await share_gateway(
        limits={"max_prompts": 4, "max_prompt_logprobs": 10, "max_body_bytes": 100_000}, max_attempts=1
    )
    worker = await gateway.add_worker()
    create = gateway.client().completions.create
    long = await error_of(create(model=MODEL, prompt=[*IDS, [70] * 600]))
    assert (long.status_code, long.code, long.param) == (400, "context_length_exceeded", "prompt[3]")
    empty: Any = ["a", 7]
    wrong = await error_of(create(model=MODEL, prompt=empty))
    assert (wrong.status_code, wrong.param) == (400, "prompt[1]")
    many = await error_of(create(model=MODEL, prompt=["a"] * 5))
    assert (many.status_code, many.param) == (400, "prompt")
    assert "at most 4 prompts, not 5" in many.message
    told = await error_of(create(model=MODEL, prompt=[[70] * 3] * 2, echo=True, logprobs=1, max_tokens=0))
    assert (told.status_code, told.param) == (400, "logprobs")
    chosen = await error_of(create(model=MODEL, prompt=TEXTS, best_of=2))
    assert (chosen.status_code, chosen.param) == (400, "best_of")
    filled = await error_of(create(model=MODEL, prompt=TEXTS, suffix="end"))
    assert (filled.status_code, filled.param) == (400, "suffix")
    assert worker.attempts == []
    assert not [record for record in await gateway.usage() if not isinstance(record, RefusalCount | RefusalRecord)]


async def test_admission_takes_all_or_none(start_gateway: Start) -> None:
    gateway = await start_gateway(tenants={"test 0": {"max_in_flight": 2}})
    worker = await gateway.add_worker()
    create = gateway.client().completions.create
    refused = await error_of(create(model=MODEL, prompt=TEXTS))
    assert (refused.status_code, refused.code, refused.param) == (429, "tenant_in_flight_exceeded", "prompt[2]")
    assert worker.attempts == []
    for _ in range(2):  # the requests counted before the refusal were refunded
        assert said(await create(model=MODEL, prompt=TEXTS[:2])) == ["Hello world"] * 2
    assert len(await ids_of(gateway, 4)) == 4


async def test_a_gateway_that_is_nearly_full_takes_none(start_gateway: Start) -> None:
    gateway = await start_gateway(limits={"max_in_flight": 2})
    await gateway.add_worker()
    refused = await error_of(gateway.client().completions.create(model=MODEL, prompt=TEXTS))
    assert (refused.status_code, refused.code, refused.param) == (503, "overloaded", None)
    assert said(await gateway.client().completions.create(model=MODEL, prompt=TEXTS[:2])) == ["Hello world"] * 2


@pytest.mark.parametrize("unit", ["requests", "tokens", "concurrent_requests"])
async def test_over_a_quota_costs_nothing(share_gateway: Share, unit: str) -> None:
    """The limit allows two prompts: three are refused, and two succeed afterwards."""
    policy = {
        "requests": Policy(requests_per_minute=2),
        "tokens": Policy(tokens_per_minute=30),
        "concurrent_requests": Policy(max_concurrent=2),
    }[unit]
    gateway = await share_gateway()
    key_id, token = await gateway.make_key(policy=policy)
    worker = await gateway.add_worker()
    create = gateway.client(api_key=token).completions.create
    refused = await error_of(create(model=MODEL, prompt=[[70]] * 3, max_tokens=14))
    assert (refused.status_code, refused.type) == (429, unit)
    assert refused.response.headers["x-should-retry"] == "false"
    assert worker.attempts == []
    assert said(await create(model=MODEL, prompt=[[70]] * 2, max_tokens=14)) == ["Hello world"] * 2

    async def is_settled() -> bool:
        found = await AccountStore(gateway.bus).load(key_id)
        if found is None:
            return False
        account = found[0]
        held = [lease.held[Kind.CONCURRENT] - lease.idle[Kind.CONCURRENT] for lease in account.leases.values()]
        used = [sum(account.used[kind].values()) for kind in (Kind.REQUESTS, Kind.TOKENS)]
        return not any(held) and used == [2 * (unit == "requests"), 6 * (unit == "tokens")]

    await until(is_settled)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_cancels_all_prompts(share_gateway: Share, stream: bool) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    has_head = asyncio.Event()

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
            body = {"model": MODEL, "prompt": TEXTS, "stream": stream, "max_tokens": 400}
            headers = {"authorization": f"Bearer {gateway.key}"}
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                has_head.set()
                await response.aread()

    asking = asyncio.create_task(ask())
    await until(lambda: len(worker.attempts) == 3 and all(attempt.made_tokens > 3 for attempt in worker.attempts))
    if stream:
        await has_head.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    records = {record.request_id: record for record in await gateway.records(3)}
    assert len(records) == 3
    for attempt in worker.attempts:
        assert attempt.cancelled.is_set()
        record = records[attempt.job.request_id]
        assert (record.outcome, record.http_status) == ("cancelled", 200 if stream else 499)
        assert record.completion_tokens == attempt.made_tokens


async def one_fails(attempt: Attempt, begun: asyncio.Event | None = None) -> None:
    """The second prompt fails after the others have started and ``begun`` is set; the others never end."""
    if attempt.prompt_ids != IDS[1]:
        await until_cancelled(attempt)
        return
    await attempt.accept()
    await attempt.tokens("x", (3,))
    others = [one for one in attempt.worker.attempts if one is not attempt]
    await until(lambda: len(others) == 2 or len(attempt.worker.attempts) == 3)
    await until(lambda: all(one.made_tokens for one in attempt.worker.attempts))
    if begun:
        await begun.wait()
    await attempt.fail("engine_error", "it broke", retryable=False)


async def test_one_that_fails_ends_all(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=one_fails)
    failed = await error_of(gateway.client().completions.create(model=MODEL, prompt=IDS, max_tokens=400))
    assert (failed.status_code, failed.code, failed.param) == (500, "engine_error", "prompt[1]")
    records = {record.request_id.rpartition("-")[2]: record for record in await gateway.records(3)}
    assert {number: record.outcome for number, record in records.items()} == {
        "0": "cancelled",
        "1": "failed",
        "2": "cancelled",
    }
    assert {record.http_status for record in records.values()} == {500}
    made = {attempt.job.request_id: attempt.made_tokens for attempt in worker.attempts}
    assert {record.request_id: record.completion_tokens for record in records.values()} == made


async def test_one_that_fails_in_mid_stream_is_the_last_event(share_gateway: Share) -> None:
    gateway = await share_gateway()
    begun = asyncio.Event()
    await gateway.add_worker(script=functools.partial(one_fails, begun=begun))
    stream = await gateway.client().completions.create(model=MODEL, prompt=IDS, max_tokens=400, stream=True)
    await anext(stream)
    begun.set()
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert (caught.value.code, caught.value.param) == ("engine_error", "prompt[1]")
    records = await gateway.records(3)
    assert sorted(record.outcome for record in records) == ["cancelled", "cancelled", "failed"]
    assert {record.http_status for record in records} == {200}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_resumed_on_another_worker(share_gateway: Share, stream: bool) -> None:
    """The others are unaffected, and no token is lost or duplicated."""
    gateway = await share_gateway()

    async def hand_one_back(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens("a", (1,))
            if attempt.prompt_ids == IDS[1]:
                await attempt.tokens("b", (2,))
                await attempt.fail("worker_draining", "bye", retryable=True)
                return
        else:
            [point] = attempt.job.resume
            assert unpack_token_ids(point.token_ids) == [1, 2]
        await attempt.tokens("c", (3,), finish_reason="stop")
        await attempt.finish()

    worker = await gateway.add_worker(script=hand_one_back)
    create = gateway.client().completions.create
    if stream:
        texts: defaultdict[int, str] = defaultdict(str)
        async for chunk in await create(model=MODEL, prompt=IDS, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert [texts[index] for index in range(3)] == ["ac", "abc", "ac"]
    else:
        assert said(await create(model=MODEL, prompt=IDS)) == ["ac", "abc", "ac"]
    assert sorted(attempt.job.attempt for attempt in worker.attempts) == [1, 1, 1, 2]
    records = sorted(await gateway.records(3), key=lambda record: record.request_id)
    assert [(record.attempts, record.completion_tokens) for record in records] == [(1, 2), (2, 3), (1, 2)]
    assert {record.outcome for record in records} == {"ok"}


async def test_an_idempotency_key_covers_all_prompts(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=say_the_prompt)
    create = gateway.client().completions.with_raw_response.create
    headers = {"Idempotency-Key": "k-1"}
    first = await create(model=MODEL, prompt=IDS, extra_headers=headers)
    again = await create(model=MODEL, prompt=IDS, extra_headers=headers)
    assert again.headers["x-spillway-idempotent"] == "replayed"
    assert again.text == first.text
    other = await error_of(create(model=MODEL, prompt=IDS[:2], extra_headers=headers))
    assert (other.status_code, other.code) == (409, "idempotency_key_reused")
    assert len(worker.attempts) == 3
    assert len(await gateway.records(3)) == 3
