"""Measures the engine's speed before it has any job, with a few test requests, for a bounded time."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.types import GenerationRequest, SequenceOutput
from pool_worker.engines.base import Capacity, TokenEngine
from pool_worker.watch.pace import StartFigures
from protocol.generation import SamplingParams

PROMPT_TOKENS: Final = 256
NEW_TOKENS: Final = 33
WARM_UP_TOKENS: Final = 4
BATCHES: Final = (1, 1, 4, 16, 64)  # a single request runs twice; the faster counts
NAME: Final = "spillway-watch"

Load = tuple[int, int, float]  # batch, context tokens, TPOT in seconds


class NotMeasured(Exception):
    """The engine cannot be measured; the message says why."""


@dataclass(slots=True)
class _TestRequest:
    """One test request."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class StartBenchmark:
    """Submits test requests and reads their outputs while there are no others."""

    def __init__(self, engine: TokenEngine, capacity: Capacity, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock_s = clock_s
        self._prompt_tokens = min(PROMPT_TOKENS, capacity.max_model_len - NEW_TOKENS)
        per_sequence = self._prompt_tokens + NEW_TOKENS
        self._most = max(1, min(capacity.max_sequences, capacity.max_kv_tokens // max(1, per_sequence)))
        self._seen: dict[str, _TestRequest] = {}
        self._live: set[str] = set()
        self._error: str | None = None
        self._changed = asyncio.Event()
        self._number = 0
        self._source = random.Random(0)  # noqa: S311 - nothing secret
        self._params = SamplingParams(temperature=0.0, ignore_eos=True)

    async def run(self, model: str, limit_s: float) -> tuple[StartFigures, list[Load]]:
        """Measure what the time allows: a single request, then batches. Raises NotMeasured if the first fails."""
        if self._prompt_tokens < 1:
            raise NotMeasured("the model's context is too short")
        words = await asyncio.to_thread(number_tokens, self._engine, model)
        alone: StartFigures | None = None
        loads: list[Load] = []
        try:
            async with asyncio.timeout(limit_s):
                await self._run(words, 1, WARM_UP_TOKENS)
                for batch in BATCHES:
                    if batch > self._most:
                        break
                    start_s = self._clock_s()
                    tpot_s, ttft_s = await self._run(words, batch, NEW_TOKENS, start_s)
                    if batch == 1:
                        alone = _faster(alone, StartFigures(tpot_s, ttft_s))
                        tpot_s = alone.tpot_s
                    loads.append((batch, self._prompt_tokens + NEW_TOKENS // 2, tpot_s))
        except TimeoutError:
            if alone is None:
                raise NotMeasured(f"no answer of {NEW_TOKENS} tokens within {limit_s:g} s") from None
        finally:
            for request_id in self._live:
                self._engine.cancel(request_id)
        if alone is None:
            raise NotMeasured("no request fits into the engine")
        return alone, loads

    def take(self, outputs: Sequence[SequenceOutput]) -> None:
        """Read an engine step's outputs."""
        now_s = self._clock_s()
        for output in outputs:
            seen = self._seen.get(output.request_id)
            if seen is None:
                continue
            if output.token_ids:
                seen.first_s = seen.first_s if seen.tokens else now_s
                seen.last_s = now_s
                seen.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._live.discard(output.request_id)
                self._error = output.error if output.finish_reason == "error" else self._error
        self._changed.set()

    async def _run(
        self, words: Sequence[int], batch: int, new_tokens: int, start_s: float = 0.0
    ) -> tuple[float, float]:
        """Run one load to its end; return the means of TPOT and TTFT."""
        try:
            return await self._run_once(words, batch, new_tokens, start_s)
        except NotMeasured:
            if not self._params.ignore_eos:
                raise
            self._params = replace(self._params, ignore_eos=False)  # not every server supports it
            return await self._run_once(words, batch, new_tokens, start_s)

    async def _run_once(self, words: Sequence[int], batch: int, new_tokens: int, start_s: float) -> tuple[float, float]:
        self._seen, self._error = {}, None
        params = replace(self._params, max_tokens=new_tokens)
        requests = []
        for _ in range(batch):
            self._number += 1
            prompt = self._source.choices(words, k=self._prompt_tokens)  # not in any prefix cache
            requests.append(GenerationRequest(f"{NAME}-{self._number}", prompt, params))
        self._seen = {request.request_id: _TestRequest() for request in requests}
        self._live = set(self._seen)
        for request in requests:
            self._engine.submit(request)
        while self._live:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise NotMeasured(self._error)
        seen = list(self._seen.values())
        if any(one.tokens < 2 for one in seen):
            raise NotMeasured("an answer had fewer than two tokens")
        tpot_s = sum((one.last_s - one.first_s) / (one.tokens - 1) for one in seen) / len(seen)
        return tpot_s, sum(one.first_s - start_s for one in seen) / len(seen)


def _faster(one: StartFigures | None, other: StartFigures) -> StartFigures:
    if one is None:
        return other
    return StartFigures(min(one.tpot_s, other.tpot_s), min(one.ttft_s, other.ttft_s))


def number_tokens(engine: TokenEngine, model: str) -> list[int]:
    """Return the ids of ordinary tokens: numbers, which every tokenizer has."""
    _, tokenizer_json = engine.model_card(model)
    text = " ".join(map(str, range(1000)))
    return sorted(set(Tokenizer.from_str(tokenizer_json.decode()).encode(text, add_special_tokens=False).ids))
