"""SaladCloud nodes: they give no notice, but a deletion cost steers which ones go when a group shrinks."""

from collections.abc import Callable
from typing import ClassVar

from pool_worker.notices.base import Notice, NoticeError
from protocol.http_client import httpx


class SaladNotices:
    """Keeps the instance's deletion cost at its number of running jobs: idle instances are deleted first."""

    default_url: ClassVar[str] = "http://169.254.169.254"
    period_s: ClassVar[float] = 2.0

    def __init__(self, client: httpx.AsyncClient, running_jobs: Callable[[], int]) -> None:
        self._client = client
        self._running_jobs = running_jobs
        self._cost: int | None = None  # as last set

    async def poll(self) -> Notice | None:
        """Implement ``base.NoticeSource``; never returns a notice."""
        cost = self._running_jobs()
        if cost != self._cost:
            answer = await self._client.put(
                "/v1/deletion-cost", json={"deletion_cost": cost}, headers={"Metadata": "true"}
            )
            if not answer.is_success:
                raise NoticeError(f"{answer.request.url} answered {answer.status_code}")
            self._cost = cost
        return None

    async def reallocate(self, reason: str) -> None:
        """Ask for another machine; this container ends soon. Raises NoticeError or httpx.HTTPError."""
        answer = await self._client.post("/v1/reallocate", json={"reason": reason}, headers={"Metadata": "true"})
        if not answer.is_success:
            raise NoticeError(f"{answer.request.url} answered {answer.status_code}")
