"""uvicorn's HTTP connection, with the one thing ASGI cannot say: break it off at once."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api.exchange import ABORT_KEY


class Connection(HttpToolsProtocol):
    """Puts ``abort`` into each request's scope: a client that does not read would keep a mere ``close`` waiting."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope[ABORT_KEY] = self.transport.abort  # type: ignore[typeddict-unknown-key]
