"""A hosted worker serves only its own lane, and rechecks which prompts may be sent."""

from protocol import job as m
from protocol import subjects
from protocol.nats import topology
from tests.integration.pool_worker.playing_gateway import MODEL, PlayingGateway, running_worker, settings_for
from tests.waiting import HANGS_S

LANE = subjects.hosted_lane("api")


async def test_a_job_without_consent_is_left_to_others(gateway: PlayingGateway, nats_url: str) -> None:
    lanes = [(MODEL, LANE)]
    await topology.apply(gateway.bus, [MODEL], topology.QueueBounds(), further_lanes=lanes, limit_s=HANGS_S)
    hosted = {"pool": "api", "tier": "hosted", "provider": "openai"}
    async with running_worker(settings_for(nats_url, worker_id="api-1").model_copy(update=hosted)):
        of_others = await gateway.publish(gateway.job(hosted=("openai",)))  # in a lane that it does not serve
        stays = await gateway.publish(gateway.job(max_tokens=2), lane=LANE)
        elsewhere = await gateway.publish(gateway.job(max_tokens=2, hosted=("anthropic",)), lane=LANE)
        leaves = await gateway.publish(gateway.job(max_tokens=2, hosted=("azure", "openai")), lane=LANE)
        await gateway.end_of(leaves)
        assert await gateway.queued() == 3
    accepted = gateway.frames[leaves][0]
    assert isinstance(accepted, m.Accepted)
    assert (accepted.pool, accepted.provider, accepted.tier) == ("api", "openai", "hosted")
    assert not gateway.frames.keys() & {stays, elsewhere, of_others}
