"""A job's way through the worker: queue → engine → frames → record."""

from protocol import messages as m
from tests.integration.pool_worker.playing_gateway import PlayingGateway, running_worker, settings_for


async def test_a_job_is_answered_acknowledged_and_recorded(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        attempt = await gateway.ask(max_tokens=8, ignore_eos=True)
        finished = await gateway.end_of(attempt)
        await gateway.wait_until_queue_is_empty()
    gateway.assert_numbered_without_gaps(attempt)
    assert isinstance(gateway.frames[attempt][0], m.Accepted)
    assert isinstance(finished, m.Finished)
    assert finished.completion_tokens == 8 == len(gateway.token_ids(attempt))
    assert gateway.tokens(attempt)[-1].finish_reason == "length"
    (record,) = gateway.records
    assert (record.outcome, record.completion_tokens, record.prompt_tokens) == ("ok", 8, finished.prompt_tokens)
