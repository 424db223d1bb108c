"""One attempt to deliver, against servers that behave well and badly."""

import asyncio
import datetime as dt
from email.utils import format_datetime
from functools import partial
from pathlib import Path

import pytest

from ledger.webhooks.addresses import LookUp, look_up
from ledger.webhooks.deliveries import Attempt
from ledger.webhooks.secrets import new_secret
from ledger.webhooks.sender import MAX_ANSWER_BYTES, MAX_RETRY_AFTER_S, Sender
from ledger.webhooks.settings import WebhookSettings
from tests.certificates import certified
from tests.integration.ledger.webhooks.conftest import Received, StartReceiver, settings, status

NAME = "hooks.example.com"
BODY = b'{"type": "response.completed"}'


async def send(url: str, chosen: WebhookSettings | None = None, names: LookUp = look_up) -> Attempt:
    sender = Sender(chosen or settings(), names)
    try:
        return await sender.send(url, [new_secret()], "evt_1", BODY)
    finally:
        sender.close()


async def test_what_arrives(start_receiver: StartReceiver) -> None:
    receiver = await start_receiver()
    assert await send(receiver.url) == Attempt(200)
    (request,) = receiver.received
    assert (request.path, request.body) == ("/hook?a=b", BODY)
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["content-type"] == "application/json"


async def test_the_resolved_address_is_asked_by_the_name(
    start_receiver: StartReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked up once; Host, SNI and the certificate's check go by it, the connection by the address."""
    asked: list[str] = []

    def names(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]  # a later answer would be another one

    receiver = await start_receiver(certified(tmp_path, NAME))
    url = f"https://{NAME}:{receiver.port}/hook"
    refused = await send(url, names=lambda _host, _port: ["127.0.0.1"])
    assert "CERTIFICATE_VERIFY_FAILED" in (refused.error or "")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert await send(url, names=names) == Attempt(200)
    assert asked == [NAME]
    assert receiver.server_names[-1] == NAME
    assert receiver.received[0].headers["host"] == f"{NAME}:{receiver.port}"
    other = await send(f"https://other.example.com:{receiver.port}/", names=lambda _host, _port: ["127.0.0.1"])
    assert "not valid for 'other.example.com'" in (other.error or "")


async def test_the_next_address_is_tried_where_one_takes_no_connection(start_receiver: StartReceiver) -> None:
    receiver = await start_receiver()
    found = await send(f"http://{NAME}:{receiver.port}/", names=lambda _host, _port: ["127.0.0.9", "::1", "127.0.0.1"])
    assert found == Attempt(200)
    assert receiver.connections == 1


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["::1"], ["1.1.1.1", "127.0.0.1"]])
async def test_nothing_connects_to_what_is_not_public(start_receiver: StartReceiver, addresses: list[str]) -> None:
    receiver = await start_receiver()
    closed = settings(allowed_networks=[])
    found = await send(f"http://{NAME}:{receiver.port}/", closed, lambda _host, _port: addresses)
    assert "which is not public" in (found.error or "")
    assert "which is not public" in ((await send(f"http://localhost:{receiver.port}/", closed)).error or "")
    assert "which is not public" in ((await send(receiver.url, closed)).error or "")
    assert receiver.connections == 0


def always(answer: bytes, _request: object) -> bytes:
    return answer


async def test_redirects_are_not_followed(start_receiver: StartReceiver) -> None:
    receiver, target = await start_receiver(), await start_receiver()
    for code in (301, 302, 303, 307, 308):
        answer = status(code, f"location: {target.url}\r\n")
        receiver.answer = partial(always, answer)
        found = await send(receiver.url)
        assert found == Attempt(code, f"answered {code}: redirects are not followed")
    assert target.connections == 0


async def test_what_receivers_ask_for(start_receiver: StartReceiver) -> None:
    receiver = await start_receiver()
    receiver.answer = lambda _request: status(429, "retry-after: 120\r\n")
    assert await send(receiver.url) == Attempt(429, "answered 429", 120.0)
    in_an_hour = format_datetime(dt.datetime.now(dt.UTC) + dt.timedelta(hours=1), usegmt=True)
    receiver.answer = lambda _request: status(503, f"retry-after: {in_an_hour}\r\n")
    assert 3500 < (await send(receiver.url)).retry_after_s <= 3600
    for value, wanted in (("soon", 0.0), ("-5", 0.0), ("999999999", MAX_RETRY_AFTER_S), ("Mon, 99 Foo 1", 0.0)):
        receiver.answer = partial(always, status(500, f"retry-after: {value}\r\n"))
        assert (await send(receiver.url)).retry_after_s == wanted
    receiver.answer = lambda _request: status(410)
    assert (await send(receiver.url)).is_gone


async def test_a_receiver_costs_no_more_than_its_limits(start_receiver: StartReceiver) -> None:
    receiver = await start_receiver()
    forever = asyncio.Event()

    async def never(_request: Received) -> bytes:
        await forever.wait()
        return b""

    receiver.answer = never
    assert (await send(receiver.url, settings(total_s=0.2))).error == "no answer within 0.2 s"
    forever.set()

    # What is too long is cut off, however its length is told, and nothing is unpacked.
    huge = b"x" * (64 * MAX_ANSWER_BYTES)
    receiver.answer = lambda _request: status(200, "content-encoding: gzip\r\n", huge)
    assert await send(receiver.url) == Attempt(200)

    receiver.answer = lambda _request: b"no HTTP at all\r\n\r\n"
    assert "RemoteProtocolError" in ((await send(receiver.url)).error or "")
    receiver.answer = lambda _request: b"HTTP/1.1 200 x\r\n" + b"a: b\r\n" * 100_000
    assert "RemoteProtocolError" in ((await send(receiver.url)).error or "")
    assert "ConnectError" in ((await send("http://127.0.0.1:1/")).error or "")
