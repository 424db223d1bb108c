"""Stored responses: retrieved, continued, listed, and deleted with OpenAI's client."""

from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.integration.gateway.batches.test_files import client_of, team_of
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt
from tests.small_tokenizer import byte_tokenizer


async def test_stored_responses_can_be_retrieved_and_deleted(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True, metadata={"run": "7"})
    assert made.output_text == "Hello world"
    assert made.model_dump()["store"] is True
    assert await client.responses.retrieve(made.id) == made
    items = await client.responses.input_items.list(made.id)
    [item] = items.data
    assert item.model_dump(exclude_none=True) == {
        "id": item.id,
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    await client.responses.delete(made.id)
    for missing in (made.id, "resp_unknown", "resp_*", "a.b"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(missing)


async def test_a_stream_is_stored_before_its_last_event(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    client = gateway.client()
    async with client.responses.stream(model=MODEL, input="Hi", store=True) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    found = await client.responses.retrieve(events[-1].response.id)
    assert found.model_dump() == events[-1].response.model_dump(exclude={"parsed"}) | found.model_dump(
        include={"output"}
    )
    assert found.output_text == "Hello world"


@pytest.mark.parametrize("by_default", [True, False])
async def test_an_omitted_store_follows_the_setting(share_gateway: Share, by_default: bool) -> None:
    gateway = await share_gateway(**({"responses": {"store_by_default": True}} if by_default else {}))
    await gateway.add_worker()
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi")
    assert made.model_dump()["store"] is by_default
    if by_default:
        assert (await client.responses.retrieve(made.id)).id == made.id
        return
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    assert (unknown.value.param, unknown.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_a_conversation_continues(share_gateway: Share) -> None:
    prompts: list[str] = []

    async def note(attempt: Attempt) -> None:
        prompts.append(byte_tokenizer().decode(attempt.prompt_ids))
        await attempt.accept()
        await attempt.tokens(f"answer {len(prompts)}", (1,), finish_reason="stop")
        await attempt.finish()

    gateway = await share_gateway()
    await gateway.add_worker(script=note)
    client = gateway.client()
    first = await client.responses.create(model=MODEL, input="one", instructions="Be brief.", store=True)
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id, store=True)
    third = await client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "three"}], previous_response_id=second.id
    )
    assert third.previous_response_id == second.id
    assert "Be brief." in prompts[0]
    assert "Be brief." not in prompts[1]  # instructions apply to one response
    places = [prompts[2].index(text) for text in ("one", "answer 1", "two", "answer 2", "three")]
    assert places == sorted(places)
    listed: list[Any] = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [item.content[0].text for item in listed] == ["one", "answer 1", "two"]
    newest = await client.responses.input_items.list(second.id, limit=2)
    items: list[Any] = newest.data
    assert [item.content[0].text for item in items] == ["two", "answer 1"]
    assert newest.has_more


async def test_other_teams_do_not_see_it(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    made = await gateway.client().responses.create(model=MODEL, input="Hi", store=True)
    _, other_key = await gateway.make_key()
    other = gateway.client(api_key=other_key)
    for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id)
    with pytest.raises(openai.BadRequestError):
        await other.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    assert (await gateway.client().responses.retrieve(made.id)).id == made.id


async def test_they_belong_to_the_team(start_gateway: Start) -> None:
    gateway = await start_gateway()
    await gateway.add_worker()
    team = await team_of(gateway, "research")
    one, two = [await client_of(gateway, name, team.team_id) for name in ("one", "two")]
    made = await one.responses.create(model=MODEL, input="Hi", store=True)
    assert (await two.responses.retrieve(made.id)).id == made.id
    await two.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await one.responses.retrieve(made.id)


async def test_storage_of_a_team_is_limited(start_gateway: Start) -> None:
    gateway = await start_gateway(responses={"max_tenant_responses": 2})
    await gateway.add_worker()
    client = gateway.client()
    for _ in range(2):
        await client.responses.create(model=MODEL, input="Hi", store=True)
    with pytest.raises(openai.RateLimitError) as full:
        await client.responses.create(model=MODEL, input="Hi", store=True)
    assert full.value.code == "too_many_stored_responses"
    assert full.value.response.headers["x-should-retry"] == "false"
    assert (await client.responses.create(model=MODEL, input="Hi")).output_text == "Hello world"


async def test_an_oversized_response_is_answered_but_not_stored(start_gateway: Start) -> None:
    gateway = await start_gateway(responses={"max_response_bytes": 200})
    await gateway.add_worker()
    made = await gateway.client().responses.create(model=MODEL, input="Hi", store=True)
    assert made.output_text == "Hello world"
    assert made.model_dump()["store"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"background": True, "store": False}, "store"), ({"previous_response_id": ""}, "previous_response_id")],
)
async def test_invalid_requests_are_refused_by_name(
    gateway: GatewayUnderTest, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().responses.create(**{"model": MODEL, "input": "Hi", **fields})
    assert refused.value.param == param


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayUnderTest:
    gateway = await share_gateway()
    await gateway.add_worker()
    return gateway


async def test_only_background_responses_stream_and_cancel(gateway: GatewayUnderTest) -> None:
    client = gateway.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    with pytest.raises(openai.BadRequestError) as stream:
        await client.responses.retrieve(made.id, stream=True)
    assert stream.value.param == "stream"
    with pytest.raises(openai.BadRequestError) as after:
        await client.responses.retrieve(made.id, starting_after=1)
    assert after.value.param == "starting_after"
    with pytest.raises(openai.BadRequestError) as cancel:
        await client.responses.cancel(made.id)
    assert cancel.value.param == "response_id"
