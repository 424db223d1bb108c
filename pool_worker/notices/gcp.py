"""Compute Engine spot VMs: half a minute from the notice to the end."""

from collections.abc import Callable
from typing import ClassVar, Final

from pool_worker.notices.base import Notice, NoticeError, checked
from protocol.http_client import httpx

NOTICE_S: Final = 30.0
HOLD_S: Final = 20  # how long the server may hold a request until the value changes
ANSWER_LIMIT_S: Final = 5.0  # added to HOLD_S


class GcpNotices:
    """Asks whether the VM has been preempted; from the second request on, the answer comes when that changes."""

    default_url: ClassVar[str] = "http://169.254.169.254"
    period_s: ClassVar[float] = 0.5  # for a server that does not hold requests

    def __init__(self, client: httpx.AsyncClient, _running_jobs: Callable[[], int]) -> None:
        self._client = client
        self._last_etag = "0"  # no value has it, so the first answer comes at once

    async def poll(self) -> Notice | None:
        """Implement ``base.NoticeSource``."""
        answer = checked(
            await self._client.get(
                "/computeMetadata/v1/instance/preempted",
                params={"wait_for_change": "true", "timeout_sec": HOLD_S, "last_etag": self._last_etag},
                headers={"Metadata-Flavor": "Google"},
                timeout=HOLD_S + ANSWER_LIMIT_S,
            )
        )
        value = answer.text.strip()
        if value not in {"TRUE", "FALSE"}:
            raise NoticeError(f"{answer.request.url} answered {value[:100]!r} instead of TRUE or FALSE")
        self._last_etag = answer.headers.get("ETag", "0")
        return Notice(NOTICE_S, "Compute Engine preempts this VM") if value == "TRUE" else None
