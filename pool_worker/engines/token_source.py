"""Sources of a ServerEngine's tokens: a server behind a URL (here), or vLLM in this process (``vllm_inprocess``)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.facts_reader import FactsReader, with_model
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.base import Abilities, Delta, ServerFacts, ServerRequest, WireFormat
from pool_worker.engines.formats.memory import MEMORY_PAGES
from pool_worker.engines.framing import MalformedEvent
from pool_worker.engines.server_client import OPENAI_PATHS
from pool_worker.engines.server_connection import ServerConnection, Taken
from pool_worker.engines.server_facts import FactsWatch
from pool_worker.settings import ServerEngineSettings


class TokenSource(Protocol):
    """The way to one server. The life cycle is ``start`` → (``stream`` | ``watch``)* → ``close``."""

    address: str  # the server's address, for logs and errors
    abilities: type[Abilities]
    adds_bos: bool | None  # see ServerEngineSettings for these two, which apply to servers that take text
    continues: bool | None

    async def start(self) -> ServerFacts:
        """Wait until the server is ready; return its facts. Raises EngineDiedError."""
        ...

    def watch_facts(self, before: ServerFacts) -> FactsWatch | None:
        """Guard streams against a changed server; return None if the server cannot change."""
        ...

    async def watch(self) -> None:
        """Watch the server's health until it is lost, and report that."""
        ...

    async def stream(self, ask: ServerRequest, take: Callable[[Delta], bool]) -> None:
        """Pass the continuation of one choice to ``take`` until that returns True.

        Raises RequestRejected and AttemptFailed; MalformedEvent from ``take`` becomes AttemptFailed. Cancellation also
        ends the server's work.
        """
        ...

    async def close(self) -> None:
        """Disconnect from the server. No stream is running."""
        ...


class HttpSource:
    """A server behind a URL, with its wire format: see TokenSource."""

    def __init__(self, settings: ServerEngineSettings, lose: Callable[[str], None]) -> None:
        """Open no connection yet. ``lose`` is called once with the reason when the server is lost."""
        self._format = FORMATS[settings.kind]
        self.abilities: type[Abilities] = self._format
        self.adds_bos = settings.adds_bos
        self.continues = settings.continues
        self._settings = settings
        own_path = with_model(self._format.generate_path, settings.model or "")
        self._connection = ServerConnection(settings, lose, api_paths=(own_path, *OPENAI_PATHS), is_ours=True)
        self._reader = FactsReader(self._connection, settings.kind)
        self.address = self._connection.address

    async def start(self) -> ServerFacts:
        """Wait until the server is ready; return what it reports."""
        settings = self._settings
        if settings.model is None and "{model}" in self._format.facts_path:
            raise EngineDiedError(f"engine.model: required for {settings.kind}")
        path = with_model(self._format.facts_path, settings.model or "")
        answer = await self._connection.wait_until_ready(self._format.health_path, path)
        try:
            facts = self._format.facts(answer, settings.model)
        except MalformedEvent as error:
            raise EngineDiedError(f"{self.address} is not a {settings.kind} server: {error}") from error
        memory = MEMORY_PAGES.get(settings.kind)
        if memory is not None:
            facts = replace(facts, memory_tokens=memory.read(await self._connection.page(memory.path)))
        return self._as_configured(await self._reader.completed(facts))

    def _as_configured(self, facts: ServerFacts) -> ServerFacts:
        honours = self._settings.honours
        return facts if honours is None else replace(facts, honoured=frozenset(honours))

    def watch_facts(self, before: ServerFacts) -> FactsWatch:
        """Check the facts before streams and periodically."""

        async def read() -> ServerFacts:
            return self._as_configured(await self._reader.read(before.model))

        watch = FactsWatch(read, before, self._settings.facts_period_s)
        self._connection.facts_watch = watch
        return watch

    async def watch(self) -> None:
        """Check the server's health until it is lost."""
        await self._connection.watch(self._format.health_path)

    async def stream(self, ask: ServerRequest, take: Callable[[Delta], bool]) -> None:
        """Pass each event of one choice to ``take``."""
        path = with_model(self._format.generate_path, ask.facts.model)
        answer = _Answer(self._format, take)
        await self._connection.stream(path, self._format.body(ask), self._format.framing, answer)

    async def close(self) -> None:
        """Disconnect from the server."""
        await self._connection.close()


class _Answer:
    """One choice's answer: see ``server_connection.Answer``."""

    def __init__(self, wire_format: type[WireFormat], take: Callable[[Delta], bool]) -> None:
        self.has_begun = False
        self._format = wire_format
        self._take = take
        self._seen_tokens = 0

    def take(self, event: Mapping[str, Any]) -> Taken:
        """Read an event."""
        delta = self._format.read(event, self._seen_tokens)
        self._seen_tokens += len(delta.token_ids)
        self.has_begun = self.has_begun or bool(delta.token_ids or delta.text)
        if self._take(delta):
            return Taken.ALL
        return Taken.SOME if delta.token_ids or delta.text or delta.ended_by else Taken.NOTHING

    def done(self) -> bool:
        """End the answer as an end token would: the server gave no reason."""
        return self.has_begun and self._take(Delta(ended_by="eos"))
