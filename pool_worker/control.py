"""Handles control messages: a gateway's cancel and resend requests, and the fleet's drain request."""

import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from pool_worker.executor import Executor
from protocol import subjects
from protocol.errors import ProtocolError
from protocol.job import Cancel, Drain, Resend, decode_control
from protocol.nats.bus import Bus

log = logging.getLogger(__name__)


class ControlListener:
    """Listens on the worker's own control subject."""

    def __init__(self, bus: Bus, worker_id: str, executor: Executor) -> None:
        self._bus = bus
        self._subject = subjects.control_subject(worker_id)
        self._executor = executor
        self._on_drain: Callable[[], None] = _ignore

    async def start(self, on_drain: Callable[[], None]) -> None:
        """Listen until the connection is closed. ``on_drain`` is called when the fleet asks the worker to drain."""
        self._on_drain = on_drain
        await self._bus.subscribe(self._subject, self._on_message)

    async def _on_message(self, message: Msg) -> None:
        try:
            control = decode_control(message.data)
        except ProtocolError as error:
            log.warning("control message ignored: %s", error)
            return
        if isinstance(control, Cancel):
            self._executor.cancel(control.request_id, control.attempt)
        elif isinstance(control, Resend):
            self._executor.resend(control)
        elif isinstance(control, Drain):
            self._on_drain()


def _ignore() -> None:
    """Do nothing. Placeholder until the worker listens."""
