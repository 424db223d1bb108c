"""Probes of a broken server: small requests of the worker's own, until one is answered."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from engine.types import GenerationRequest, Refusal, SequenceOutput
from pool_worker.breaker import Breaker
from pool_worker.engines.base import AnyEngine, EngineDiedError
from pool_worker.engines.chat import ChatRequest
from pool_worker.engines.server_busy import Busy
from pool_worker.watch.start import number_tokens
from protocol.generation import SamplingParams
from protocol.job import TAKES_MESSAGES, Chat, Turn

NAME: Final = "spillway-probe"
QUESTION: Final = "1"
MAX_TOKENS: Final = 16  # some APIs refuse fewer
PROMPT_TOKENS: Final = 4
MARGIN_S: Final = 5.0  # on top of the engine's own limit for silent streams
HUNG_PROBES: Final = 2  # consecutive silent probes before an owned server is restarted


class Prober:
    """Probes the server of one worker while its breaker is open."""

    def __init__(
        self, engine: AnyEngine, breaker: Breaker, *, model: str, silence_s: float, is_ours: bool = False
    ) -> None:
        """``is_ours``: the worker owns the server and can restart it when it hangs."""
        self._engine = engine
        self._breaker = breaker
        self._model = model
        self._silence_s = silence_s
        self._is_ours = is_ours
        self._silences = 0  # probes in a row
        self._number = 0
        self._asked: str | None = None  # the running probe
        self._is_answered = False
        self._error: str | None = None
        self._busy: Busy | None = None
        self._changed = asyncio.Event()
        self._prompt: list[int] = []
        self.opened = asyncio.Event()  # set when a probe may be due

    def take(self, outputs: Sequence[SequenceOutput]) -> None:
        """Read an engine step's outputs, if a probe is running."""
        for output in outputs if self._asked is not None else ():
            if output.request_id != self._asked:
                continue
            if isinstance(output, Busy):
                self._busy = output
            if output.finish_reason == "error" and not isinstance(output, Refusal):
                self._error = output.error or "the engine gave no reason"
            elif output.finish_reason != "cancelled":
                self._is_answered = True  # a refusal also proves that the server reads requests
            self._changed.set()

    async def run(self) -> EngineDiedError:
        """Probe while the server is broken; return why a hung server must be restarted."""
        while True:
            await self.opened.wait()
            self.opened.clear()
            wait_s = self._breaker.pause_s
            while self._breaker.reason is not None:
                await asyncio.sleep(wait_s)
                wait_s = await self._probe()
                if self._is_ours and self._silences >= HUNG_PROBES:
                    return EngineDiedError(f"the server hangs: {self._breaker.reason}")

    async def _probe(self) -> float:
        """Probe once; return the seconds until the next probe."""
        if self._breaker.reason is None:  # a running stream has proved it meanwhile
            return 0.0
        reason = await self._why_not()
        now_s = time.monotonic()
        if self._busy is not None:
            self._breaker.asked_to_wait(self._busy.wait_s, self._busy.error or "", now_s)
        elif reason is not None:
            return self._breaker.probe_failed(reason)
        self._silences = 0
        self._breaker.closed(now_s)
        return 0.0

    async def _why_not(self) -> str | None:
        """Return why a probe failed; None if it was answered."""
        self._number += 1
        self._asked = request_id = f"{NAME}-{self._number}"
        self._is_answered, self._error, self._busy = False, None, None
        asked_s, limit_s = time.monotonic(), self._silence_s + MARGIN_S
        try:
            await self._submit(request_id)
            async with asyncio.timeout(limit_s):
                while not self._is_answered and self._error is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._error = f"no answer to a probe within {limit_s:g} s"
        finally:
            self._asked = None
            self._engine.cancel(request_id)
        if self._is_answered:
            return None
        self._silences = self._silences + 1 if time.monotonic() - asked_s >= self._silence_s else 0
        return self._error

    async def _submit(self, request_id: str) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS)
        if self._engine.takes == TAKES_MESSAGES:
            chat = Chat(turns=(Turn("user", QUESTION),), is_limited=True)
            self._engine.submit(ChatRequest(request_id, chat, params, 1))
            return
        if not self._prompt:
            self._prompt = (await asyncio.to_thread(number_tokens, self._engine, self._model))[:PROMPT_TOKENS]
        self._engine.submit(GenerationRequest(request_id, self._prompt, params))
