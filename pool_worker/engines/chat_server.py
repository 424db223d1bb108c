"""A server or a hosted API that takes messages, as an engine: a conversation in, parts of an answer out.

    submit ──> one stream per choice (POST) ──deltas──> parts, estimated counts ──> steps

Such servers return no token ids: counts are estimated during the answer and replaced by the provider's at its end. Stop
strings are searched here, in the content only, and not sent to the server: servers also search reasoning and calls,
most do not report which string they found, and some support none. An answer that ends at a stop string keeps its
estimated counts. A partial answer of another worker is resumed with an assistant message, if the format supports that.
API differences are in ``chat_formats``; the connection, its limits and faults are in ``server_connection``.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from engine.step_stats import SequenceClock
from engine.text.stop_strings import StopStrings
from engine.types import FinishReason
from pool_worker.engines.base import Capacity
from pool_worker.engines.chat import ChatOutput, ChatPoint, ChatRequest
from pool_worker.engines.chat_formats import chat_format
from pool_worker.engines.chat_formats.base import (
    AnswerReader,
    ChatDelta,
    ChatServerRequest,
    refuse_unknown,
    without_unsupported,
)
from pool_worker.engines.facts_reader import FactsReader
from pool_worker.engines.formats.base import default_revision
from pool_worker.engines.reported_ends import EndReason
from pool_worker.engines.server_choice import SEED_STRIDE
from pool_worker.engines.server_connection import ServerConnection, Taken
from pool_worker.engines.server_facts import FactsUnread, FactsWatch, in_use
from pool_worker.engines.streaming_engine import StreamingEngine
from pool_worker.settings import AnyChatSettings
from protocol.generation import SamplingParams
from protocol.job import PROTOCOL_VERSION, TAKES_MESSAGES, Chat, ChatUsage, ModelCard, Part

CHARS_PER_TOKEN: Final = 4.0  # of English text, by OpenAI's rule of thumb
DEFAULT_SEQUENCES: Final = 64
ANY_NAME: Final = frozenset({"sglang", "tgi"})  # values of ChatFormat.server: one model under any requested name

log = logging.getLogger(__name__)


class ChatServerEngine(StreamingEngine[ChatRequest, "ChatChoice"]):
    """A server or hosted API that takes messages; see ``base.Engine`` for the life cycle."""

    takes: Literal["messages"] = TAKES_MESSAGES

    def __init__(self, settings: AnyChatSettings) -> None:
        super().__init__()
        self.name: str = settings.kind
        self._settings = settings
        self._format = chat_format(settings)
        self.facts_watch: FactsWatch | None = None
        self.continues, self.honoured = self._format.continues, self._format.honoured
        nothing = ChatServerRequest(settings.model, Chat(()), SamplingParams(), None, None)
        self._path = path = self._format.path(nothing)
        self._connection = ServerConnection(
            settings, self._lose, self._format.auth(), self._format.http_status, api_paths=(path,)
        )
        self.address = self._connection.address
        self._sequences = settings.max_sequences or DEFAULT_SEQUENCES
        self._slots = asyncio.Semaphore(self._sequences)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> Capacity:
        """Wait until a self-hosted server is ready; a hosted API needs no wait. Raises EngineDiedError."""
        health_path = self._format.health_path
        if health_path is not None:
            await self._connection.wait_until_ready(health_path)
        await self._connection.check_credentials(self._path)
        if health_path is not None:
            await self._watch_facts()
            self._watching = asyncio.create_task(self._connection.watch(health_path), name="server health")
        length = self._settings.max_model_len
        log.info("%s at %s serves %s", self.name, self.address, self._settings.model)
        return Capacity(self._sequences, self._sequences * length, length)

    async def _watch_facts(self) -> None:
        """Record what the server serves, if it reports that."""
        if self._format.server is None:
            return
        reader = FactsReader(self._connection, self._format.server)
        model = None if self._format.server in ANY_NAME else self._settings.model
        try:
            facts = await reader.read(model)
        except FactsUnread as error:
            log.info("changes of the server will not be detected: %s", error)
            return
        if model is not None and facts.model != model:
            log.warning("%s does not serve %s; it serves: %s", self.address, model, facts.model)
            return
        before = in_use(facts, self._settings.max_model_len, self._sequences)
        self.facts_watch = FactsWatch(lambda: reader.read(model), before, self._settings.facts_period_s)
        self._connection.facts_watch = self.facts_watch

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return a card without a tokenizer: gateways count prompts by their own configuration."""
        facts = None if self.facts_watch is None else self.facts_watch.before
        revision = self._settings.revision or default_revision(self.name, self._settings.model, facts)
        card = ModelCard(
            v=PROTOCOL_VERSION,
            model=model,
            context_length=self._settings.max_model_len,
            tokenizer_object="",
            chat_template=None,
            revision=revision,
        )
        return card, b""

    def _kv_usage(self, live: "Sequence[ChatChoice]") -> float:
        return len(live) / self._sequences

    async def _disconnect(self) -> None:
        await self._connection.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def fitted(self, request: ChatRequest) -> tuple[ChatRequest, tuple[str, ...]]:
        """Return a request without unsupported fields, if the settings say to drop them, and their names."""
        if self._settings.unsupported != "drop":
            return request, ()
        chat, params, dropped = without_unsupported(request.chat, request.sampling, self._format)
        return replace(request, chat=chat, sampling=params), dropped

    def _choices(self, request: ChatRequest) -> "list[ChatChoice]":
        refuse_unknown(request.chat, request.sampling, self._format)
        points = {point.index: point for point in request.resume}
        live = [index for index in range(request.sampling.n) if not (index in points and points[index].is_complete)]
        return [ChatChoice(request, points.get(index) or ChatPoint(index, "", 0)) for index in live]

    # --- one choice ---------------------------------------------------------------------------------------------------

    def _failed(self, choice: "ChatChoice", error: str) -> ChatOutput:
        # After the reported end, only the usage can be missing.
        return choice.finish() if choice.ended_by else choice.end("error", error)

    async def _generate(self, choice: "ChatChoice") -> None:
        ask = choice.ask(self._settings.model)
        path, body = self._format.path(ask), self._format.body(ask)
        answer = _Answer(choice, self._format.reader(ask), self._take)
        async with self._slot(choice):
            await self._connection.stream(path, body, self._format.framing, answer)
        self._put(choice.finish())

    def _take(self, choice: "ChatChoice", delta: ChatDelta) -> None:
        output = choice.take(delta)
        if output is None:
            return
        self._count(choice, output.tokens)
        output.timings = choice.clock.timings()
        self._put(output)


