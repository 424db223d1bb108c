"""One worker shares itself among the lanes of a real queue."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from nats.aio.msg import Msg

from protocol import job as m
from protocol import subjects
from protocol.nats import topology
from tests.integration.pool_worker.playing_gateway import MODEL, PlayingGateway, running_worker, settings_for
from tests.waiting import until


async def publish_all(gateway: PlayingGateway, lane: str, jobs: list[m.Job]) -> None:
    await asyncio.gather(*(gateway.publish(job, lane=lane) for job in jobs))


def jobs_of(gateway: PlayingGateway, tenant: str, count: int, **fields: Any) -> list[m.Job]:
    return [gateway.job(request_id=f"{tenant}-{i}", ignore_eos=True, **fields) for i in range(count)]


def accepted(gateway: PlayingGateway) -> list[str]:
    """Return the tenants, or lanes, of the jobs in order of acceptance."""
    return [request_id.partition("-")[0] for request_id, _ in gateway.frames]


def served_tokens(gateway: PlayingGateway, prompt_tokens: int) -> Counter[str]:
    served: Counter[str] = Counter()
    for attempt in gateway.frames:
        served[attempt[0].partition("-")[0]] += prompt_tokens + len(gateway.token_ids(attempt))
    return served


@pytest.mark.parametrize(("weight", "allowed"), [(1.0, 0.10), (3.0, 0.15)])
async def test_tenants_are_served_by_weight_regardless_of_load(
    gateway: PlayingGateway, nats_url: str, weight: float, allowed: float
) -> None:
    """One tenant offers ten times the load of the other, in small jobs; both always have jobs waiting."""
    greedy = jobs_of(gateway, "greedy", 1000, max_tokens=8)
    modest = jobs_of(gateway, "modest", 40, max_tokens=30, weight=weight)
    await publish_all(gateway, "h2", greedy)
    await publish_all(gateway, "h5", modest)
    prompt_tokens = len(greedy[0].prompt_ids) // 4
    async with running_worker(settings_for(nats_url, max_sequences=4, inter_token_s=0.0005, drain_s=0.0)):
        await gateway.wait(lambda: sum(len(gateway.token_ids(("modest-" + str(i), 1))) for i in range(40)) > 1000)
        served = served_tokens(gateway, prompt_tokens)
    share = served["modest"] / served["greedy"]
    assert weight * (1 - allowed) <= share <= weight * (1 + allowed)


async def test_a_light_tenant_is_next_regardless_of_other_lanes(gateway: PlayingGateway, nats_url: str) -> None:
    heavy = jobs_of(gateway, "heavy", 60, max_tokens=20)
    await publish_all(gateway, "h0", heavy)
    async with running_worker(settings_for(nats_url, max_sequences=1, inter_token_s=0.001, drain_s=0.0)):
        await gateway.wait(lambda: len(gateway.frames) > 3)
        before = len(gateway.frames)
        await publish_all(gateway, "h7", jobs_of(gateway, "light", 1))
        await gateway.wait(lambda: "light" in accepted(gateway))
    assert accepted(gateway).index("light") <= before + 2


async def test_one_slot_serves_all_lanes(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, max_sequences=1)):
        for lane in subjects.LANES:  # one at a time, to an idle worker
            attempt = await gateway.publish(gateway.job(), lane=lane)
            assert isinstance(await gateway.end_of(attempt), m.Finished)
        jobs = {lane: jobs_of(gateway, lane, 4, max_tokens=3) for lane in subjects.LANES}
        await asyncio.gather(*(publish_all(gateway, lane, jobs[lane]) for lane in jobs))
        await gateway.end_of_all((job.request_id, 1) for lane in jobs for job in jobs[lane])
    assert await gateway.queued() == 0


async def test_resumed_jobs_come_first_and_batch_jobs_last(gateway: PlayingGateway, nats_url: str) -> None:
    for lane in ("low", "h1", "h4", "resume"):
        await publish_all(gateway, lane, jobs_of(gateway, lane, 5, max_tokens=2))
    async with running_worker(settings_for(nats_url, max_sequences=1)):
        await gateway.end_of_all((f"{lane}-{i}", 1) for lane in ("low", "h1", "h4", "resume") for i in range(5))
    order = accepted(gateway)
    assert order[:5] == ["resume"] * 5
    assert set(order[5:15]) == {"h1", "h4"}
    assert order[15:] == ["low"] * 5


async def test_batch_leaves_a_reserve_free(gateway: PlayingGateway, nats_url: str) -> None:
    await publish_all(gateway, "low", jobs_of(gateway, "low", 30, max_tokens=8000))
    settings = settings_for(nats_url, max_sequences=10, inter_token_s=0.001, drain_s=0.0)
    async with running_worker(settings.model_copy(update={"batch_reserve": 0.2})):
        for _ in range(20):  # two at a time find room, repeatedly
            pair = [await gateway.publish(gateway.job(max_tokens=2), lane="h3") for _ in range(2)]
            await gateway.end_of_all(pair)
        await gateway.wait(lambda: accepted(gateway).count("low") == 8)
    assert accepted(gateway).count("low") == 8


async def test_a_batch_job_that_does_not_fit_lets_others_pass(gateway: PlayingGateway, nats_url: str) -> None:
    settings = settings_for(nats_url, max_sequences=4, inter_token_s=0.001, drain_s=0.0)
    async with running_worker(settings):
        await publish_all(gateway, "low", jobs_of(gateway, "long", 1, max_tokens=8000))
        await gateway.wait(lambda: len(gateway.frames) == 1)
        await publish_all(gateway, "low", jobs_of(gateway, "wide", 1, max_tokens=10, n=4))
        await gateway.wait(lambda: len(gateway.frames) == 2)
        assert isinstance(await gateway.end_of(await gateway.publish(gateway.job())), m.Finished)
        assert not gateway.tokens(("wide-0", 1))
        await gateway.control("w1", m.Cancel("long-0", 1))
        assert isinstance(await gateway.end_of(("wide-0", 1)), m.Finished)


async def test_several_models_share_one_worker(gateway: PlayingGateway, nats_url: str) -> None:
    models = (MODEL, "another", "third")
    await gateway.apply_topology(models)
    settings = settings_for(nats_url, max_sequences=2).model_copy(update={"models": models})
    async with running_worker(settings):
        for model in models:
            assert isinstance(await gateway.end_of(await gateway.ask(model=model)), m.Finished)
        jobs = [gateway.job(model=model, max_tokens=4) for model in models for _ in range(20)]
        await publish_all(gateway, "h0", jobs)
        await gateway.end_of_all((job.request_id, 1) for job in jobs)


async def test_jobs_without_room_go_to_other_workers(gateway: PlayingGateway, nats_url: str) -> None:
    """A worker of one slot watches ten lanes; when each gets a job at once, the other nine must not wait for it."""
    async with running_worker(
        settings_for(nats_url, worker_id="w1", max_sequences=1, inter_token_s=0.001, drain_s=0.0)
    ):
        first = await gateway.publish(gateway.job(max_tokens=8000, ignore_eos=True), lane="h0")
        await gateway.tokens_of(first, 1)
        async with running_worker(settings_for(nats_url, worker_id="w2")):
            others = [await gateway.publish(gateway.job(), lane=lane) for lane in subjects.LANES[1:]]
            await gateway.end_of_all(others)
        assert {gateway.frames[attempt][0].worker_id for attempt in others} == {"w2"}  # type: ignore[union-attr]


async def test_recreated_lanes_are_served_again(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        assert isinstance(await gateway.end_of(await gateway.ask()), m.Finished)
        await gateway.bus.api(f"STREAM.DELETE.{subjects.INTERACTIVE_STREAM}")
        await gateway.apply_topology()
        for lane in subjects.LANES:
            attempt = await gateway.publish(gateway.job(), lane=lane)
            assert isinstance(await gateway.end_of(attempt), m.Finished)


async def test_no_pull_lasts_longer_than_a_job_may_be_kept_by_a_frozen_worker(
    gateway: PlayingGateway, nats_url: str
) -> None:
    pulls: list[dict[str, int]] = []

    async def look(message: Msg) -> None:
        pulls.append(json.loads(message.data))

    await gateway.bus.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.INTERACTIVE_STREAM}.*", look)
    async with running_worker(settings_for(nats_url)):
        await gateway.end_of(await gateway.ask())
        await until(lambda: len(pulls) >= len(subjects.LANES))
    assert max(pull.get("expires", 0) for pull in pulls) / topology.NS + topology.ACK_WAIT_S < 4.0
