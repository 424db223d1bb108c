"""A worker that does what a test says, speaking the real protocol over a real nats-server."""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from nats.aio.msg import Msg

from protocol import subjects
from protocol.job import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Control,
    Drain,
    EngineStats,
    Failed,
    Finished,
    Frame,
    Heartbeat,
    Job,
    ModelCard,
    Paused,
    Ping,
    Resend,
    StepFrame,
    Timings,
    Tokens,
    Vector,
    decode_control,
    decode_job,
    encode,
    unpack_token_ids,
)
from protocol.nats import objects, topology
from protocol.nats.bus import Bus
from protocol.nats.objects import get_object
from protocol.nats.pull import Delivery, PullConsumer, ack, nak
from tests.waiting import HANGS_S, until


class Attempt:
    """One pulled job and the frames made for it; a frame may be kept from the gateway ("lost")."""

    def __init__(self, worker: "ScriptedWorker", delivery: Delivery, job: Job) -> None:
        self.worker = worker
        self.delivery = delivery
        self.job = job
        self.frames: list[Frame] = []
        self.cancelled = asyncio.Event()
        self.made_tokens = 0
        self.fetched_prompt: list[int] = []  # one that travelled by reference
        self.is_handed_back = False

    def is_of(self, job: Job) -> bool:
        """Return whether it is this very attempt, which its worker has and not only has seen."""
        same = (self.job.request_id, self.job.attempt) == (job.request_id, job.attempt)
        return same and not self.is_handed_back

    async def hand_back(self, delay_s: float) -> None:
        """Leave the job to whoever pulls next, after a while."""
        self.is_handed_back = True
        await nak(self.worker.bus, self.delivery, delay_s)

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_token_ids(self.job.prompt_ids)

    async def _add(self, frame: Frame, lost: bool) -> None:
        self.frames.append(frame)
        if not lost:
            await self.worker.send([frame], self.job.reply_subject)

    async def accept(self, lost: bool = False) -> None:
        pool, provider, region, tier = self.worker.place
        accepted = Accepted(
            self.job.request_id, self.job.attempt, 0, self.worker.worker_id, pool, provider, region, 1.0, tier
        )
        await self._add(accepted, lost)
        await ack(self.worker.bus, self.delivery)

    def tokens_frame(self, text: str, ids: tuple[int, ...], **rest: Any) -> Tokens:
        self.made_tokens += len(ids)
        index = rest.pop("index", 0)
        return Tokens(self.job.request_id, self.job.attempt, len(self.frames), index, ids, text, **rest)

    async def tokens(self, text: str, ids: tuple[int, ...] = (7,), lost: bool = False, **rest: Any) -> None:
        await self._add(self.tokens_frame(text, ids, **rest), lost)

    async def vector(self, index: int, values: Iterable[float], lost: bool = False) -> None:
        frame = Vector(self.job.request_id, self.job.attempt, len(self.frames), index, array("f", values).tobytes())
        await self._add(frame, lost)

    async def finish(
        self, lost: bool = False, cancelled: bool = False, cached_tokens: int = 0, timings: Timings | None = None
    ) -> None:
        frame = Finished(
            self.job.request_id,
            self.job.attempt,
            len(self.frames),
            cancelled=cancelled,
            prompt_tokens=self.job.prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=self.made_tokens,
            ttft_ms=1.0,
            timings=timings,
        )
        await ack(self.worker.bus, self.delivery)
        await self._add(frame, lost)

    async def fail(self, code: str, message: str, retryable: bool, param: str | None = None) -> None:
        frame = Failed(
            self.job.request_id,
            self.job.attempt,
            len(self.frames),
            code,
            message,
            retryable=retryable,
            param=param,
            completion_tokens=self.made_tokens,
        )
        await ack(self.worker.bus, self.delivery)
        await self._add(frame, False)


Script = Callable[[Attempt], Awaitable[None]]


async def answer_hello(attempt: Attempt) -> None:
    """Two tokens per choice, then the end."""
    await attempt.accept()
    for index in range(attempt.job.sampling.n):
        await attempt.tokens("Hello", (1,), index=index)
        await attempt.tokens(" world", (2,), index=index, finish_reason="stop")
    await attempt.finish()


async def until_cancelled(attempt: Attempt) -> None:
    """A token now and then until somebody cancels."""
    await attempt.accept()
    while not attempt.cancelled.is_set():
        await attempt.tokens("x", (3,))
        await asyncio.sleep(0.005)
    await attempt.finish(cancelled=True)


async def hold_until_cancelled(attempt: Attempt) -> None:
    """Nothing until somebody cancels, however late: an answer may not have more tokens than it was asked for."""
    await attempt.accept()
    await attempt.cancelled.wait()
    await attempt.finish(cancelled=True)