class _Answer:
    """One choice's answer: see ``server_connection.Answer``."""

    def __init__(
        self, choice: "ChatChoice", reader: AnswerReader, take: "Callable[[ChatChoice, ChatDelta], None]"
    ) -> None:
        self._choice = choice
        self._reader = reader
        self._take = take

    @property
    def has_begun(self) -> bool:
        """True if the caller has part of it."""
        return self._choice.has_begun

    def take(self, event: Mapping[str, Any]) -> Taken:
        """Read an event; the answer is complete with its end and usage, or at a stop string."""
        delta = self._reader.read(event)
        self._take(self._choice, delta)
        if self._choice.is_stopped:
            return Taken.ALL
        if self._choice.ended_by is not None and self._choice.usage is not None:
            return Taken.ALL
        has_content = delta.ended_by or any(part.text or part.call_id for part in delta.parts)
        return Taken.SOME if has_content else Taken.NOTHING

    def done(self) -> bool:
        """End the answer if one has begun."""
        if self._choice.ended_by is None:
            self._take(self._choice, self._reader.done())
            if not self.has_begun:
                self._choice.ended_by = None
                return False
        return True


class ChatChoice:
    """One choice of a request whose answer a server makes."""

    def __init__(self, request: ChatRequest, point: ChatPoint) -> None:
        """Make a choice that continues at ``point``."""
        self.request_id = request.request_id
        self.index = point.index
        self.prompt_tokens = request.prompt_tokens
        self.clock = SequenceClock(added_s=time.monotonic())
        self.ended_by: EndReason | None = None
        self.usage: ChatUsage | None = None
        self.has_ended = False  # and the server has reported its end
        self._request = request
        self._point = point
        self.is_stopped = False  # at a stop string
        self._stops = StopStrings(request.sampling.stop)
        self._chars = 0
        self._reported_tokens = 0

    @property
    def has_begun(self) -> bool:
        """True once a part has arrived."""
        return self._chars > 0

    def ask(self, model: str) -> ChatServerRequest:
        """Return the request to the server."""
        params, chat = self._request.sampling, self._request.chat
        seed = None if params.seed is None else params.seed + self._point.index * SEED_STRIDE
        limit = max(1, params.max_tokens - self._point.tokens) if chat.is_limited else None
        return ChatServerRequest(model, chat, params, limit, seed, self._point.text, self._request.cache_salt)

    def take(self, delta: ChatDelta) -> ChatOutput | None:
        """Read one event; return its output, or None if there is none yet."""
        self.ended_by = delta.ended_by or self.ended_by
        self.usage = delta.usage or self.usage
        self._chars += sum(len(part.text) for part in delta.parts)
        parts = list(self._unstopped(delta.parts))
        if self.is_stopped:
            self.ended_by = "stop"
        elif delta.ended_by is not None:
            parts += self._content(self._stops.end()[0])
        if not parts:
            return None
        tokens = math.ceil(self._chars / CHARS_PER_TOKEN) - self._reported_tokens
        self._reported_tokens += tokens
        return self._output(parts=tuple(parts), tokens=tokens)

    def _unstopped(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield parts up to a stop string, holding back text that may become one."""
        params = self._request.sampling
        for part in parts:
            if part.kind != "text":
                yield from self._content(self._stops.end()[0])  # a stop string does not span another part
                yield part
                continue
            may_stop = self._reported_tokens >= params.min_tokens
            text, stop = self._stops.push(part.text) if may_stop else (self._stops.skip(part.text), None)
            self.is_stopped = stop is not None
            yield from self._content(text + (stop or "") * params.include_stop_str_in_output)
            if self.is_stopped:
                return

    @staticmethod
    def _content(text: str) -> Sequence[Part]:
        return [Part("text", text)] if text else []

    def finish(self) -> ChatOutput:
        """End with the server's reason and counts; without its counts, with estimates."""
        self.has_ended = True
        usage = self.usage or ChatUsage("estimate", self.prompt_tokens, self._reported_tokens)
        output = self._output(usage=usage, is_filtered=self.ended_by == "content_filter")
        output.finish_reason = "length" if self.ended_by == "length" else "stop"
        output.cached_tokens, output.timings = usage.cached_tokens, self.clock.timings()
        return output

    def end(self, reason: FinishReason, error: str | None = None) -> ChatOutput:
        """End without a reported end."""
        self.has_ended = True
        output = self._output()
        output.finish_reason, output.error, output.timings = reason, error, self.clock.timings()
        return output

    def _output(
        self,
        parts: tuple[Part, ...] = (),
        tokens: int = 0,
        usage: ChatUsage | None = None,
        *,
        is_filtered: bool = False,
    ) -> ChatOutput:
        return ChatOutput(
            self.request_id,
            self._point.index,
            [],
            "",
            parts=parts,
            tokens=tokens,
            usage=usage,
            is_filtered=is_filtered,
        )
