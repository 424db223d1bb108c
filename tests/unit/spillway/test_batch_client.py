"""What the client of ``spillway batch`` makes of gateways that fail; only the transport is a fake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from spillway.cli.batch_client import BatchApiError, BatchClient

Answer = Callable[[httpx.Request], httpx.Response]


def client_of(*answers: Answer) -> tuple[BatchClient, list[httpx.Request]]:
    """A client whose requests are answered in turn, the last answer again and again."""
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[min(len(asked), len(answers)) - 1](request)

    return BatchClient("http://gateway/v1/", "sk-1", httpx.MockTransport(handle)), asked


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("connection lost", request=request)


def says(status: int, content: Any, **headers: str) -> Answer:
    return lambda _request: httpx.Response(status, json=content, headers=headers)


def test_a_batch_whose_answer_was_lost_is_found_and_not_made_twice() -> None:
    batch = {"id": "batch_1", "input_file_id": "file-1"}
    listed = {"data": [{"id": "batch_0", "input_file_id": "file-0"}, batch], "has_more": False}
    client, asked = client_of(gone, says(200, listed), says(200, batch))
    assert client.create("file-1", "/v1/chat/completions", "24h") == batch
    assert [request.method for request in asked] == ["POST", "GET", "GET"]
    client, asked = client_of(gone, says(200, {"data": []}), says(200, batch))
    assert client.create("file-1", "/v1/chat/completions", "24h") == batch
    assert [request.method for request in asked] == ["POST", "GET", "POST"]
    assert json.loads(asked[-1].content)["input_file_id"] == "file-1"


def test_what_may_work_later_is_tried_again_and_told() -> None:
    busy = says(503, {"error": {"message": "no room", "code": "overloaded"}})
    client, asked = client_of(gone, busy, says(200, {"id": "batch_1"}))
    troubles: list[str] = []
    client.on_retry = troubles.append
    assert client.retrieve("batch_1") == {"id": "batch_1"}
    assert len(asked) == 3
    assert troubles == ["http://gateway does not answer: connection lost", "503 overloaded: no room"]
    assert asked[0].url == "http://gateway/v1/batches/batch_1"
    assert asked[0].headers["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (says(404, {"error": {"message": "No batch found.", "code": "not_found"}}), "404 not_found: No batch found."),
        (says(429, {"error": {"message": "spent"}}, **{"x-should-retry": "false"}), "429: spent"),
        (says(401, {"error": "who?"}), "401: who?"),
        (lambda _: httpx.Response(400, text="<html>"), "400: <html>"),
        (lambda _: httpx.Response(200, text="<html>"), "is not an OpenAI-compatible API"),
    ],
)
def test_what_cannot_work_later_is_an_error_at_once(answer: Answer, message: str) -> None:
    client, asked = client_of(answer)
    with pytest.raises(BatchApiError) as caught:
        client.retrieve("batch_1")
    assert message in str(caught.value)
    assert len(asked) == 1


def test_patience_ends() -> None:
    client, asked = client_of(gone)
    client.retry_limit_s = 0.1
    with pytest.raises(BatchApiError, match="does not answer"):
        client.retrieve("batch_1")
    assert asked


def test_a_download_that_breaks_off_is_begun_again_and_leaves_no_half(tmp_path: Path) -> None:
    def broken(_request: httpx.Request) -> httpx.Response:
        def content() -> Any:
            yield b"half"
            raise httpx.ReadError("connection lost")

        return httpx.Response(200, content=content())

    told: list[tuple[int, int | None]] = []
    client, _ = client_of(broken, lambda _: httpx.Response(200, content=b"whole"))
    client.download("file-1", tmp_path / "out", lambda *sizes: told.append(sizes))
    assert (tmp_path / "out").read_bytes() == b"whole"
    assert told[-1] == (5, 5)
    client, _ = client_of(broken)
    client.retry_limit_s = 0.1
    with pytest.raises(BatchApiError):
        client.download("file-1", tmp_path / "other", lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_pages_are_followed() -> None:
    first = {"data": [{"id": f"batch_{number}"} for number in range(100)], "has_more": True}
    client, asked = client_of(says(200, first), says(200, {"data": [{"id": "batch_100"}], "has_more": False}))
    assert len(list(client.batches(150))) == 101
    assert asked[1].url.params["after"] == "batch_99"
    assert asked[1].url.params["limit"] == "50"
