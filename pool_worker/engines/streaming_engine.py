"""Common base of engines in front of a server: a task per choice, limited concurrency, steps, and statistics.

    submit ──> _choices ──> one task per choice: _generate ──outputs──> steps

Subclasses (``server``, ``chat_server``) define requests to the server and interpret its answers.
"""

import abc
import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Generic, Protocol, TypeVar

from engine.errors import RequestRejected
from engine.pooling.pooling_types import PoolingRequest
from engine.step_stats import SequenceClock, StepStats
from engine.types import EngineCounters, EngineStats, FinishReason, GenerationRequest, Refusal, SequenceOutput
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.chat import ChatRequest
from pool_worker.engines.server_busy import Busy, ServerBusy
from pool_worker.engines.server_connection import AttemptFailed

log = logging.getLogger(__name__)


class Choice(Protocol):
    """One choice of a request, answered by a server."""

    request_id: str
    index: int
    prompt_tokens: int
    clock: SequenceClock

    @property
    def has_ended(self) -> bool:
        """True once its end has been reported."""
        ...

    def end(self, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """End it without another token."""
        ...


_Request = TypeVar("_Request", bound=GenerationRequest | PoolingRequest | ChatRequest)
_Choice = TypeVar("_Choice", bound=Choice)


class StreamingEngine(abc.ABC, Generic[_Request, _Choice]):
    """The base of engines in front of a server; see ``base.Engine`` for the life cycle."""

    address: str  # the server's address, for logs and errors
    _slots: asyncio.Semaphore  # limits concurrent streams

    def __init__(self) -> None:
        self._tasks: dict[str, dict[_Choice, asyncio.Task[None]]] = {}  # by request
        self._ready: deque[SequenceOutput] = deque()  # outputs of the next step
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._death: EngineDiedError | None = None
        self._running: set[_Choice] = set()
        self._waiting = 0
        self._counters = EngineCounters()
        self._stats = StepStats()
        self._is_stopped = False

    @abc.abstractmethod
    def _choices(self, request: _Request) -> list[_Choice]:
        """Return the choices of a request. Raises RequestRejected."""

    @abc.abstractmethod
    async def _generate(self, choice: _Choice) -> None:
        """Stream a choice to its end, within ``_slot``. Raises RequestRejected, ServerBusy and AttemptFailed."""

    @abc.abstractmethod
    def _kv_usage(self, live: Sequence[_Choice]) -> float:
        """Return the share of the server's memory that these choices use."""

    @abc.abstractmethod
    async def _disconnect(self) -> None:
        """Disconnect from the server; no stream is running."""

    def _lose(self, reason: str) -> None:
        self._death = EngineDiedError(f"{self.address} is lost: {reason}")
        self._changed.set()

    async def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """Yield what arrived from all streams since the last step."""
        while not self._is_stopped:
            if self._ready:
                outputs = list(self._ready)
                self._ready.clear()
                yield outputs
            if self._death is not None:
                raise self._death
            await self._changed.wait()
            self._changed.clear()

    def stats(self) -> EngineStats:
        """Return statistics for the worker's heartbeats."""
        live = [choice for choice in self._running if not choice.has_ended]
        usage = self._kv_usage(live)
        return self._stats.snapshot(running=len(live), waiting=self._waiting, kv_usage=usage, counters=self._counters)

    async def stop(self) -> None:
        """Stop everything and free its resources."""
        self._is_stopped = True
        self._changed.set()
        tasks = {task for running in self._tasks.values() for task in running.values()}
        if self._watching is not None:
            tasks.add(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._disconnect()

    def submit(self, request: _Request) -> None:
        """Accept a request without blocking."""
        try:
            self._check_id(request.request_id)
            choices = self._choices(request)
        except RequestRejected as error:
            self._put(Refusal.of(request.request_id, error))
            return
        for choice in choices:
            if choice.has_ended:
                continue
            task = asyncio.create_task(self._run(choice), name=choice.request_id)
            self._tasks.setdefault(choice.request_id, {})[choice] = task
            task.add_done_callback(lambda _, choice=choice: self._forget(choice))  # type: ignore[misc]  # bound now

    def _check_id(self, request_id: str) -> None:
        if request_id in self._tasks:
            raise RequestRejected("request_id", f"{request_id!r} is already running")

    def cancel(self, request_id: str) -> None:
        """Cancel a request; unknown ids are ignored."""
        for choice, task in self._tasks.get(request_id, {}).items():
            if not choice.has_ended:
                self._put(choice.end("cancelled"))
            task.cancel()

    def _put(self, output: SequenceOutput) -> None:
        self._ready.append(output)
        self._changed.set()

    def _forget(self, choice: _Choice) -> None:
        tasks = self._tasks[choice.request_id]
        del tasks[choice]
        if not tasks:
            del self._tasks[choice.request_id]

    async def _run(self, choice: _Choice) -> None:
        try:
            await self._generate(choice)
        except ServerBusy as error:
            choice.end("error")
            self._put(Busy.of(choice.request_id, choice.index, error))
        except AttemptFailed as error:
            self._put(self._failed(choice, str(error)))
        except RequestRejected as error:
            self._put(Refusal.of(choice.request_id, error))
        except Exception as error:  # one stream's failure must not affect others
            log.exception("a stream of %s failed", choice.request_id)
            self._put(choice.end("error", repr(error)))

    def _failed(self, choice: _Choice, error: str) -> SequenceOutput:
        """Return the end of a choice whose answer the server did not finish."""
        return choice.end("error", error)

    @contextlib.asynccontextmanager
    async def _slot(self, choice: _Choice) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running.add(choice)
        choice.clock.scheduled_s = time.monotonic()
        self._counters.prompt_tokens += choice.prompt_tokens
        try:
            yield
        finally:
            self._running.discard(choice)
            self._slots.release()

    def _count(self, choice: _Choice, tokens: int) -> None:
        """Count received tokens."""
        self._stats.record_tokens([choice.clock], time.monotonic())
        self._stats.step_tokens.observe(tokens)
        self._counters.generated_tokens += tokens