class ScriptedWorker:
    """Pulls jobs of one model and runs ``script`` for each."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        worker_id: str,
        script: Script = answer_hello,
        *,
        takes_jobs: bool = True,
        pull_s: float = 1.0,
        place: tuple[str, str, str, str] = ("pool-a", "provider-a", "region-a", "spot"),
        trusted: bool = False,
    ) -> None:
        """``place``: pool, provider, region, tier; of a hosted one, only the pool's own lane is served.

        ``pull_s``: how long a pull waits. Between two, workers of a less preferred tier get the jobs.
        """
        self.place = place
        self._pull_s = pull_s
        self.trusted = trusted
        self.paused: Paused | None = None
        queue = subjects.queue_of(model, trusted=trusted)
        self.bus = bus
        self.model = model
        self.worker_id = worker_id
        self.script = script
        self.attempts: list[Attempt] = []
        self.controls: list[Control] = []
        self.deaf = False  # answers no control message
        self.takes_jobs = takes_jobs
        self.free_sequences = 64 if takes_jobs else 0  # as its heartbeats say
        self.jobs_taken = 0  # likewise
        self.stats: EngineStats | None = None  # likewise
        self._consumers = [
            PullConsumer(
                bus, subjects.INTERACTIVE_STREAM, subjects.job_consumer(queue, lane), self._on_delivery, tier=place[-1]
            )
            for lane in (subjects.LANES if place[-1] != subjects.HOSTED_TIER else (subjects.hosted_lane(place[0]),))
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    @property
    def requests(self) -> set[str]:
        """Attempts that came here; on a slow machine a request may come as several."""
        return {attempt.job.request_id for attempt in self.attempts}

    async def start(self) -> None:
        self._control = await self.bus.subscribe(subjects.control_subject(self.worker_id), self._on_control)
        for consumer in self._consumers:
            await consumer.start()
        self._beating = asyncio.create_task(self._beat())
        self._tasks.add(asyncio.create_task(self._pull()))
        self.bus.on_reconnect(self._forget_pulls)

    async def _forget_pulls(self) -> None:
        for consumer in self._consumers:
            consumer.forget_pulls()

    async def publish_card(self, card: ModelCard, tokenizer_json: bytes) -> None:
        await objects.publish_model_card(self.bus, card, tokenizer_json)

    async def stop(self) -> None:
        """Gone: no more heartbeats, pulls or frames."""
        if not self.bus.client.is_closed:
            await self._control.unsubscribe()
        await self.stop_pulling()
        self.stop_beating()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop_pulling(self) -> None:
        """Take no further job."""
        self.takes_jobs = False
        for consumer in self._consumers:
            await consumer.stop()

    async def sign_off(self) -> None:
        """Tell the gateways that it is gone, as workers do that leave in order."""
        await self.bus.publish(subjects.heartbeat_subject(self.worker_id), b"")
        await self.bus.client.flush()

    def stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def send(self, frames: list[Frame], reply_subject: str) -> None:
        step = StepFrame(PROTOCOL_VERSION, self.worker_id, tuple(frames))
        await self.bus.publish(reply_subject, encode(step))

    async def _beat(self) -> None:
        while True:
            now_ms = time.time_ns() // 1_000_000
            names = (self.worker_id, *self.place, "scripted", (self.model,))
            room = (64, 100_000, self.free_sequences, 100_000, 64 - self.free_sequences)
            beat = Heartbeat(
                PROTOCOL_VERSION,
                *names,
                0.0,
                *room,
                now_ms,
                now_ms,
                jobs_taken=self.jobs_taken,
                stats=self.stats,
                trusted=self.trusted,
                paused=self.paused,
            )
            await self.bus.publish(subjects.heartbeat_subject(self.worker_id), encode(beat))
            await asyncio.sleep(0.2)

    async def _pull(self) -> None:
        while True:
            for consumer in self._consumers:
                if self.takes_jobs and self.bus.connected and consumer.outstanding() < 8:
                    await consumer.pull(8, expires_s=self._pull_s)
            await asyncio.sleep(0.02)

    async def _on_delivery(self, delivery: Delivery) -> None:
        job = decode_job(delivery.payload)
        held = next((attempt for attempt in self.attempts if attempt.is_of(job)), None)
        if held is not None:  # it comes again, as an acknowledgement was late or lost; the work must not
            if held.frames:
                await ack(self.bus, delivery)
            return
        attempt = Attempt(self, delivery, job)
        self.attempts.append(attempt)
        task = asyncio.create_task(self._run(attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, attempt: Attempt) -> None:
        if attempt.job.prompt_object is not None:
            packed = await get_object(self.bus, subjects.PROMPTS_BUCKET, attempt.job.prompt_object)
            attempt.fetched_prompt = unpack_token_ids(packed)
        await self.script(attempt)

    async def _on_control(self, message: Msg) -> None:
        control = decode_control(message.data)
        self.controls.append(control)
        if self.deaf:
            return
        for attempt in self.attempts:
            if isinstance(control, Ping | Drain):
                return
            if (attempt.job.request_id, attempt.job.attempt) != (control.request_id, control.attempt):
                continue
            if isinstance(control, Cancel):
                attempt.cancelled.set()
            else:
                await self.send(attempt.frames[control.from_seq :], control.reply_subject)
            return
        if isinstance(control, Resend):
            lost = Failed(
                control.request_id, control.attempt, control.from_seq, "unknown_attempt", "unknown", retryable=True
            )
            await self.send([lost], control.reply_subject)


async def wait_for_pulls(bus: Bus, model: str, workers: int) -> None:
    """Wait until pulls of so many workers are parked in each lane of an interactive job."""
    names = [subjects.job_consumer(model, lane) for lane in subjects.HIGH_LANES]

    async def are_parked() -> bool:
        infos = [await bus.api(f"CONSUMER.INFO.{subjects.INTERACTIVE_STREAM}.{name}") for name in names]
        return all(info["num_waiting"] >= workers for info in infos)

    await until(are_parked)


async def wait_for_consumer(bus: Bus, model: str) -> None:
    """Jobs can be pulled."""
    async with asyncio.timeout(HANGS_S):
        while not await topology.consumer_exists(
            bus, subjects.INTERACTIVE_STREAM, subjects.job_consumer(model, subjects.LANES[-1])
        ):
            await asyncio.sleep(0.01)
