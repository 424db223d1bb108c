"""Azure spot VMs: scheduled events, at least half a minute ahead."""

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import ClassVar, Final

import msgspec

from pool_worker.notices.base import Notice, NoticeError, checked
from protocol.http_client import httpx
from protocol.wire import UNDECODABLE

HEADERS: Final = {"Metadata": "true"}
ENDING_EVENTS: Final = {"Preempt", "Terminate"}  # by Azure; by the owner of the scale set


class _Event(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str]
    not_before: str = ""  # an HTTP date; empty once the event has started


class _ScheduledEvents(msgspec.Struct, rename="pascal"):
    events: list[_Event]


_decode_events: Final = msgspec.json.Decoder(_ScheduledEvents).decode


class AzureNotices:
    """Polls the events of the VM's whole group and picks those that name this VM."""

    default_url: ClassVar[str] = "http://169.254.169.254"
    period_s: ClassVar[float] = 1.0

    def __init__(self, client: httpx.AsyncClient, _running_jobs: Callable[[], int]) -> None:
        self._client = client
        self._name: str | None = None

    async def poll(self) -> Notice | None:
        """Implement ``base.NoticeSource``."""
        if self._name is None:
            self._name = await self._fetch_name()
        answer = await self._client.get(
            "/metadata/scheduledevents", params={"api-version": "2020-07-01"}, headers=HEADERS
        )
        try:
            events = _decode_events(checked(answer).content).events
            mine = [e for e in events if e.event_type in ENDING_EVENTS and self._name in e.resources]
            return min(map(_notice, mine), key=lambda notice: notice.seconds_left, default=None)
        except (*UNDECODABLE, ValueError) as error:
            raise NoticeError(f"not scheduled events: {error}") from error

    async def _fetch_name(self) -> str:
        params = {"api-version": "2021-02-01", "format": "text"}
        return checked(await self._client.get("/metadata/instance/compute/name", params=params, headers=HEADERS)).text


def _notice(event: _Event) -> Notice:
    """Return the notice of an event. Raises ValueError if its time is not a date."""
    seconds_left = 0.0
    if event.not_before:
        seconds_left = max(0.0, parsedate_to_datetime(event.not_before).timestamp() - time.time())
    return Notice(seconds_left, f"Azure scheduled the event {event.event_type} for this VM")
