"""The plug point for notices: how a provider says that it is about to take a machine away.

One file per provider in this folder, one registry in ``__init__``. A provider's metadata server is asked again and
again; whatever goes wrong with it, the worker continues working.
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
    """Asks one provider, through a client for its metadata server; ``running_jobs`` returns how busy this worker is."""

    default_url: ClassVar[str]
    period_s: ClassVar[float]  # between two polls

    def __init__(self, client: httpx.AsyncClient, running_jobs: Callable[[], int]) -> None: ...

    async def poll(self) -> Notice | None:
        """Ask once; None if the machine stays. Raises NoticeError or httpx.HTTPError."""
        ...


def checked(answer: httpx.Response) -> httpx.Response:
    """Return the answer if it is a 200. Raises NoticeError."""
    if answer.status_code != httpx.codes.OK:
        raise NoticeError(f"{answer.request.url} answers {answer.status_code}")
    return answer
