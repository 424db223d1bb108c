"""Workers of one model with different revisions: each resumes only answers of its own weights."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pool_worker.engines.scripted_words import build_tokenizer
from protocol import job as m
from protocol import subjects
from protocol.nats.objects import read_model_card, revision_of, tokenizer_name, tokenizer_object_name
from tests.integration.pool_worker.playing_gateway import MODEL, PlayingGateway, running_worker, settings_for
from tests.waiting import HANGS_S


def tokenizer(further_token: str = "") -> str:
    return tokenizer_name(tokenizer_object_name(build_tokenizer(further_token).to_str().encode()))


def resume() -> tuple[m.ResumePoint, ...]:
    return (m.ResumePoint(0, m.pack_token_ids([300]), 0),)


@asynccontextmanager
async def two_workers(gateway: PlayingGateway, url: str) -> AsyncIterator[None]:
    await gateway.apply_topology()
    async with (
        running_worker(settings_for(url, worker_id="old", revision="old")),
        running_worker(settings_for(url, worker_id="new", revision="new", tokenizer="<|new|>")),
    ):
        yield


async def test_a_worker_leaves_answers_of_other_weights_alone(gateway: PlayingGateway, nats_url: str) -> None:
    async with two_workers(gateway, nats_url):
        for revision in ("old", "new"):
            needed = m.Revision(revision)
            asked = [await gateway.ask(resume=resume(), attempt=2, revision=needed) for _ in range(6)]
            await gateway.end_of_all(asked)
            for attempt in asked:
                first = gateway.frames[attempt][0]
                assert isinstance(first, m.Accepted)
                assert (first.worker_id, first.revision) == (revision, revision)
                assert isinstance(gateway.last(attempt), m.Finished)


async def test_token_ids_go_to_a_worker_with_their_tokenizer(gateway: PlayingGateway, nats_url: str) -> None:
    async with two_workers(gateway, nats_url):
        for worker_id, further_token in (("old", ""), ("new", "<|new|>")):
            asked = [await gateway.ask(revision=m.Revision("", tokenizer(further_token))) for _ in range(6)]
            await gateway.end_of_all(asked)
            first_frames = [gateway.frames[attempt][0] for attempt in asked]
            assert {frame.worker_id for frame in first_frames if isinstance(frame, m.Accepted)} == {worker_id}


async def test_any_worker_takes_a_new_job(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, revision="new")):
        assert isinstance(await gateway.end_of(await gateway.ask()), m.Finished)


async def test_a_worker_publishes_its_revisions(gateway: PlayingGateway, nats_url: str) -> None:
    beats: asyncio.Queue[m.Heartbeat] = asyncio.Queue()

    async def note(message: object) -> None:
        beats.put_nowait(m.decode_heartbeat(message.data))  # type: ignore[attr-defined]

    await gateway.bus.subscribe(subjects.heartbeat_subject("w1"), note)
    async with running_worker(settings_for(nats_url, revision="new")):
        beat = await asyncio.wait_for(beats.get(), HANGS_S)
        card = await read_model_card(gateway.bus, MODEL)
    assert beat.revisions == {MODEL: m.Revision("new", tokenizer())}
    assert card is not None
    assert revision_of(card) == m.Revision("new", tokenizer())


async def test_an_outdated_card_is_replaced(gateway: PlayingGateway, nats_url: str) -> None:
    """Otherwise gateways would keep making token ids that no worker understands."""
    async with running_worker(settings_for(nats_url, worker_id="new", revision="new")):
        card = await read_model_card(gateway.bus, MODEL)
        assert card is not None
        old = m.ModelCard(m.PROTOCOL_VERSION, MODEL, 512, "tokenizer-old", None, revision="old")
        await gateway.bus.request(subjects.model_card_subject(MODEL), m.encode(old), timeout_s=HANGS_S)
        await gateway.ask(revision=m.Revision("", "old"))
        async with asyncio.timeout(HANGS_S):
            while await read_model_card(gateway.bus, MODEL) != card:
                await asyncio.sleep(0.05)


async def test_a_draining_worker_keeps_jobs_that_no_other_can_resume(gateway: PlayingGateway, nats_url: str) -> None:
    """Even if it does not end in time: no other worker could resume it."""
    slow = settings_for(nats_url, worker_id="old", revision="old", inter_token_s=0.02, drain_s=60)
    async with running_worker(slow) as stop:
        attempt = await gateway.ask(max_tokens=8000, ignore_eos=True)
        await gateway.tokens_of(attempt, 3)
        async with running_worker(settings_for(nats_url, worker_id="new", revision="new")):
            stop.request()
            many = len(gateway.token_ids(attempt)) + 20
            await gateway.wait(lambda: gateway.is_over(attempt) or len(gateway.token_ids(attempt)) >= many)
            assert not gateway.is_over(attempt)
            stop.request(0.0)  # the provider takes the machine now
