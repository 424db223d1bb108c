"""The engine of a pool in this process, without gateway and queue: the upper bound for its workers.

The engine is called as a worker calls it (``submit``, ``steps``), so a server or a hosted API is measured with the
overhead of its adapter. All loads share a time budget; loads that are not completed within it are skipped.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import uvloop
from msgspec.structs import replace

from engine.types import GenerationRequest, Refusal, SequenceOutput
from pool_worker import engines
from pool_worker.engines.base import AnyEngine, Capacity, EngineDiedError
from pool_worker.engines.chat import ChatOutput, ChatRequest
from pool_worker.settings import EngineSettings
from pool_worker.watch.start import number_tokens
from protocol.distribution import version
from protocol.generation import SamplingParams
from protocol.job import TAKES_MESSAGES, Chat, Turn
from protocol.process import PORT_PLACE
from spillway.bench.endpoint import PROBE_WORDS, prompt_size, random_words
from spillway.bench.measure import Answer, BenchError, Load, LoadRefused, Piece, TimeBudgetExceeded

CANCEL_LIMIT_S: Final = 5.0  # for an engine to release canceled requests
TOKENS_PER_WORD: Final = 1.5  # of a number, where an API does not report counts


@dataclass(slots=True)
class _Progress:
    """The state of one request."""

    prompt_tokens: int
    pieces: list[Piece] = field(default_factory=list)
    completion_tokens: int | None = None  # reported by the provider; None: counted from the pieces


class PoolTarget:
    """A ``measure.Target`` for a pool's engine. A context manager that starts and stops the engine."""

    def __init__(self, pool: str, model: str, settings: EngineSettings, limit_s: float) -> None:
        """Create the engine. ``model``: one of the pool's models. ``limit_s``: for all loads, from its readiness on."""
        self._pool = pool
        self._model = model
        self._settings = settings
        self._limit_s = limit_s
        self._deadline_s = 0.0
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._engine: AnyEngine = engines.create(settings)
        self._reading: asyncio.Task[None] | None = None
        self._vocabulary: Sequence[int] = ()  # for prompts of token ids
        self._tokens_per_word, self._tokens_around = TOKENS_PER_WORD, 0.0  # for prompts of words
        self._params = SamplingParams(temperature=0.0, ignore_eos=True)
        self._started_s = 0.0
        self._number = 0
        self._seen: dict[str, _Progress] = {}
        self._live: set[str] = set()
        self._refusal: Refusal | None = None
        self._error: str | None = None
        self._death: EngineDiedError | None = None
        self._changed = asyncio.Event()
        self.capacity: Capacity

    def __enter__(self) -> Self:
        """Start the engine. Raises BenchError."""
        try:
            self._runner.run(self._start())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._deadline_s = time.monotonic() + self._limit_s
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engine, and the server's process if the pool started it."""
        self._runner.run(self._stop())
        self._runner.close()

    async def _start(self) -> None:
        try:
            self.capacity = await self._engine.start()
            card, _ = self._engine.model_card(self._model)
            if card.pooling is not None:
                raise BenchError(f"pools.{self._pool}: serves embeddings; this command measures text generation")
            self._reading = asyncio.create_task(self._read_steps(), name="steps")
            if self._engine.takes == TAKES_MESSAGES:
                await self._measure_words()
            else:
                self._vocabulary = await asyncio.to_thread(number_tokens, self._engine, self._model)
        except EngineDiedError as error:
            raise BenchError(str(error)) from error

    async def _stop(self) -> None:
        await self._engine.stop()
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _measure_words(self) -> None:
        """Measure the tokens per word from an API's counts of two small prompts."""
        counts = []
        for words in PROBE_WORDS:
            self._tokens_per_word = 1 / words
            [seen] = await self._ask(Load(1, 1, 1), seed=-words)
            counts.append(seen.prompt_tokens)
        self._tokens_per_word, self._tokens_around = prompt_size(*counts) or (TOKENS_PER_WORD, 0.0)

    def _request(self, source: random.Random, load: Load) -> GenerationRequest | ChatRequest:
        self._number += 1
        request_id, params = f"bench-{self._number}", replace(self._params, max_tokens=load.new_tokens)
        if not self.is_an_api:
            return GenerationRequest(request_id, source.choices(self._vocabulary, k=load.prompt_tokens), params)
        words = max(1, round((load.prompt_tokens - self._tokens_around) / self._tokens_per_word))
        chat = Chat((Turn("user", random_words(source, words)),), is_limited=True)
        return ChatRequest(request_id, chat, params, load.prompt_tokens)

    # --- one load -----------------------------------------------------------------------------------------------------

    def run(self, load: Load, seed: int) -> list[Answer]:
        """Run one load, as ``measure.Target`` requires."""
        self._refuse_oversized(load)
        if time.monotonic() >= self._deadline_s:
            raise TimeBudgetExceeded(f"not started: {self._limit_s:g} s for all loads (--seconds) are over")
        return self._runner.run(self._run(load, seed))

    def _refuse_oversized(self, load: Load) -> None:
        """Reject a load that exceeds the engine's capacity: requests would be delayed or truncated."""
        tokens, held = load.prompt_tokens + load.new_tokens, self.capacity
        if tokens > held.max_model_len:
            raise LoadRefused(f"a request can have at most {held.max_model_len:,} tokens")
        if held.server_max_sequences is not None and load.batch > held.server_max_sequences:
            raise LoadRefused(f"the engine runs at most {held.server_max_sequences:,} concurrent requests")
        if held.server_max_kv_tokens is not None and load.batch * tokens > held.server_max_kv_tokens:
            raise LoadRefused(f"the engine's KV memory holds {held.server_max_kv_tokens:,} tokens")

    async def _run(self, load: Load, seed: int) -> list[Answer]:
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()):
                seen = await self._ask(load, seed)
        except TimeoutError:
            raise TimeBudgetExceeded(f"not completed within {self._limit_s:g} s for all loads (--seconds)") from None
        if not all(one.pieces for one in seen):
            raise LoadRefused("an answer had no tokens")
        return [_answer(one) for one in seen]

    async def _ask(self, load: Load, seed: int) -> list[_Progress]:
        try:
            return await self._ask_once(load, seed)
        except LoadRefused:
            # Not every API supports ignore_eos. Without it, answers may end before new_tokens.
            if self._refusal is None or self._refusal.param != "ignore_eos":
                raise
        self._params = replace(self._params, ignore_eos=False)
        return await self._ask_once(load, seed)

    async def _ask_once(self, load: Load, seed: int) -> list[_Progress]:
        """Submit a load and wait for its end. Raises LoadRefused, or BenchError if the engine dies."""
        source = random.Random(seed)  # noqa: S311 - nothing secret
        requests = [self._request(source, load) for _ in range(load.batch)]
        self._seen = {request.request_id: _Progress(load.prompt_tokens) for request in requests}
        self._live, self._refusal, self._error = set(self._seen), None, None
        self._started_s = time.perf_counter()
        try:
            for request in requests:
                self._engine.submit(request)  # type: ignore[arg-type]  # of the type that the engine takes
            await self._until(lambda: not self._live or self._error is not None)
        finally:
            await self._cancel_running()
        if self._error is not None:
            raise LoadRefused(self._error)
        return list(self._seen.values())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self._death is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._death is not None:
            raise BenchError(str(self._death)) from self._death

    async def _cancel_running(self) -> None:
        """Cancel running requests, so that they do not disturb the next load."""
        if not self._live or self._death is not None:
            return
        for request_id in self._live:
            self._engine.cancel(request_id)
        try:
            async with asyncio.timeout(CANCEL_LIMIT_S):
                await self._until(lambda: not self._live)
        except TimeoutError:
            raise BenchError(f"the engine did not cancel a request within {CANCEL_LIMIT_S:g} s") from None

    # --- outputs ------------------------------------------------------------------------------------------------------

    async def _read_steps(self) -> None:
        try:
            async for outputs in self._engine.steps():
                self._receive(outputs)
        except EngineDiedError as error:
            self._death = error
        else:
            self._death = EngineDiedError("the engine stopped unexpectedly")
        self._changed.set()

    def _receive(self, outputs: Sequence[SequenceOutput]) -> None:
        now_s = time.perf_counter() - self._started_s
        for output in outputs:
            seen = self._seen.get(output.request_id)
            if seen is None:
                continue
            if isinstance(output, ChatOutput):
                if output.parts:
                    seen.pieces.append(Piece(now_s, output.tokens))
                if output.usage is not None and output.usage.counted_by == "provider":
                    seen.prompt_tokens = output.usage.prompt_tokens
                    seen.completion_tokens = output.usage.completion_tokens
            elif output.token_ids:
                seen.pieces.append(Piece(now_s, len(output.token_ids)))
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
                self._store_error(output)
        self._changed.set()

    def _store_error(self, output: SequenceOutput) -> None:
        if output.finish_reason != "error" or self._error is not None:
            return
        self._error = output.error or "the engine failed the request"
        if isinstance(output, Refusal):
            self._refusal = output

    @property
    def is_an_api(self) -> bool:
        """True if the engine takes messages. Its pool has no settings for its memory."""
        return self._engine.takes == TAKES_MESSAGES

    def environment(self) -> dict[str, Any]:
        """Return the pool's facts for the report."""
        url = getattr(self._settings, "url", "")
        return {
            "pool": self._pool,
            "model": self._model,
            "kind": self._engine.name,
            "url": None if PORT_PLACE in url else url or None,
            "max_model_len": self.capacity.max_model_len,
            "server_max_sequences": self.capacity.server_max_sequences,
            "server_max_kv_tokens": self.capacity.server_max_kv_tokens,
            "ends_ignored": self._params.ignore_eos,
            "seconds": self._limit_s,
            "spillway": version(),
        }


def _answer(seen: _Progress) -> Answer:
    """Build the answer. If the provider counts the tokens, each piece gets an equal share."""
    if seen.completion_tokens is None:
        return Answer(seen.prompt_tokens, seen.pieces)
    share = seen.completion_tokens / len(seen.pieces)
    return Answer(seen.prompt_tokens, [Piece(piece.at_s, share) for piece in seen.pieces])
