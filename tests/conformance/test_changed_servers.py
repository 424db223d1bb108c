"""Servers that change under a running worker: nothing is taken from a changed one, and the reason is reported.

For each kind that reports what it serves, and each change that it can report.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.responses import JSONResponse

from engine.types import ResumePoint
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.tokenizer_sample import TOKENIZER_PAGES
from pool_worker.engines.server_facts import FactsWatch
from pool_worker.settings import OpenAIChatSettings
from tests.conformance import test_chat_engines as chat_engines
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.driven_engine import Driver, driving, request
from tests.conformance.replay import FACTS, Replay, ReplayOf, running
from tests.conformance.test_chat_servers import chat
from tests.conformance.test_engines import server_settings
from tests.conformance.test_server_faults import paired
from tests.waiting import until

OTHER: dict[str, str] = {  # a fact of each kind that differs for another model, and its name in the reason
    "vllm": "id",
    "sglang": "model_path",
    "llamacpp": "model_alias",
    "lmdeploy": "id",
    "trtllm": "id",
    "tgi": "model_id",
    "ollama": "name",
    "triton": "versions",
    "openai_completions": "id",
}
CONTEXT: dict[str, str] = {
    "vllm": "max_model_len",
    "llamacpp": "n_ctx",
    "tgi": "max_total_tokens",
    "openai_completions": "max_model_len",
}


Serve = Callable[[str], contextlib.AbstractAsyncContextManager[tuple[Driver, Replay]]]


@pytest.fixture
def serve(tokenizer: str, replay_of: ReplayOf) -> Serve:
    return lambda kind: paired(replay_of(kind), tokenizer)


def facts_with(kind: str, key: str, value: Any) -> Any:
    """Return the facts of a server of this kind, with one changed."""

    def changed(page: Any) -> Any:
        if isinstance(page, dict):
            return {name: value if name == key else changed(one) for name, one in page.items()}
        return [changed(one) for one in page] if isinstance(page, list) else page

    facts = {**FACTS[FORMATS[kind].facts_path]}
    if kind in ("ollama", "triton") and key == "name":
        return {**facts, "models": [{"name": value}]}
    return changed(copy.deepcopy(facts))


def watch_of(driver: Driver | chat_engines.Driver) -> FactsWatch:
    watch = driver.engine.facts_watch
    assert watch is not None
    return watch


@pytest.mark.parametrize("kind", OTHER)
async def test_nothing_is_taken_from_another_model(kind: str, serve: Serve) -> None:
    async with serve(kind) as (driver, replay):
        assert (await driver.answer(request("before"))).finish_reason == "length"
        replay.facts = facts_with(kind, OTHER[kind], ["2"] if kind == "triton" else "other")
        answer = await driver.answer(request("after"))
        assert (answer.finish_reason, answer.token_ids, answer.text) == ("error", [], "")
        assert (answer.error or "").startswith("the server has changed: ")
        assert " now" in (answer.error or "")
        assert not driver.refusals
        assert watch_of(driver).is_another
        replay.facts = None
        assert (await driver.answer(request("back"))).finish_reason == "length"


@pytest.mark.parametrize("kind", CONTEXT)
async def test_nothing_is_taken_from_a_server_with_a_shorter_context(kind: str, serve: Serve) -> None:
    """Even if it refuses a length that it accepted before: callers do not see that."""
    async with serve(kind) as (driver, replay):
        replay.facts = facts_with(kind, CONTEXT[kind], 20)
        replay.faults.append(lambda _: JSONResponse({"error": {"message": "context is too long"}}, 400))
        answer = await driver.answer(request())
        assert "context length: 200 before, 20 now" in (answer.error or "")
        assert not driver.refusals
        assert not watch_of(driver).is_another


@pytest.mark.parametrize("kind", CONTEXT)
async def test_a_restarted_worker_takes_the_shorter_context(kind: str, tokenizer: str, replay_of: ReplayOf) -> None:
    replay = replay_of(kind)
    replay.facts = facts_with(kind, CONTEXT[kind], 50)
    async with driving(server_settings(replay, tokenizer).model_copy(update={"max_model_len": 200})) as driver:
        assert driver.capacity.max_model_len == 50


@pytest.mark.parametrize("kind", TOKENIZER_PAGES)
async def test_nothing_is_taken_from_a_server_with_another_tokenizer(kind: str, serve: Serve) -> None:
    async with serve(kind) as (driver, replay):
        replay.sample = (40, 41, 43)
        answer = await driver.answer(request())
        assert answer.error == "the server has changed: token ids of a sample text: 40 41 42 before, 40 41 43 now"


@pytest.mark.parametrize("kind", CONTEXT)
async def test_a_harmless_change_is_ignored(kind: str, serve: Serve) -> None:
    async with serve(kind) as (driver, replay):
        replay.facts = facts_with(kind, CONTEXT[kind], 100_000)
        assert (await driver.answer(request())).finish_reason == "length"


PAGES_WITHOUT_FACTS: tuple[Any, ...] = ({}, [], 404, 500, 503)  # a status instead of a page
UNREADABLE = [
    (kind, facts)
    for kind, wire in FORMATS.items()
    for facts in PAGES_WITHOUT_FACTS
    if wire.health_path != wire.facts_path or not isinstance(facts, int)  # otherwise it would not be healthy either
]


@pytest.mark.parametrize(("kind", "facts"), UNREADABLE, ids=str)
async def test_an_unreadable_page_is_not_a_change(kind: str, facts: Any, serve: Serve) -> None:
    async with serve(kind) as (driver, replay):
        replay.facts = facts
        assert (await driver.answer(request())).finish_reason == "length"
        assert watch_of(driver).change is None


@pytest.mark.parametrize("kind", OTHER)
async def test_after_a_broken_stream_facts_are_read_again_even_under_load(kind: str, serve: Serve) -> None:
    """A running stream no longer proves the server unchanged: it may belong to a proxy with several servers."""
    async with serve(kind) as (driver, replay):
        replay.token_s = 0.01
        driver.submit(request("beside", max_tokens=150))
        await driver.wait(lambda: driver.answers["beside", 0].token_ids)
        replay.faults.append(replay.broken_off)
        cut = await driver.answer(request("cut"))
        assert (cut.finish_reason, len(cut.token_ids)) == ("error", 5)
        replay.facts = 503  # it is loading
        loading = await driver.answer(request("loading"))
        assert (loading.token_ids, driver.answers["beside", 0].finish_reason) == ([], None)
        assert "does not report yet what it serves" in (loading.error or "")
        replay.facts = facts_with(kind, OTHER[kind], ["2"] if kind == "triton" else "other")
        another = await driver.answer(request("another"))
        assert (another.token_ids, driver.answers["beside", 0].finish_reason) == ([], None)
        assert "the server has changed" in (another.error or "")


class Address:
    """An address with successive servers: connections to an old server break, new ones reach its successor."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._open: set[asyncio.StreamWriter] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(self.url)
        server_reader, server_writer = await asyncio.open_connection(parts.hostname, parts.port)
        both = {writer, server_writer}
        self._open |= both
        try:
            await asyncio.gather(relay(reader, server_writer), relay(server_reader, writer))
        finally:
            self._open -= both
            for one in both:
                one.close()

    def become(self, url: str) -> None:
        self.url = url
        for one in self._open:
            one.transport.abort()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(address: Address) -> AsyncIterator[str]:
    async with await asyncio.start_server(address.connect, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("kind", OTHER)
async def test_a_server_restarted_with_another_model_gets_nothing_to_resume(
    kind: str, tokenizer: str, replay_of: ReplayOf
) -> None:
    first = replay_of(kind)
    first.token_s = 0.01
    with running(Replay(kind)) as second:
        second.facts = facts_with(kind, OTHER[kind], ["2"] if kind == "triton" else "other")
        address = Address(first.url)
        settings = server_settings(first, tokenizer)
        async with listening(address) as url, driving(settings.model_copy(update={"url": url})) as driver:
            driver.submit(request("begun", max_tokens=150))
            await driver.wait(lambda: driver.answers["begun", 0].token_ids)
            address.become(second.url)
            (begun,) = await driver.end_of("begun")
            assert (begun.finish_reason, bool(begun.token_ids)) == ("error", True)
            point = ResumePoint(0, tuple(begun.token_ids), len(begun.text))
            rescued = await driver.answer(request("rescued", max_tokens=150, resume=(point,)))
            assert (rescued.finish_reason, rescued.token_ids) == ("error", [])
            assert "the server has changed" in (rescued.error or "")
            address.become(first.url)
            back = await driver.answer(request("back", max_tokens=150, resume=(point,)))
            assert (back.finish_reason, len(back.token_ids)) == ("length", 150 - len(begun.token_ids))


async def test_a_running_stream_proves_its_server_unchanged(serve: Serve) -> None:
    """A server under load is not checked for each request."""
    async with serve("vllm") as (driver, replay):
        replay.token_s = 0.01
        driver.submit(request("beside", max_tokens=150))
        await driver.wait(lambda: driver.answers["beside", 0].token_ids)
        replay.facts = facts_with("vllm", "id", "other")
        assert (await driver.answer(request())).finish_reason == "length"
        assert driver.answers["beside", 0].finish_reason is None


async def test_facts_are_read_again_after_a_brief_health_failure(serve: Serve) -> None:
    async with serve("vllm") as (driver, replay):
        watch = watch_of(driver)
        running = asyncio.create_task(watch.run(lambda _: None))
        replay.facts = facts_with("vllm", "id", "other")
        replay.is_healthy = False
        await until(lambda: watch.change)
        replay.is_healthy = True
        running.cancel()


# --- servers that take messages ---------------------------------------------------------------------------------------

PAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vllm": (
        "/v1/models",
        {"data": [{"id": "replay", "root": "/a", "max_model_len": 4096}]},
        {"data": [{"id": "replay", "root": "/b", "max_model_len": 4096}]},
    ),
    "sglang": ("/get_model_info", {"model_path": "/a"}, {"model_path": "/b"}),
    "tgi": ("/info", {"model_id": "a"}, {"model_id": "b"}),
    "ray": ("/v1/models", {"data": [{"id": "replay"}]}, {"data": [{"id": "other"}]}),
    "openllm": ("/v1/models", {"data": [{"id": "replay"}]}, {"data": [{"id": "other"}]}),
}


