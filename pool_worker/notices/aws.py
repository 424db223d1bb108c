"""EC2 spot instances: a notice two minutes ahead, from the instance metadata service, version 2."""

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import ClassVar, Final

import msgspec

from pool_worker.notices.base import Notice, NoticeError, checked
from protocol.http_client import httpx
from protocol.wire import UNDECODABLE

TOKEN_TTL_S: Final = 21600  # the maximum that the service grants
LONGEST_NOTICE_S: Final = 120.0  # minimum, in case the local clock is wrong

log = logging.getLogger(__name__)


class _InstanceAction(msgspec.Struct):
    action: str  # terminate, stop or hibernate
    time: datetime


_decode_action: Final = msgspec.json.Decoder(_InstanceAction).decode


class AwsNotices:
    """Polls for the instance action. A rebalance recommendation, which often comes first, is only logged."""

    default_url: ClassVar[str] = "http://169.254.169.254"
    period_s: ClassVar[float] = 1.0

    def __init__(self, client: httpx.AsyncClient, _running_jobs: Callable[[], int]) -> None:
        self._client = client
        self._token: str | None = None
        self._has_logged_rebalance = False

    async def poll(self) -> Notice | None:
        """Implement ``base.NoticeSource``."""
        answer = await self._get("/latest/meta-data/spot/instance-action")
        if answer is None:
            await self._look_for_rebalance()
            return None
        try:
            action = _decode_action(answer.content)
            seconds_left = action.time.timestamp() - time.time()
        except (*UNDECODABLE, OverflowError) as error:
            raise NoticeError(f"not an instance action: {error}") from error
        return Notice(min(seconds_left, LONGEST_NOTICE_S), f"EC2 will {action.action} this spot instance")

    async def _look_for_rebalance(self) -> None:
        if self._has_logged_rebalance:
            return
        if await self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            self._has_logged_rebalance = True
            log.warning("EC2 recommends a rebalance: this spot instance may be reclaimed soon")

    async def _get(self, path: str) -> httpx.Response | None:
        """Fetch a path that may not exist (404: None), renewing an expired token."""
        had_token = self._token is not None
        answer = await self._client.get(path, headers={"X-aws-ec2-metadata-token": await self._fetch_token()})
        if answer.status_code == httpx.codes.UNAUTHORIZED and had_token:
            self._token = None
            return await self._get(path)
        return None if answer.status_code == httpx.codes.NOT_FOUND else checked(answer)

    async def _fetch_token(self) -> str:
        if self._token is None:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            token = checked(await self._client.put("/latest/api/token", headers=headers)).text
            if not (token.isascii() and token.isprintable()):
                raise NoticeError("the session token is not valid in a header")
            self._token = token
        return self._token
