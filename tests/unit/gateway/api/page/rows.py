"""Compares docs/reference/api.md with an SDK's parameters and the behavior of a gateway."""

import re
from collections.abc import Iterable
from typing import Any, Final

import httpx

from tests.unit.gateway.api.page import page
from tests.unit.gateway.api.page.params import Known, Walk
from tests.unit.gateway.api.page.surfaces import HEADERS, PREVIOUS, Sdk
from tests.unit.gateway.local_gateway import MODEL

STORED: Final = frozenset({"store", "previous_response_id", "background"})  # parameters that need a queue server


class Told:
    """The page's rows of a route."""

    def __init__(self, sdk: Sdk) -> None:
        self.sdk = sdk
        self.rows = page.sections()[sdk.section]
        self.walk = Walk(sdk.params, sdk.examples, self._goes_on)

    def _goes_on(self, known: Known) -> bool:
        return self.status(known) == page.SUPPORTED and known.path not in self.sdk.opaque

    def status(self, known: Known) -> str:
        """Return its status: from its row, the row of all others, or its parent."""
        where, top = known.where, self.rows.get(("", known.top), "")
        if known.name == known.top == "model":
            return page.IGNORED  # its values are names
        if not where:
            return top
        return page.status_of(self.rows, where, known.name) or top

    def known(self) -> list[Known]:
        return [known for known in self.walk if known.path != "model"]


async def faults(http: httpx.AsyncClient, told: Told, asked: Iterable[Known]) -> list[str]:
    """Return the rows that do not match the gateway's answers."""
    found = []
    for known in asked:
        status = told.status(known)
        fault = _fault(await _ask(http, told.sdk, known, known.value), known, status)
        if fault:
            found.append(f"{known.path} = {known.value!r} should be {status}: {fault}")
        elif status == page.SUPPORTED and known.wrong is not None and known.path not in told.sdk.of_any_type:
            fault = _fault(await _ask(http, told.sdk, known, known.wrong), known, page.REFUSED)
            if fault:
                found.append(f"{known.path} is not read: {known.wrong!r} is no fault: {fault}")
    return found


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
    """Return the error of an answer; empty if there is none."""
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
    """Return a path without indexes and types of items."""
    return re.sub(r"\.\d+(?=\.|$)|\[[^\]]*\]", "", path)
