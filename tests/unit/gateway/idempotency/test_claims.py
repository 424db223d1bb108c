"""Claims while the queue server is unavailable."""

import logging
from typing import Any, cast

import pytest

from gateway.idempotency.claims import Claims, HeldClaim
from protocol.nats.bus import Bus


class SilentBus:
    """Is connected but does not answer in time."""

    connected = True

    async def compare_and_set(self, *_: Any, **__: Any) -> int:
        raise TimeoutError


async def test_a_queue_server_that_is_too_slow_is_named_as_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        claim = await Claims(cast("Bus", SilentBus()), "g1").take("key", "body", over=None)
    assert claim == HeldClaim("g1", None, is_new=True)
    [record] = caplog.records
    assert record.getMessage().endswith("keys apply to this gateway only: too slow")
