"""A model is changed under load: worker by worker, its old weights for new ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from pool_worker.drain import Stop
from pool_worker.engines.scripted_words import Script, build_tokenizer
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.waiting import HANGS_S, until

STREAMS, WHOLE = 12, 6
TOKENS = 60


def settings_for(url: str, worker_id: str, revision: str) -> WorkerSettings:
    return WorkerSettings(
        worker_id=worker_id,
        pool="test",
        nats_urls=(url,),
        models=(MODEL,),
        engine=ScriptedEngineSettings.model_validate(
            {"revision": revision, "inter_token_s": 0.01, "faults_from_prompt": worker_id.startswith("old")}
        ),
    )


def answer_by(revision: str, prompt: str) -> str:
    """Return what one revision answers, from its first token to its last."""
    script = Script(build_tokenizer(), revision)
    ids = script.tokenizer.encode(prompt).ids
    seed = script.answer_seed(ids, 0)
    return "".join(script.text_of[script.token_at(seed, place)] for place in range(TOKENS))


@dataclass
class Outcome:
    """A request and what came of it."""

    prompt: str
    text: str = ""
    error: str | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)


async def stream(gateway: GatewayUnderTest, outcome: Outcome) -> None:
    try:
        chunks = await gateway.client().completions.create(
            model=MODEL, prompt=outcome.prompt, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
        )
        async for chunk in chunks:
            outcome.text += chunk.choices[0].text
            if len(outcome.text) > 20:
                outcome.began.set()
    except openai.APIError as error:
        outcome.error = error.code
    finally:
        outcome.began.set()


async def whole(gateway: GatewayUnderTest, outcome: Outcome) -> None:
    answer = await gateway.client(timeout=HANGS_S).completions.create(
        model=MODEL, prompt=outcome.prompt, max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )
    outcome.text = answer.choices[0].text


async def is_ready(client: httpx.AsyncClient) -> bool:
    """Return whether the model's card is here."""
    return bool((await client.get("/readyz")).json()["models_not_ready"] == [])


@asynccontextmanager
async def asking(gateway: GatewayUnderTest, streams: list[Outcome], answers: list[Outcome]) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        await until(lambda: is_ready(client))
    tasks = [asyncio.create_task(stream(gateway, one)) for one in streams]
    tasks += [asyncio.create_task(whole(gateway, one)) for one in answers]
    async with asyncio.timeout(HANGS_S):
        for one in streams:
            await one.began.wait()
        yield
        await asyncio.gather(*tasks)


def outcomes(name: str, count: int) -> list[Outcome]:
    """Requests that stop in the middle where they begin, as long as that is an old worker."""
    return [Outcome(f"{name} {number} [[stall after=20]]") for number in range(count)]


async def test_no_answer_is_of_two_revisions(start_gateway: Start, nats_url: str) -> None:
    """An old worker dies in the middle, another drains, new ones come: whoever can goes on, all others start again."""
    gateway = await start_gateway(with_card=False, timeouts={"revision_wait_s": 0.5})
    streams, answers = outcomes("stream", STREAMS), outcomes("whole", WHOLE)
    async with contextlib.AsyncExitStack() as stack:
        stops: list[Stop] = [
            await stack.enter_async_context(running_worker(settings_for(nats_url, f"old{number}", "old")))
            for number in range(2)
        ]
        async with asking(gateway, streams, answers):
            await stack.enter_async_context(running_worker(settings_for(nats_url, "new", "new")))
            for stop in stops:  # the first hands back to the second, which soon leaves as well
                stop.request(0)
    changed = [one for one in streams if one.error is not None]
    assert {one.error for one in changed} <= {"model_changed"}
    for one in streams:
        old, new = answer_by("old", one.prompt), answer_by("new", one.prompt)
        assert one.text in (old, new) if one.error is None else old.startswith(one.text)
    for one in answers:
        assert one.text in (answer_by("old", one.prompt), answer_by("new", one.prompt))
    records = await gateway.records(STREAMS + WHOLE)
    assert len({record.request_id for record in records}) == STREAMS + WHOLE
    assert sum(record.error_code == "model_changed" for record in records) == len(changed)


async def test_a_stream_finds_its_own_weights_among_others(start_gateway: Start, nats_url: str) -> None:
    gateway = await start_gateway(with_card=False)
    streams = outcomes("stream", STREAMS)
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_worker(settings_for(nats_url, "old1", "old")))
        async with asking(gateway, streams, []):
            await stack.enter_async_context(running_worker(settings_for(nats_url, "new1", "new")))
            await stack.enter_async_context(running_worker(settings_for(nats_url, "new2", "new")))
            await stack.enter_async_context(running_worker(settings_for(nats_url, "old2", "old")))
            first.request(0)
    assert [one.error for one in streams] == [None] * STREAMS
    assert [one.text for one in streams] == [answer_by("old", one.prompt) for one in streams]


@pytest.mark.parametrize("declared", [True, False])
async def test_an_operator_may_call_two_pools_the_same(start_gateway: Start, nats_url: str, declared: bool) -> None:
    """Such as one in 8-bit integers and one in floats, each of which shall go on with what the other has begun."""
    gateway = await start_gateway(with_card=False, timeouts={"revision_wait_s": 0.2})
    [one] = outcomes("stream", 1)
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_worker(settings_for(nats_url, "old", "v3")))
        async with asking(gateway, [one], []):
            name = "v3" if declared else "v3-float"
            await stack.enter_async_context(running_worker(settings_for(nats_url, "new", name)))
            first.request(0)
    assert one.error == (None if declared else "model_changed")
