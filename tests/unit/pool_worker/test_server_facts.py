"""Which changes of a server's facts are a reason to leave the pool: by kind of server, fact and change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.base import NotServed, ServerFacts, default_revision, facts_again
from pool_worker.engines.formats.tokenizer_sample import TOKENIZER_PAGES
from pool_worker.engines.framing import MalformedEvent
from pool_worker.engines.server_facts import FactsUnread, FactsWatch, changes, in_use
from tests.waiting import until

Page = dict[str, Any]
STAY: list[str] = []


def models(*entries: Page) -> Page:
    return {"object": "list", "data": [{"id": "a", "object": "model"} | entry for entry in entries]}


def props(context: int = 4096, slots: int = 4, **more: Any) -> Page:
    return {"default_generation_settings": {"n_ctx": context}, "total_slots": slots, "model_alias": "a", **more}


def sglang(**more: Any) -> Page:
    return {"model_path": "a", "tokenizer_path": "a", "weight_version": "default", **more}


def tgi(**more: Any) -> Page:
    return {"model_id": "a", "model_sha": "1", "max_total_tokens": 4096, "max_concurrent_requests": 8, **more}


def tags(**digests: str) -> Page:
    return {"models": [{"name": f"{name}:latest", "digest": digest} for name, digest in digests.items()]}


def triton(*inputs: str, **more: Any) -> Page:
    outputs = [{"name": "text_output"}]
    named = [{"name": name} for name in ("text_input", "max_tokens", *inputs)]
    return {"name": "a", "versions": ["1"], "inputs": named, "outputs": outputs, **more}


MODEL, WEIGHTS, VERSION, TEMPLATE = "model", "weights", "version of the weights", "chat template"
LENGTH, SEQUENCES, FIELDS, INPUTS = "context length", "sequences at once", "supported fields", "inputs"


@pytest.mark.parametrize(
    ("kind", "before", "now", "leaves"),
    [
        # Another model under another name.
        ("vllm", models({}), models({"id": "b"}), [MODEL]),
        ("lmdeploy", models({}), models({"id": "b"}), [MODEL]),
        ("trtllm", models({}), models({"id": "b"}), [MODEL]),
        ("openai_completions", models({}), models({"id": "b"}), [MODEL]),
        ("ollama", tags(a="1"), tags(b="1"), [MODEL]),
        ("llamacpp", props(), props(model_alias="b"), [MODEL]),
        ("sglang", sglang(), sglang(model_path="b"), [MODEL]),
        ("tgi", tgi(), tgi(model_id="b"), [MODEL]),
        # Under the same name.
        ("vllm", models({"root": "/a"}), models({"root": "/b"}), [WEIGHTS]),
        ("llamacpp", props(model_path="/a.gguf"), props(model_path="/b.gguf"), [WEIGHTS]),
        ("sglang", sglang(served_model_name="a"), sglang(served_model_name="a", model_path="b"), [WEIGHTS]),
        ("sglang", sglang(), sglang(weight_version="2"), [VERSION]),
        ("tgi", tgi(), tgi(model_sha="2"), [VERSION]),
        ("ollama", tags(a="1"), tags(a="2"), [VERSION]),
        ("triton", triton(), triton(versions=["2"]), [VERSION]),
        # Another tokenizer or template.
        ("sglang", sglang(), sglang(tokenizer_path="b"), ["tokenizer"]),
        ("llamacpp", props(chat_template="a"), props(chat_template="b"), [TEMPLATE]),
        # Less capacity; a context divided among more slots.
        ("vllm", models({"max_model_len": 4096}), models({"max_model_len": 2048}), [LENGTH]),
        ("openai_completions", models({"max_model_len": 4096}), models({"max_model_len": 2048}), [LENGTH]),
        ("llamacpp", props(), props(2048, 8), [LENGTH]),
        ("llamacpp", props(), props(8192, 2), [SEQUENCES]),
        ("tgi", tgi(), tgi(max_total_tokens=2048), [LENGTH]),
        ("tgi", tgi(), tgi(max_concurrent_requests=4), [SEQUENCES]),
        # Fewer fields of a request.
        ("triton", triton("top_p"), triton(), [INPUTS, FIELDS]),
        ("triton", triton("stream"), triton(), [INPUTS]),
        # More is harmless.
        ("vllm", models({"max_model_len": 4096}), models({"max_model_len": 8192}), STAY),
        ("llamacpp", props(), props(8192, 8), STAY),
        ("tgi", tgi(), tgi(max_total_tokens=8192, max_concurrent_requests=16), STAY),
        ("triton", triton(), triton("top_p", "stream"), STAY),
        ("vllm", models({}), models({"id": "b"}, {}), STAY),
        ("vllm", models({}), models({}, {"id": "b"}), STAY),
        ("ollama", tags(a="1"), tags(b="2", a="1"), STAY),
        # Not reported before, or no longer reported.
        ("vllm", models({}), models({"root": "/a", "max_model_len": 1}), STAY),
        ("vllm", models({"root": "/a", "max_model_len": 4096}), models({}), STAY),
        ("tgi", tgi(), tgi(model_sha=None, max_total_tokens=None, max_concurrent_requests=None), STAY),
        ("sglang", sglang(), {"model_path": "a", "weight_version": "default"}, STAY),
        # Differs in every answer, or with every start.
        ("vllm", models({"created": 1}), models({"created": 2}), STAY),
        ("llamacpp", props(build_info="b1"), props(build_info="b2"), STAY),
        ("tgi", tgi(version="1", max_batch_total_tokens=100), tgi(version="2", max_batch_total_tokens=90), STAY),
        # Both.
        ("vllm", models({"max_model_len": 4096}), models({"id": "b", "max_model_len": 2048}), [MODEL]),
        ("tgi", tgi(), tgi(model_sha="2", max_total_tokens=2048), [VERSION, LENGTH]),
        ("tgi", tgi(), tgi(model_id="b", max_total_tokens=2048), [MODEL]),
    ],
)
def test_which_changes_are_a_reason_to_leave(kind: str, before: Page, now: Page, leaves: list[str]) -> None:
    known = in_use(FORMATS[kind].facts(before, None), max_model_len=4096, max_sequences=64)
    assert [change.fact for change in changes(known, facts_again(FORMATS[kind], now, known.model))] == leaves


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(ServerFacts("a", 4096), ServerFacts("a", 1024), id="a length that was never used"),
        pytest.param(ServerFacts("a", None, 64), ServerFacts("a", None, 16), id="sequences that were never used"),
        pytest.param(ServerFacts("a", 512), ServerFacts("a", 512), id="settings that promise more than it has"),
        pytest.param(ServerFacts("a", tokenizer_sample="5 6"), ServerFacts("a"), id="a sample that was not read"),
        pytest.param(ServerFacts("a", max_kv_tokens=9, memory_tokens=9), ServerFacts("a"), id="memory"),
    ],
)
def test_unused_capacity_may_shrink(before: ServerFacts, now: ServerFacts) -> None:
    assert not list(changes(in_use(before, max_model_len=1024, max_sequences=16), now))


@pytest.mark.parametrize(
    ("kind", "model", "page"),
    [
        ("vllm", "a", models({"id": "b"})),
        ("lmdeploy", "a", models({"id": "b"})),
        ("trtllm", "a", models({"id": "b"})),
        ("openai_completions", "a", models({"id": "b"})),
        ("ollama", "a", tags(b="1")),
        ("llamacpp", "a", props(model_alias="b")),
        ("llamacpp", "a", props(model_alias="b", model_path="/a/b.gguf")),
        ("sglang", "a", sglang(model_path="b")),
        ("sglang", "a", sglang(model_path="/models/b", served_model_name="b")),
        ("tgi", "a", tgi(model_id="b")),
    ],
)
def test_a_configured_model_that_is_not_served_is_refused(kind: str, model: str, page: Page) -> None:
    """A worker that starts after its server has changed must not serve the other model either."""
    with pytest.raises(NotServed, match="does not serve 'a'; it serves: b"):
        FORMATS[kind].facts(page, model)


@pytest.mark.parametrize(
    ("kind", "model", "page"),
    [
        ("llamacpp", "b.gguf", props(model_path="/a/b.gguf")),
        ("llamacpp", "any", {"default_generation_settings": {"n_ctx": 9}, "total_slots": 1}),  # it reports no name
        ("sglang", "b", sglang(model_path="/models/b")),
        ("sglang", "/models/b", sglang(model_path="/models/b", served_model_name="c")),
        ("tgi", "b", tgi(model_id="org/b")),
        ("ollama", "a", tags(a="1")),
    ],
)
def test_a_model_has_several_names(kind: str, model: str, page: Page) -> None:
    assert FORMATS[kind].facts(page, model).model in {model, f"{model}:latest"}


@pytest.mark.parametrize(
    ("kind", "page"), [("vllm", models()), ("ollama", tags()), ("llamacpp", {}), ("tgi", {}), ("triton", {})]
)
def test_a_server_that_serves_nothing_is_loading(kind: str, page: Page) -> None:
    with pytest.raises(MalformedEvent):
        facts_again(FORMATS[kind], page, "a")


def test_a_reason_names_the_old_and_the_new_value() -> None:
    (change,) = changes(ServerFacts("a", 4096), ServerFacts("a", 2048))
    assert str(change) == "context length: 4096 before, 2048 now"


@pytest.mark.parametrize(
    ("kind", "page", "revision"),
    [
        ("tgi", tgi(model_sha="0123456789abcdef"), "tgi:0123456789ab:a"),
        ("ollama", tags(a="0123456789abcdef"), "ollama:0123456789ab:a:latest"),
        ("sglang", sglang(weight_version="v2"), "sglang:v2:a"),
        ("triton", triton(versions=["1", "2"]), "triton:1,2:a"),
        ("tgi", tgi(model_sha=None), "tgi:a"),
        ("vllm", models({"root": "/models/a"}), "vllm:a"),  # the same weights may be stored elsewhere
    ],
)
def test_another_version_of_the_weights_does_not_resume_answers(kind: str, page: Page, revision: str) -> None:
    """Even if the server was away for so long that its worker restarted."""
    facts = FORMATS[kind].facts(page, None)
    assert default_revision(kind, facts.model, facts) == revision


@pytest.mark.parametrize(
    ("kind", "answer", "sample"),
    [
        ("vllm", b'{"count": 2, "tokens": [5, 6]}', "5 6"),
        ("sglang", b'{"tokens": [5, 6]}', "5 6"),
        ("llamacpp", b'{"tokens": [5, 6]}', "5 6"),
        ("tgi", b'[{"id": 5, "text": "a"}, {"id": 6, "text": "b"}]', "5 6"),
        ("lmdeploy", b'{"input_ids": [5, 6], "length": 2}', "5 6"),
        ("vllm", b"", None),
        ("vllm", b'{"tokens": []}', None),
        ("vllm", b'{"tokens": ["a"]}', None),
        ("vllm", b"[]", None),
        ("tgi", b'{"error": "no"}', None),
        ("tgi", b"7", None),
    ],
)
def test_tokenizer_samples_are_parsed(kind: str, answer: bytes, sample: str | None) -> None:
    assert TOKENIZER_PAGES[kind].sample_of(answer) == sample


class Server:
    """Returns its facts or fails; counts the reads."""

    def __init__(self) -> None:
        self.facts: ServerFacts | None = ServerFacts("a", 4096)
        self.asked = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.reported: list[str | None] = []

    async def read(self) -> ServerFacts:
        self.asked += 1
        await self.goes_on.wait()
        if self.facts is None:
            raise FactsUnread("loading")
        return self.facts

    def watch(self, period_s: float = 3600.0) -> FactsWatch:
        return FactsWatch(self.read, ServerFacts("a", 4096), period_s)


@asynccontextmanager
async def watched(server: Server) -> AsyncIterator[FactsWatch]:
    watch = server.watch()
    running = asyncio.create_task(watch.run(server.reported.append))
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_facts_are_read_after_a_reconnect_and_another_model_is_out_until_the_first_returns() -> None:
    server = Server()
    async with watched(server) as watch:
        watch.reconnected()
        assert not watch.is_proved
        await until(lambda: watch.is_proved)
        server.facts = ServerFacts("b", 4096)
        watch.reconnected()
        await until(lambda: server.reported)
        assert server.reported == ["the server has changed: model: a before, b now"]
        assert watch.rejection_reason(is_answer=False) == server.reported[0]
        server.facts = ServerFacts("a", 4096)
        watch.reconnected()
        await until(lambda: len(server.reported) == 2)
        assert (server.reported[1], watch.rejection_reason(is_answer=True)) == (None, None)


async def test_facts_are_read_periodically() -> None:
    server = Server()
    watch = server.watch(period_s=0.01)
    running = asyncio.create_task(watch.run(server.reported.append))
    await until(lambda: server.asked > 2)
    server.facts = ServerFacts("a", 2048)
    await running
    assert server.reported == ["the server has changed: context length: 4096 before, 2048 now"]


async def test_a_worker_leaves_when_its_servers_limits_shrink() -> None:
    server = Server()
    watch = server.watch()
    server.facts = ServerFacts("a", 2048)
    watch.reconnected()
    await watch.run(server.reported.append)
    assert server.reported == ["the server has changed: context length: 4096 before, 2048 now"]


@pytest.mark.parametrize("reconnects", [False, True])
async def test_a_failed_read_is_not_a_change_and_proves_nothing(reconnects: bool) -> None:
    server = Server()
    watch = server.watch()
    server.facts = None
    if reconnects:
        watch.reconnected()
    await watch.check()
    assert watch.change is None
    assert watch.rejection_reason(is_answer=False) is None  # only its error counts
    assert (watch.rejection_reason(is_answer=True) is not None) is reconnects


async def test_a_read_in_progress_does_not_cover_a_later_reconnect() -> None:
    server = Server()
    watch = server.watch()
    server.goes_on.clear()
    reading = asyncio.create_task(watch.check())
    await until(lambda: server.asked)
    watch.reconnected()
    server.goes_on.set()
    await reading
    assert not watch.is_proved
    await watch.check()
    assert watch.is_proved


async def test_concurrent_checks_share_at_most_two_reads() -> None:
    server = Server()
    watch = server.watch()
    server.goes_on.clear()
    first = asyncio.create_task(watch.check())
    await until(lambda: server.asked)
    others = [asyncio.create_task(watch.check()) for _ in range(20)]
    await asyncio.sleep(0)
    server.goes_on.set()
    await asyncio.gather(first, *others)
    assert server.asked == 2
