"""The gateway's side of the wire, for tests of the worker: publishes jobs, collects frames, checks the fence."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from nats.aio.msg import Msg

from pool_worker import engines
from pool_worker.drain import Stop
from pool_worker.engines.scripted_words import build_tokenizer
from pool_worker.main import connect
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from pool_worker.worker import Worker
from protocol import job as m
from protocol import subjects
from protocol.job import StepFrame, decode_step
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.usage import AttemptRecord, decode_usage
from tests.integration.queued_jobs import queued_jobs, until_queued
from tests.waiting import HANGS_S

MODEL = "scripted/test.v1"
TOKENIZER = build_tokenizer()

Attempt = tuple[str, int]


def settings_for(url: str, *, worker_id: str = "w1", drain_s: float = 20.0, **engine: Any) -> WorkerSettings:
    return WorkerSettings(
        worker_id=worker_id,
        pool="test",
        nats_urls=(url,),
        models=(MODEL,),
        drain_s=drain_s,
        engine=ScriptedEngineSettings(**engine),
    )


class PlayingGateway:
    """Publishes jobs and keeps, by attempt, every frame that arrives in order; asks again for lost ones."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.reply_subject = subjects.frames_subject("g1")
        self.steps: list[StepFrame] = []
        self.frames: dict[Attempt, list[m.Frame]] = {}
        self.repeated = 0  # frames that arrived twice
        self.gaps = 0  # frames that arrived too early
        self.records: list[AttemptRecord] = []
        self.loses: Callable[[m.Frame], bool] = lambda _frame: False
        self._changed = asyncio.Event()
        self._numbers = count(1)

    async def start(self, models: tuple[str, ...] = (MODEL,)) -> None:
        await self.apply_topology(models)
        await self.bus.subscribe(self.reply_subject, self._on_step)
        await self.bus.subscribe(f"{subjects.ATTEMPT_USAGE_SUBJECT}.>", self._on_record)

    async def apply_topology(self, models: tuple[str, ...] = (MODEL,)) -> None:
        await topology.apply(self.bus, list(models), topology.QueueBounds(), limit_s=HANGS_S)

    async def _on_step(self, message: Msg) -> None:
        step = decode_step(message.data)
        self.steps.append(step)
        for frame in step.frames:
            if not self.loses(frame):
                await self._take(step.worker_id, frame)
        self._changed.set()

    async def _take(self, worker_id: str, frame: m.Frame) -> None:
        frames = self.frames.setdefault((frame.request_id, frame.attempt), [])
        if frame.seq == len(frames):
            frames.append(frame)
        elif frame.seq < len(frames):
            self.repeated += 1
        else:
            self.gaps += 1
            await self.ask_again(worker_id, (frame.request_id, frame.attempt))

    async def ask_again(self, worker_id: str, attempt: Attempt) -> None:
        from_seq = len(self.frames.get(attempt, []))
        await self.control(worker_id, m.Resend(*attempt, from_seq, self.reply_subject))

    async def _on_record(self, message: Msg) -> None:
        for record in decode_usage(message.data):
            assert isinstance(record, AttemptRecord)
            self.records.append(record)
        self._changed.set()

    def job(self, prompt: str = "hello", *, attempt: int = 1, request_id: str | None = None, **fields: Any) -> m.Job:
        sampling = {name: fields.pop(name) for name in set(m.Sampling.__struct_fields__) & set(fields)}
        return m.Job(
            v=m.PROTOCOL_VERSION,
            request_id=request_id or f"r{next(self._numbers)}",
            attempt=attempt,
            model=fields.pop("model", MODEL),
            reply_subject=self.reply_subject,
            sampling=m.Sampling(**{"max_tokens": 16, **sampling}),
            prompt_ids=fields.pop("prompt_ids", m.pack_token_ids(TOKENIZER.encode(prompt).ids)),
            **fields,
        )

    async def publish(self, job: m.Job, *, message_id: str | None = None, lane: str = "h0") -> Attempt:
        message_id = message_id or f"{job.request_id}.{job.attempt}"
        await self.bus.publish_durable(subjects.job_subject(job.model, lane), m.encode(job), message_id=message_id)
        return job.request_id, job.attempt

    async def ask(self, prompt: str = "hello", **fields: Any) -> Attempt:
        return await self.publish(self.job(prompt, **fields))

    async def control(self, worker_id: str, message: m.Control) -> None:
        await self.bus.publish(subjects.control_subject(worker_id), m.encode(message))

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def last(self, attempt: Attempt) -> m.Frame | None:
        frames = self.frames.get(attempt)
        return frames[-1] if frames else None

    def is_over(self, attempt: Attempt) -> bool:
        return isinstance(self.last(attempt), m.Finished | m.Failed)

    async def end_of_all(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            await self.wait(lambda attempt=attempt: self.is_over(attempt))  # type: ignore[misc]

    async def end_of(self, attempt: Attempt) -> m.Frame:
        await self.wait(lambda: self.is_over(attempt))
        last = self.last(attempt)
        assert last is not None
        return last

    async def tokens_of(self, attempt: Attempt, at_least: int) -> None:
        await self.wait(lambda: len(self.token_ids(attempt)) >= at_least)

    def tokens(self, attempt: Attempt, index: int = 0) -> list[m.Tokens]:
        frames = self.frames.get(attempt, [])
        return [frame for frame in frames if isinstance(frame, m.Tokens) and frame.index == index]

    def token_ids(self, attempt: Attempt, index: int = 0) -> list[int]:
        return [id_ for frame in self.tokens(attempt, index) for id_ in frame.token_ids]

    def text(self, attempt: Attempt, index: int = 0) -> str:
        return "".join(frame.text for frame in self.tokens(attempt, index))

    async def queued(self) -> int:
        return await queued_jobs(self.bus)

    async def wait_until_queue_is_empty(self) -> None:
        await until_queued(self.bus, 0)

    async def stored_attempts(self) -> int:
        """Return the number of attempt records in the USAGE stream."""
        info = await self.bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}")
        records = 0
        for sequence in range(info["state"]["first_seq"], info["state"]["last_seq"] + 1):
            answer = await self.bus.api(f"STREAM.MSG.GET.{subjects.USAGE_STREAM}", {"seq": sequence})
            assert answer["message"]["subject"].startswith(subjects.ATTEMPT_USAGE_SUBJECT)
            records += len(decode_usage(base64.b64decode(answer["message"]["data"])))
        return records


@asynccontextmanager
async def running_worker(settings: WorkerSettings, ready: asyncio.Event | None = None) -> AsyncIterator[Stop]:
    """Run a worker on this event loop; requesting the yielded stop makes it drain. It must have ended at the exit.

    ``ready`` is set while the worker reports that it is ready.
    """
    bus = await connect(settings)
    engine = engines.create(settings.engine)
    capacity = await engine.start()
    stop, ready = Stop(settings.drain_s), ready or asyncio.Event()

    def on_ready(task: str | None) -> None:
        ready.clear() if task is None else ready.set()

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            await Worker(settings, bus, engine, capacity, tasks).serve(stop, on_ready)

    serving = asyncio.create_task(serve())
    async with asyncio.timeout(HANGS_S):
        await asyncio.wait({serving, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield stop
        finally:
            stop.request()
            try:
                await serving
            finally:
                await engine.stop()
                await bus.close()
