"""The interface for notices: how a provider announces that it will take a machine away.

One file per provider in this folder, one registry in ``__init__``. The worker polls a provider's metadata server and
keeps working if that fails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from protocol.http_client import httpx


class NoticeError(Exception):
    """The metadata server's answer cannot be used."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine will be taken away."""

    seconds_left: float
    reason: str


class NoticeSource(Protocol):
    """Polls one provider through a client for its metadata server; ``running_jobs`` returns this worker's load."""

    default_url: ClassVar[str]
    period_s: ClassVar[float]  # between two polls

    def __init__(self, client: httpx.AsyncClient, running_jobs: Callable[[], int]) -> None: ...

    async def poll(self) -> Notice | None:
        """Poll once; None if the machine stays. Raises NoticeError or httpx.HTTPError."""
        ...


def checked(answer: httpx.Response) -> httpx.Response:
    """Return the answer if it is a 200. Raises NoticeError."""
    if answer.status_code != httpx.codes.OK:
        raise NoticeError(f"{answer.request.url} answered {answer.status_code}")
    return answer