@contextlib.asynccontextmanager
async def chatting(replay: ChatReplay, profile: str) -> AsyncIterator[chat_engines.Driver]:
    known = {"kind": "openai_chat", "profile": profile, "url": replay.url, "model": "replay"}
    async with chat_engines.driving_chat(OpenAIChatSettings.model_validate(known)) as driver:
        yield driver


@pytest.mark.parametrize("profile", PAGES)
async def test_nothing_is_taken_from_another_chat_model(replay_of: ReplayOf, profile: str) -> None:
    path, before, now = PAGES[profile]
    chat_server: ChatReplay = replay_of(ChatReplay)
    chat_server.facts[path] = before
    async with chatting(chat_server, profile) as driver:
        assert (await driver.answer(chat(), name="before")).finish_reason == "stop"
        chat_server.facts[path], chat_server.is_another = now, True
        after = await driver.answer(chat(), name="after")
        assert (after.finish_reason, after.parts, driver.busy) == ("error", [], {"after": None})
        assert (after.error or "").startswith("the server has changed: ")
        chat_server.facts[path], chat_server.is_another = before, False
        assert (await driver.answer(chat(), name="back")).finish_reason == "stop"


@pytest.mark.parametrize("profile", ["openai", "vllm"])
async def test_a_server_without_facts_is_trusted(replay_of: ReplayOf, profile: str) -> None:
    """A hosted API gets the model's name, and refuses a model that it no longer serves."""
    chat_server: ChatReplay = replay_of(ChatReplay)
    async with chatting(chat_server, profile) as driver:
        assert driver.engine.facts_watch is None
        assert (await driver.answer(chat())).finish_reason == "stop"
