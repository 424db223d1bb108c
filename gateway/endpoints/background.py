"""The exchange of a response in the background, which has no client."""

import time
from typing import Final

from db.accounts.principal import Principal
from gateway.api.errors import form_of
from gateway.errors import Refused
from gateway.http.asgi import PRINCIPAL_KEY, Message
from gateway.http.exchange import Answered, Exchange
from gateway.responses.run import BackgroundRun
from gateway.settings import TimeoutSettings

PATH: Final = "/v1/responses"


class RunExchange(Exchange):
    """An exchange without a client: what is written was recorded as it was encoded."""

    def __init__(self, run: BackgroundRun, principal: Principal, timeouts: TimeoutSettings) -> None:
        self.run = run
        self._body: bytes | None = run.run.body
        scope: Message = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(run.run.body))],
            PRINCIPAL_KEY: principal,
        }
        super().__init__(scope, self._receive, self._discard, timeouts)
        self.id = run.key.response_id.removeprefix("resp_")

    def start_clock(self) -> None:
        """Override of ``Exchange``: durations count from when its client asked."""
        self.received_unix_ms = self.run.run.received_unix_ms
        self.received_s = time.monotonic() - max(0.0, time.time() - self.received_unix_ms / 1000)

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.run.gone.wait()
        return {"type": "http.disconnect"}

    async def _discard(self, message: Message) -> None:
        del message

    async def write(self, body: bytes, *, more: bool) -> None:
        """Override of ``Exchange``: wait until there is room for more events."""
        del body, more
        await self.run.room()

    async def answer_error(self, error: Refused, request: Answered | None = None) -> None:
        """Override of ``Exchange``: an error is an event."""
        status = self.sent_status = form_of(error).status
        if request is not None:
            request.http_status = status
        if self.run.call is not None:
            self.run.call.error_event(error)
