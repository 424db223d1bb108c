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


class RecordedRefusals:
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
async def refusals(monkeypatch: pytest.MonkeyPatch) -> RecordedRefusals:
    return RecordedRefusals(monkeypatch)


async def test_a_refusal_names_key_team_and_model(refusals: RecordedRefusals, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusals.refuse(InsufficientQuota("Used up."), principal=KEY, model="short", method="POST", client="10.0.0.1")
    [record] = refusals.named
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
    assert refusals.counts() == {(0, "insufficient_quota", "key_a", "demo"): 1}
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
async def test_refusals_do_not_include_request_content(
    refusals: RecordedRefusals, error: Refused | None, message: str | None
) -> None:
    refusals.refuse(error)
    assert [record.message for record in refusals.named] == [message]


async def test_texts_can_be_stored_by_every_database(refusals: RecordedRefusals) -> None:
    refusals.refuse(InvalidApiKey(), path="/v1/\0/\ud800" + "x" * 9999, model="\0\udfff", method="G\0T")
    [record] = refusals.named
    assert record.path.startswith("/v1/\ufffd/?xxx")
    assert len(record.path) == refusal_records.MAX_TEXT_CHARS
    assert (record.model, record.method) == ("\ufffd?", "G\ufffdT")


async def test_every_refusal_counts_in_its_minute(refusals: RecordedRefusals) -> None:
    for minute in range(3):
        for _ in range(10 * minute + 1):
            refusals.refuse(InsufficientQuota(), principal=KEY)
            refusals.log.flush()  # repeated flushes change nothing
        refusals.now_unix_ms += MINUTE_MS
    assert refusals.counts() == {(n * MINUTE_MS, "insufficient_quota", "key_a", ""): 10 * n + 1 for n in range(3)}
    refusals.now_unix_ms = NOON  # clock set back: nothing is counted twice or lost
    refusals.refuse(InsufficientQuota(), principal=KEY)
    assert refusals.counts()[2 * MINUTE_MS, "insufficient_quota", "key_a", ""] == 22
    assert len(set(refusals.ids)) == len(refusals.ids)


async def test_counts_are_published_periodically(refusals: RecordedRefusals) -> None:
    refusals.refuse(InvalidApiKey(), request_id="")
    async with asyncio.timeout(30):
        while not refusals.records:
            await asyncio.sleep(0.01)
    assert [record.refusals for record in refusals.records] == [1]


async def test_a_flood_is_fully_counted_and_partly_recorded(refusals: RecordedRefusals) -> None:
    for _ in range(1000):
        refusals.refuse(InsufficientQuota(), principal=KEY)
    refusals.refuse(InvalidApiKey())
    assert [record.code for record in refusals.named] == ["insufficient_quota"] * NAMED_A_SECOND_EACH + [
        "invalid_api_key"
    ]
    for number in range(1000):
        refusals.refuse(InvalidApiKey(), principal=replace(KEY, key_id=f"key_{number}"))
    assert len(refusals.named) == NAMED_A_SECOND
    refusals.now_unix_ms += 1000
    refusals.refuse(InvalidApiKey())
    assert len(refusals.named) == NAMED_A_SECOND + 1
    assert sum(refusals.counts().values()) == 2002


async def test_groups_of_a_minute_are_bounded(refusals: RecordedRefusals) -> None:
    for number in range(MAX_GROUPS + 500):
        refusals.refuse(InvalidApiKey(), principal=replace(KEY, key_id=f"key_{number}"))
    counts = refusals.counts()
    assert len(counts) == MAX_GROUPS + 1
    assert counts[0, "invalid_api_key", "", ""] == 500
