"""Reclaim notices by provider, and the watch for them."""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final

from pool_worker.certificates import authorities
from pool_worker.notices.aws import AwsNotices
from pool_worker.notices.azure import AzureNotices
from pool_worker.notices.base import Notice, NoticeError, NoticeSource
from pool_worker.notices.gcp import GcpNotices
from pool_worker.notices.salad import SaladNotices
from pool_worker.settings import NoticeKind
from protocol.http_client import httpx
from protocol.process import backoff_s

SOURCES: Final[dict[NoticeKind, type[NoticeSource]]] = {
    "aws": AwsNotices,
    "gcp": GcpNotices,
    "azure": AzureNotices,
    "salad": SaladNotices,
}
REALLOCATORS: Final[dict[NoticeKind, type[SaladNotices]]] = {"salad": SaladNotices}
# Where SIGTERM itself is the notice: how long before the machine ends it arrives.
SIGNAL_NOTICE_S: Final[dict[NoticeKind, float]] = {"runpod": 5.0}

NOTICE_MARGIN_S: Final = 1.0  # share of the notice's time that may be used: the notice may be old when it is seen
ANSWER_LIMIT_S: Final = 2.0

log = logging.getLogger(__name__)


def signal_limit_s(kind: NoticeKind) -> float:
    """Return how long a drain after a signal may last; infinite if the provider sets no limit."""
    return SIGNAL_NOTICE_S.get(kind, math.inf) - NOTICE_MARGIN_S


async def watch(
    kind: NoticeKind, url: str | None, running_jobs: Callable[[], int], on_notice: Callable[[float], None]
) -> None:
    """Poll the provider until it gives a notice, then call ``on_notice`` with the seconds left to use, and return.

    ``url`` replaces the address of the provider's metadata server. Returns at once if the provider has none.
    """
    source_class = SOURCES.get(kind)
    if source_class is None:
        return
    # Metadata servers are link-local: never use a proxy.
    async with httpx.AsyncClient(
        base_url=url or source_class.default_url, timeout=ANSWER_LIMIT_S, verify=authorities(), trust_env=False
    ) as client:
        notice = await _wait_for_notice(source_class(client, running_jobs))
    log.warning("%s in %.0f s", notice.reason, notice.seconds_left)
    on_notice(notice.seconds_left - NOTICE_MARGIN_S)


async def reallocate(kind: NoticeKind, url: str | None, reason: str) -> None:
    """Ask the provider for another machine; failures are only logged."""
    source_class = REALLOCATORS.get(kind)
    if source_class is None:
        return
    async with httpx.AsyncClient(
        base_url=url or source_class.default_url, timeout=ANSWER_LIMIT_S, verify=authorities(), trust_env=False
    ) as client:
        try:
            await source_class(client, lambda: 0).reallocate(reason)
        except (NoticeError, httpx.HTTPError) as error:
            log.warning("cannot get another machine: %s", str(error) or type(error).__name__)
        else:
            log.warning("asked for another machine")


async def _wait_for_notice(source: NoticeSource) -> Notice:
    """Poll until there is a notice, through all failures; log each series of failures once."""
    waits = None
    while True:
        try:
            notice = await source.poll()
        except (NoticeError, httpx.HTTPError) as error:
            if waits is None:
                log.warning("cannot read reclaim notices; retrying: %s", str(error) or type(error).__name__)
                waits = backoff_s()
            await asyncio.sleep(next(waits))
            continue
        if notice is not None:
            return notice
        if waits is not None:
            log.warning("reclaim notices are readable again")
            waits = None
        await asyncio.sleep(source.period_s)
