"""docs/API.md says what becomes of every parameter that the SDKs know: each of its rows is true of a running gateway.

Where this fails after an upgrade of an SDK, it names what the SDK knows now and the page does not.
"""

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.integration.gateway.api_page import page
from tests.integration.gateway.api_page.params import Known, Walk
from tests.integration.gateway.api_page.surfaces import HEADERS, PREVIOUS, SDKS, Sdk
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, card
from tests.integration.gateway.pooling.inputs import EMBEDDER, embed, start_with
from tests.integration.gateway.tools.calls import says
from tests.tool_templates import THINKING_STYLE
from tests.waiting import HANGS_S

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Told:
    """What the page says of one route."""

    def __init__(self, sdk: Sdk) -> None:
        self.sdk = sdk
        self.rows = page.sections()[sdk.section]
        self.walk = Walk(sdk.params, sdk.examples, self._goes_on)

    def _goes_on(self, known: Known) -> bool:
        return self.status(known) == page.HONOURED and known.path not in self.sdk.opaque

    def status(self, known: Known) -> str:
        """What becomes of it: by its own row, by that of all others, or as of what it is in."""
        where, top = known.where, self.rows.get(("", known.top), "")
        if known.name == known.top == "model":
            return page.IGNORED  # its values are names
        if not where:
            return top
        return page.status_of(self.rows, where, known.name) or top

    def known(self) -> list[Known]:
        return [known for known in self.walk if known.path != "model"]


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.path)
def told(request: pytest.FixtureRequest) -> Told:
    return Told(request.param)


def test_every_parameter_has_a_row(told: Told) -> None:
    listed = {name for where, name in told.rows if not where}
    known = {known.name for known in told.walk if not known.where}
    assert sorted(known - listed) == []
    others = [Told(sdk).walk for sdk in SDKS if sdk.section == told.sdk.section]
    assert sorted(listed - {known.name for walk in others for known in walk} - told.sdk.further) == []


def test_values_are_all_listed_where_some_are(told: Told) -> None:
    listed = {where for where, _ in told.rows if where.rpartition(".")[2] in {"type", "role"}}
    found = {(known.where, known.name) for known in told.walk}
    assert sorted({where for where, _ in found if where.endswith((".type", ".role"))} - listed) == []
    assert [one for one in found if one[0] in listed and page.status_of(told.rows, *one) is None] == []


def test_no_row_is_of_something_else(told: Told) -> None:
    found = {(known.where, known.name) for sdk in SDKS if sdk.section == told.sdk.section for known in Told(sdk).walk}
    wheres = {where for where, _ in found} | {page.ANYWHERE}
    assert [row for row in told.rows if row[0] and row[0] not in wheres] == []
    rest = [(where, name) for where, name in told.rows if where and name != page.OTHERS and where != page.ANYWHERE]
    assert [row for row in rest if row not in found] == []


@pytest_asyncio.fixture(loop_scope="module")
async def http(told: Told, share_gateway: Share) -> AsyncIterator[httpx.AsyncClient]:
    gateway = await (start_with(share_gateway, EMBEDDER) if told.sdk.makes_vectors else _with_tools(share_gateway))
    await gateway.add_worker(script=embed if told.sdk.makes_vectors else says("x"))
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


async def _with_tools(share_gateway: Share) -> GatewayUnderTest:
    return await share_gateway(model_card=replace(card(), chat_template=THINKING_STYLE, context_length=4096))


async def test_each_row_is_true(told: Told, http: httpx.AsyncClient) -> None:
    faults = []
    for known in told.known():
        status = told.status(known)
        answer = await _ask(http, told.sdk, known, known.value)
        fault = _fault(answer, known, status)
        if fault:
            faults.append(f"{known.path} = {known.value!r} should be {status}: {fault}")
        elif status == page.HONOURED and known.wrong is not None and known.path not in told.sdk.of_any_type:
            answer = await _ask(http, told.sdk, known, known.wrong)
            fault = _fault(answer, known, page.REFUSED)
            if fault:
                faults.append(f"{known.path} is not read: {known.wrong!r} is no fault: {fault}")
    assert not faults, "\n".join(faults)


async def _ask(http: httpx.AsyncClient, sdk: Sdk, known: Known, value: Any) -> httpx.Response:
    given = {"model": MODEL, **sdk.body, **sdk.beside.get(known.path, sdk.beside.get(known.top, {}))}
    if value == PREVIOUS:
        value = (await http.post(sdk.path, json={**given, "store": True})).json()["id"]
    if isinstance(value, list):
        value = value + sdk.after.get(known.top, [])
    if known.top in HEADERS:
        return await http.post(sdk.path, json=given, headers={HEADERS[known.top]: value})
    return await http.post(sdk.path, json={**given, known.top: value})


def _fault(answer: httpx.Response, known: Known, status: str) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if status != page.REFUSED:
        return "" if answer.status_code == httpx.codes.OK else f"{answer.status_code} {answer.text}"
    if answer.status_code != httpx.codes.BAD_REQUEST:
        return f"{answer.status_code} {answer.text[:200]}"
    error = answer.json()["error"]
    named = error["param"] if "param" in error else _first_quoted(error["message"])
    path = _plain(known.path if known.wrong is not None or not known.where else known.where)
    parent = path.rpartition(".")[0]
    if _plain(named or "") == path or (known.where and _plain(named or "") == parent):
        return ""
    return f"{named!r} is named instead of {path!r}: {error['message']}"


def _first_quoted(message: str) -> str:
    found = re.search(r"'([^']+)'", message)
    return found[1] if found else ""


def _plain(path: str) -> str:
    """A path without the numbers and kinds of items."""
    return re.sub(r"\.\d+(?=\.|$)|\[[^\]]*\]", "", path)
