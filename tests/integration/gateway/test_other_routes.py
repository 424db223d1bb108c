"""The other sections of docs/reference/api.md: files, batches, models, and routes without an SDK."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, get_args

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from anthropic.types import model_list_params
from openai.types import batch_create_params, batch_list_params, file_create_params, file_list_params
from openai.types.responses import input_item_list_params, response_retrieve_params
from pydantic import BaseModel
from typing_extensions import get_type_hints

from gateway.api import schema, vectors
from tests.integration.gateway.conftest import GatewayUnderTest, Share, Start
from tests.unit.gateway.api.page import page
from tests.unit.gateway.api.page.rows import STORED, Told, faults
from tests.unit.gateway.api.page.surfaces import RESPONSES
from tests.unit.gateway.api.tools.calls import says
from tests.waiting import HANGS_S

SDKS = {
    "GET /v1/responses/{response_id}": (
        response_retrieve_params.ResponseRetrieveParamsStreaming,
        input_item_list_params.InputItemListParams,
    ),
    "POST /v1/files": (file_create_params.FileCreateParams, file_list_params.FileListParams),
    "POST /v1/batches": (batch_create_params.BatchCreateParams, batch_list_params.BatchListParams),
    "GET /v1/models": (model_list_params.ModelListParams,),
}
OURS: dict[str, tuple[tuple[type[BaseModel], ...], Mapping[str, Any]]] = {
    "POST /tokenize": ((schema.TokenizeRequest, schema.DetokenizeRequest), {}),
    "POST /v1/score": (
        (vectors.ScoreRequest, vectors.RerankRequest),
        vectors.UNSUPPORTED_IN_RERANK,
    ),
}
# Fields that docs/reference/request-fields.md and others document for all routes.
EVERYWHERE = {"do_not_queue", "allow_hosted", "safety_identifier", "metadata"}
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "short", "prompt": "Hi"}}\n'


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayUnderTest:
    return await share_gateway(console={})


@pytest_asyncio.fixture(loop_scope="module")
async def claude(gateway: GatewayUnderTest) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        yield client


async def test_every_route_is_named(gateway: GatewayUnderTest) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    routes = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    assert page.routes() == {route for route in routes if "/admin/" not in route}


@pytest.mark.parametrize("section", SDKS)
def test_every_parameter_has_a_row(section: str) -> None:
    known = {name for params in SDKS[section] for name in get_type_hints(params)}
    assert {name for where, name in page.sections()[section] if not where} == known


@pytest.mark.parametrize("section", OURS)
def test_every_spillway_field_has_a_row(section: str) -> None:
    bodies, unsupported = OURS[section]
    fields = {name for body in bodies for name in body.model_fields} - EVERYWHERE
    rows = page.sections()[section]
    assert {name for (_, name), status in rows.items() if status == page.REFUSED} == unsupported.keys()
    assert {name for (_, name), status in rows.items() if status != page.REFUSED} == fields


async def _refused(asking: Awaitable[Any]) -> str | None:
    with pytest.raises(openai.BadRequestError) as refused:
        await asking
    return refused.value.param


async def test_kept_responses(gateway: GatewayUnderTest) -> None:
    await gateway.add_worker(script=says("x"))
    responses = gateway.client().responses
    made = await responses.create(model="short", input="Hi", background=True)
    events = [event async for event in await responses.retrieve(made.id, stream=True)]
    later = [event async for event in await responses.retrieve(made.id, stream=True, starting_after=1)]
    assert [event.sequence_number for event in events] == [0, 1, *(event.sequence_number for event in later)]
    assert (await responses.retrieve(made.id, include=["reasoning.encrypted_content"])).status == "completed"
    items = responses.input_items
    [item] = (await items.list(made.id, limit=1, order="asc")).data
    assert (await items.list(made.id, after=item.id)).data == []
    assert await _refused(responses.retrieve(made.id, include=["message.output_text.logprobs"])) == "include.0"
    assert await _refused(responses.retrieve(made.id, stream=True, include_obfuscation=True)) == "include_obfuscation"
    assert await _refused(items.list(made.id, include=["message.output_text.logprobs"])) == "include.0"
    wrong: dict[str, Any] = {"limit": 0, "order": "up"}
    for name, value in wrong.items():
        assert await _refused(items.list(made.id, **{name: value})) == name


async def test_rows_of_what_is_stored(gateway: GatewayUnderTest) -> None:
    """The other rows are tested without a queue server (tests/unit/gateway/api/page)."""
    await gateway.add_worker(script=says("x"))
    told, headers = Told(RESPONSES), {"authorization": f"Bearer {gateway.key}"}
    asked = [known for known in told.known() if known.top in STORED]
    assert {known.top for known in asked} == STORED
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as http:
        assert not (found := await faults(http, told, asked)), "\n".join(found)


async def test_files(gateway: GatewayUnderTest) -> None:
    files = gateway.client().files
    expires: Any = {"anchor": "created_at", "seconds": 7200}
    first = await files.create(file=("a.jsonl", LINE), purpose="batch", expires_after=expires)
    assert first.expires_at == first.created_at + 7200
    second = await files.create(file=("b.jsonl", LINE), purpose="batch")
    for purpose in get_args(get_type_hints(file_create_params.FileCreateParams)["purpose"]):
        if purpose != "batch":
            assert await _refused(files.create(file=("a.jsonl", LINE), purpose=purpose)) == "purpose"
    soon: Any = {"seconds": 5}  # without the required anchor
    assert await _refused(files.create(file=("a.jsonl", LINE), purpose="batch", expires_after=soon)) == (
        "expires_after[seconds]"
    )
    assert (await files.list(order="asc", limit=1, purpose="batch")).data[0].id == first.id
    assert (await files.list(order="asc", after=first.id)).data[0].id == second.id
    wrong: dict[str, Any] = {"limit": 0, "order": "up"}
    for name, value in wrong.items():
        assert await _refused(files.list(**{name: value})) == name


async def test_batches(start_gateway: Start) -> None:
    client = (await start_gateway()).client()  # its lines wait for a worker
    file = await client.files.create(file=("a.jsonl", LINE), purpose="batch")
    expires: Any = {"anchor": "created_at", "seconds": 7200}
    rows = page.sections()["POST /v1/batches"]

    def create(**rest: Any) -> Awaitable[Any]:
        needed = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return client.batches.create(**{**needed, **rest})

    batch = await create(metadata={"a": "b"}, output_expires_after=expires)
    assert batch.metadata == {"a": "b"}
    wrong: dict[str, Any] = {"completion_window": "soon", "metadata": 5, "output_expires_after": 5, "input_file_id": 5}
    for name, value in wrong.items():
        assert await _refused(create(**{name: value})) == name
    for endpoint in get_args(get_type_hints(batch_create_params.BatchCreateParams)["endpoint"]):
        if page.status_of(rows, "endpoint", endpoint) == page.REFUSED:
            assert await _refused(create(endpoint=endpoint)) == "endpoint"
        else:
            await create(endpoint=endpoint)
    newest = (await client.batches.list(limit=1)).data[0]
    assert newest.id != batch.id
    assert (await client.batches.list(after=newest.id)).data
    assert await _refused(client.batches.list(limit=0)) == "limit"


LISTED: dict[str, Any] = {"after_id": "x", "before_id": "x", "limit": 1, "lifecycle": ["retired"], "workspace_id": "w"}


@pytest.mark.parametrize("name", get_type_hints(model_list_params.ModelListParams))
async def test_models(claude: anthropic.AsyncAnthropic, name: str) -> None:
    whole, asked = await claude.models.list(), await claude.models.list(**{name: LISTED[name]})
    assert [model.id for model in asked.data] == [model.id for model in whole.data]
    assert not asked.has_more


async def test_spillway_fields_have_an_effect(gateway: GatewayUnderTest) -> None:
    faults = []
    bodies: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
        "/tokenize": (schema.TokenizeRequest, {"prompt": "x"}, {}),
        "/detokenize": (schema.DetokenizeRequest, {"tokens": [5]}, {}),
        "/v1/score": (
            vectors.ScoreRequest,
            {"text_1": "x", "text_2": "y"},
            vectors.UNSUPPORTED_EVERYWHERE,
        ),
        "/v1/rerank": (
            vectors.RerankRequest,
            {"query": "x", "documents": ["y"]},
            vectors.UNSUPPORTED_IN_RERANK,
        ),
    }
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        for path, (body, needed, unsupported) in bodies.items():
            for name in (*body.model_fields, *unsupported):
                answer = await client.post(path, json={"model": "short", **needed, name: 5.5})
                if answer.status_code != httpx.codes.BAD_REQUEST or answer.json()["error"]["param"] != name:
                    faults.append(f"{path} {name}: {answer.status_code} {answer.text}")
    assert not faults, "\n".join(faults)
