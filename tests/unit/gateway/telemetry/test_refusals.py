import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from db.accounts.principal import Principal
from gateway.errors import InsufficientQuota, InvalidApiKey, InvalidParameter, ModelNotFound, Refused
from gateway.telemetry import refusal_records
from gateway.telemetry.metrics import RequestSeries
from gateway.telemetry.refusal_records import (
    MAX_GROUPS,
    NAMED_A_SECOND,
    NAMED_A_SECOND_EACH,
    RefusalRecords,
    RefusedRequest,
)
from gateway.telemetry.refusals import RefusalLog
from protocol.refusals import MINUTE_MS, RefusalCount, RefusalRecord
from protocol.usage import decode_usage, encode_usage

KEY = Principal("key_a", "key of a", "team_a", "team of a", "org")
NOON = 1_800_000_000_000 // MINUTE_MS * MINUTE_MS


class Told:
    """A refusal log and its records for the ledger, with a settable clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_unix_ms = NOON
        self.records: list[Any] = []
        self.ids: list[str] = []
        monkeypatch.setattr(refusal_records, "unix_now_ms", lambda: self.now_unix_ms)
        self.log = RefusalLog(RequestSeries(), RefusalRecords(self._put, "gw-1", {"short": "demo", "demo": "demo"}.get))

    def _put(self, record_id: str, encoded: bytes) -> None:
        self.ids.append(record_id)
        self.records += decode_usage(encode_usage([encoded]))

    def refuse(self, error: Refused | None, **request: Any) -> None:
        self.log.refused(
            "chat.completions", error, RefusedRequest(**{"path": "/v1/x", "request_id": "req_1"} | request)
        )

    @property
    def named(self) -> list[RefusalRecord]:
        return [record for record in self.records if isinstance(record, RefusalRecord)]

    def counts(self) -> dict[tuple[int, str, str, str], int]:
        """Return the latest count of each group, as the ledger keeps it."""
        self.log.flush()
        found: dict[tuple[int, str, str, str], int] = {}
        for record in self.records:
            if isinstance(record, RefusalCount):
                key = (record.minute_unix_ms - NOON, record.code, record.key_id, record.model)
                found[key] = max(record.refusals, found.get(key, 0))
        return found


@pytest.fixture
async def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


async def test_a_refusal_names_key_team_and_model(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told.refuse(InsufficientQuota("Used up."), principal=KEY, model="short", method="POST", client="10.0.0.1")
    [record] = told.named
    assert (record.key_id, record.key_name, record.team_id, record.organisation_id) == (
        "key_a",
        "key of a",
        "team_a",
        "org",
    )
    assert (record.code, record.status, record.message, record.model) == (
        "insufficient_quota",
        429,
        "Used up.",
        "demo",
    )
    assert told.counts() == {(0, "insufficient_quota", "key_a", "demo"): 1}
    [line] = [vars(line)["fields"] for line in caplog.records if line.message == "request refused"]
    assert (line["key_name"], line["team_id"], line["model"]) == ("key of a", "team_a", "short")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidParameter("'my secret question' is no number.", param="n"), None),
        (ModelNotFound("No sk-sw-abcdefghijklmnopqrstuvwx."), "No sk-sw-***."),
        (InvalidApiKey(), "Incorrect API key provided."),
        (None, None),
    ],
)
async def test_what_was_asked_is_not_told(told: Told, error: Refused | None, message: str | None) -> None:
    told.refuse(error)
    assert [record.message for record in told.named] == [message]


async def test_texts_are_such_as_a_database_takes(told: Told) -> None:
    told.refuse(InvalidApiKey(), path="/v1/\0/\ud800" + "x" * 9999, model="\0\udfff", method="G\0T")
    [record] = told.named
    assert record.path.startswith("/v1/\ufffd/?xxx")
    assert len(record.path) == refusal_records.MAX_TEXT_CHARS
    assert (record.model, record.method) == ("\ufffd?", "G\ufffdT")


async def test_every_refusal_counts_in_its_minute(told: Told) -> None:
    for minute in range(3):
        for _ in range(10 * minute + 1):
            told.refuse(InsufficientQuota(), principal=KEY)
            told.log.flush()  # repeated flushes change nothing
        told.now_unix_ms += MINUTE_MS
    assert told.counts() == {(n * MINUTE_MS, "insufficient_quota", "key_a", ""): 10 * n + 1 for n in range(3)}
    told.now_unix_ms = NOON  # clock set back: nothing is counted twice or lost
    told.refuse(InsufficientQuota(), principal=KEY)
    assert told.counts()[2 * MINUTE_MS, "insufficient_quota", "key_a", ""] == 22
    assert len(set(told.ids)) == len(told.ids)


async def test_counts_leave_by_themselves(told: Told) -> None:
    told.refuse(InvalidApiKey(), request_id="")
    async with asyncio.timeout(30):
        while not told.records:
            await asyncio.sleep(0.01)
    assert [record.refusals for record in told.records] == [1]


async def test_a_flood_is_counted_whole_and_named_in_part(told: Told) -> None:
    for _ in range(1000):
        told.refuse(InsufficientQuota(), principal=KEY)
    told.refuse(InvalidApiKey())
    assert [record.code for record in told.named] == ["insufficient_quota"] * NAMED_A_SECOND_EACH + ["invalid_api_key"]
    for number in range(1000):
        told.refuse(InvalidApiKey(), principal=replace(KEY, key_id=f"key_{number}"))
    assert len(told.named) == NAMED_A_SECOND
    told.now_unix_ms += 1000
    told.refuse(InvalidApiKey())
    assert len(told.named) == NAMED_A_SECOND + 1
    assert sum(told.counts().values()) == 2002


async def test_groups_of_a_minute_are_bounded(told: Told) -> None:
    for number in range(MAX_GROUPS + 500):
        told.refuse(InvalidApiKey(), principal=replace(KEY, key_id=f"key_{number}"))
    counts = told.counts()
    assert len(counts) == MAX_GROUPS + 1
    assert counts[0, "invalid_api_key", "", ""] == 500
