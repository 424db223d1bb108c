"""Jobs of many inputs through a whole worker: frames, credit, cancel, drain, and bounds."""

from array import array
from typing import Any

from engine.pooling.pooling_types import PoolingInput
from pool_worker.engines.scripted_vectors import scripted_vector
from protocol import job as m
from protocol.generation import Pooling
from tests.integration.pool_worker.playing_gateway import TOKENIZER, PlayingGateway, running_worker, settings_for

Texts = list[str]


def pooled(gateway: PlayingGateway, texts: Texts, *, task: str = "embed", **fields: Any) -> m.Job:
    encoded = [TOKENIZER.encode(text).ids for text in texts]
    prompt = m.pack_token_ids([token for ids in encoded for token in ids])
    pooling = Pooling(task, m.pack_token_ids([len(ids) for ids in encoded]))
    return gateway.job(max_tokens=0, prompt_ids=prompt, pooling=pooling, **fields)


def expected(text: str, dimensions: int = 8) -> bytes:
    ids = TOKENIZER.encode(text).ids
    return scripted_vector(PoolingInput(0, ids, len(ids)), dimensions)


def vectors(gateway: PlayingGateway, attempt: tuple[str, int]) -> dict[int, bytes]:
    frames = [frame for frame in gateway.frames[attempt] if isinstance(frame, m.Vector)]
    assert len({frame.index for frame in frames}) == len(frames)
    return {frame.index: frame.values for frame in frames}


async def test_every_input_is_answered_and_the_attempt_recorded(gateway: PlayingGateway, nats_url: str) -> None:
    texts = [f"text number {i}" for i in range(300)]
    async with running_worker(settings_for(nats_url, task="embed", max_sequences=64)):
        attempt = await gateway.publish(pooled(gateway, texts))
        finished = await gateway.end_of(attempt)
        await gateway.wait_until_queue_is_empty()
    assert vectors(gateway, attempt) == {i: expected(text) for i, text in enumerate(texts)}
    tokens = sum(len(TOKENIZER.encode(text).ids) for text in texts)
    assert isinstance(finished, m.Finished)
    assert (finished.prompt_tokens, finished.completion_tokens, finished.cancelled) == (tokens, 0, False)
    await gateway.wait(lambda: bool(gateway.records))
    (record,) = gateway.records
    assert (record.outcome, record.prompt_tokens, record.completion_tokens, record.ttft_ms) == ("ok", tokens, 0, None)
    assert record.prefill_ms is not None
    assert 0 < record.prefill_ms < record.total_ms
    assert record.decode_ms == 0


async def test_a_later_attempt_runs_only_unanswered_inputs(gateway: PlayingGateway, nats_url: str) -> None:
    texts = ["a", "b", "c", "d"]
    resume = (m.ResumePoint(1, b"", 0, "stop"), m.ResumePoint(2, b"", 0, "stop"))
    async with running_worker(settings_for(nats_url, task="embed")):
        attempt = await gateway.publish(pooled(gateway, texts, attempt=2, resume=resume))
        await gateway.end_of(attempt)
        nothing = await gateway.publish(pooled(gateway, ["a"], attempt=2, resume=(m.ResumePoint(0, b"", 0, "stop"),)))
        await gateway.end_of(nothing)
    assert vectors(gateway, attempt) == {0: expected("a"), 3: expected("d")}
    assert vectors(gateway, nothing) == {}


async def test_a_job_that_fails_midway_resumes_there(gateway: PlayingGateway, nats_url: str) -> None:
    """The answers of both attempts are complete, without repetition."""
    texts = ["a", "b", "[[fail after=2]]", "d"]
    settings = settings_for(nats_url, task="embed", max_sequences=1, faults_from_prompt=True)
    async with running_worker(settings):
        first = await gateway.publish(pooled(gateway, texts, request_id="r"))
        failed = await gateway.end_of(first)
        done = vectors(gateway, first)
        resume = tuple(m.ResumePoint(index, b"", 0, "stop") for index in sorted(done))
        second = await gateway.publish(pooled(gateway, texts, request_id="r", attempt=2, resume=resume))
        await gateway.end_of(second)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    assert sorted(done) == [0, 1]
    assert sorted(vectors(gateway, second)) == [2, 3]
    assert done | vectors(gateway, second) == {i: expected(text) for i, text in enumerate(texts)}


async def test_canceling_returns_the_credit(gateway: PlayingGateway, nats_url: str) -> None:
    slow = settings_for(nats_url, task="embed", max_sequences=1, inter_token_s=0.01)
    async with running_worker(slow):
        attempt = await gateway.publish(pooled(gateway, ["x y z"] * 2000))
        await gateway.wait(lambda: len(gateway.frames.get(attempt, [])) > 2)
        await gateway.control("w1", m.Cancel(*attempt))
        ended = await gateway.end_of(attempt)
        after = await gateway.publish(pooled(gateway, ["after"]))
        await gateway.end_of(after)
    assert isinstance(ended, m.Finished)
    assert ended.cancelled
    assert len(vectors(gateway, attempt)) < 2000
    assert vectors(gateway, after) == {0: expected("after")}


async def test_many_large_vectors_stay_within_a_message(gateway: PlayingGateway, nats_url: str) -> None:
    texts = [str(i) for i in range(1200)]
    async with running_worker(settings_for(nats_url, task="embed", dimensions=2048, max_sequences=1200)):
        attempt = await gateway.publish(pooled(gateway, texts))
        await gateway.end_of(attempt)
    found = vectors(gateway, attempt)
    assert sorted(found) == list(range(1200))
    assert found[1199] == expected("1199", 2048)
    assert max(sum(len(m.encode(frame)) for frame in step.frames) for step in gateway.steps) <= 8 * 1024 * 1024


async def test_a_vector_model_refuses_text_and_vice_versa(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, task="embed")):
        refused = await gateway.end_of(await gateway.ask("hello"))
    assert isinstance(refused, m.Failed)
    assert (refused.code, refused.param) == ("invalid_request", "model")


async def test_scores(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, task="score")):
        attempt = await gateway.publish(pooled(gateway, ["a", "b"], task="score"))
        await gateway.end_of(attempt)
    scores = [array("f", values)[0] for _, values in sorted(vectors(gateway, attempt).items())]
    assert all(0 <= score <= 1 for score in scores)
    assert scores[0] != scores[1]
