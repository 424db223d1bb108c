"""Reports to the ledger which requests this gateway still has; the ledger makes rows of those it has lost."""

import logging
from collections.abc import Mapping

from nats.aio.msg import Msg

from gateway.dispatch.request import OpenRequest
from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.job import encode
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox
from protocol.usage import StillOpen, decode_open_requests_query

log = logging.getLogger(__name__)


class OpenRequests:
    """Answers ledger writers (ledger.abandoned)."""

    def __init__(self, bus: Bus, gateway_id: str, unsettled: Mapping[str, OpenRequest], outbox: Outbox) -> None:
        """``unsettled``: the requests without a record; ``outbox``: where their records go."""
        self._bus = bus
        self._subject = subjects.open_requests_subject(gateway_id)
        self._unsettled = unsettled
        self._outbox = outbox

    async def start(self) -> None:
        """Subscribe. Raises BusError."""
        await self._bus.subscribe(self._subject, self._on_question)

    async def _on_question(self, message: Msg) -> None:
        try:
            asked = decode_open_requests_query(message.data).request_ids
            await self._bus.publish(message.reply, encode(self._answer(asked)))
        except (ProtocolError, BusError) as error:  # it is asked again
            log.warning("the ledger's question was not answered: %s", error)

    def _answer(self, asked: tuple[str, ...]) -> StillOpen:
        still_open = {
            name: request.completion_tokens for name in asked if (request := self._unsettled.get(name)) is not None
        }
        if self._outbox.is_behind:  # any of the others may have its record there
            still_open = dict.fromkeys(asked, 0) | still_open
        return StillOpen(still_open)
