"""Handles the requests of gateways to this worker: stop an attempt, send frames again."""

import logging

from nats.aio.msg import Msg

from pool_worker.executor import Executor
from protocol import subjects
from protocol.bus import Bus
from protocol.errors import ProtocolError
from protocol.messages import Cancel, Resend, decode_control

log = logging.getLogger(__name__)


class ControlListener:
    """The worker's own control subject."""

    def __init__(self, bus: Bus, worker_id: str, executor: Executor) -> None:
        self._bus = bus
        self._subject = subjects.control_subject(worker_id)
        self._executor = executor

    async def start(self) -> None:
        """Listen until the connection is closed."""
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
