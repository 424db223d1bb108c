"""One worker's parts and the order in which they start and stop.

outgoing   publisher, outbox                                 first up, last down
work       engine steps, pulls, heartbeat, cards             end by a drain, or when one of them fails
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pool_worker import notices
from pool_worker.attempt import OUTBOX_RECORDS, Attempt
from pool_worker.consumer import Consumer, Gate, JobFilter
from pool_worker.control import ControlListener
from pool_worker.credit import Credit
from pool_worker.drain import Drain, Stop
from pool_worker.engines.base import AnyEngine, Capacity, EngineDiedError
from pool_worker.executor import Executor
from pool_worker.heartbeat import HeartbeatPublisher, ModelCards
from pool_worker.peers import GatewayWatch, Peers
from pool_worker.probe import Prober
from pool_worker.publisher import Publisher
from pool_worker.settings import ConnectionSettings, ServerEngineSettings, VllmInProcessSettings, WorkerSettings
from pool_worker.watch.node import NodeTooSlowError, NodeWatch
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.job import TAKES_MESSAGES
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox

if TYPE_CHECKING:
    from pool_worker.traces import AttemptTraces

STOP_PULLING_LIMIT_S: Final = 1.0
OUTBOX_FLUSH_LIMIT_S: Final = 10.0  # at shutdown
FORCED_FLUSH_LIMIT_S: Final = 1.0  # after a second signal
CANCEL_AGAIN_S: Final = 0.5

OnReady = Callable[[str | None], None]  # the models' task: "generate", "embed" or "score"; None: not ready

log = logging.getLogger(__name__)


class Worker:
    """A connected worker whose engine has started. Make it inside the TaskGroup that runs its small tasks."""

    def __init__(
        self,
        settings: WorkerSettings,
        bus: Bus,
        engine: AnyEngine,
        capacity: Capacity,
        tasks: asyncio.TaskGroup,
        *,
        traces: "AttemptTraces | None" = None,
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._engine = engine
        credit = Credit(capacity, settings.batch_reserve)
        self._refill_needed = asyncio.Event()  # set when there may be more room for jobs, or a gate has opened
        self._publisher = Publisher(bus, settings.worker_id)
        self._peers = Peers(
            bus,
            settings.worker_id,
            hosted_pool=settings.pool if settings.is_hosted else None,
            trusted=settings.trusted,
        )
        self._outbox = Outbox(bus, subjects.attempt_usage_subject(settings.pool, settings.worker_id), OUTBOX_RECORDS)
        self._cards = ModelCards(bus, engine, settings.models)
        revisions = self._cards.revisions
        self._executor = Executor(
            settings,
            bus,
            engine,
            credit=credit,
            publisher=self._publisher,
            outbox=self._outbox,
            revisions=revisions,
            spawn=tasks.create_task,
            on_end=self._on_attempt_ended,
            on_pause=self._on_pause,
            traces=traces,
        )
        self._gate = Gate(
            settings.gate,
            bus,
            self._peers,
            tier=settings.tier,
            models=settings.models,
            trusted=settings.trusted,
            on_open=self._refill_needed.set,
        )
        self._consumer = Consumer(
            bus,
            settings.models,
            settings.tier,
            worker_id=settings.worker_id,
            lanes=settings.lanes,
            trusted=settings.trusted,
            max_unreadable_deliveries=settings.max_unreadable_deliveries,
            executor=self._executor,
            job_filter=JobFilter(settings, engine, self._peers, revisions),
            credit=credit,
            outbox=self._outbox,
            gate=self._gate,
            refill_needed=self._refill_needed,
            on_foreign_tokens=self._cards.publish_again,
        )
        self._prober = None
        asked = settings.engine
        if isinstance(asked, (ConnectionSettings, VllmInProcessSettings)):
            is_ours = isinstance(asked, ServerEngineSettings) and asked.exec is not None
            breaker, model = self._executor.breaker, settings.models[0]
            self._prober = Prober(engine, breaker, model=model, silence_s=asked.silence_s, is_ours=is_ours)
        self._control = ControlListener(bus, settings.worker_id, self._executor)
        self._on_ready: OnReady | None = None
        self._is_measured = asyncio.Event()
        self._has_shrunk = False  # the server has shrunk; this worker leaves
        self._watch = None
        if settings.watch is not None and engine.takes != TAKES_MESSAGES:  # an API has no node of this pool
            self._watch = NodeWatch(
                settings.watch,
                engine,
                capacity,
                peers_tpot_ms=lambda: self._peers.start_tpots_ms(settings.pool),
            )
        self._heart = HeartbeatPublisher(
            settings,
            bus,
            engine,
            executor=self._executor,
            credit=credit,
            gate=self._gate,
            revisions=revisions,
            pace=lambda: None if self._watch is None else self._watch.report(),
        )
        # A hosted API's answers end here, for as long as the drain lasts: other workers may not resume them.
        is_chat = engine.takes == TAKES_MESSAGES
        self._drain = Drain(
            self._executor,
            lambda model: not is_chat and self._peers.others_serving(model, revisions[model].weights),
        )
        self._gateways = GatewayWatch(bus, settings, self._executor)
        bus.on_reconnect(self._on_reconnected)

    async def serve(self, stop: Stop, on_ready: OnReady | None) -> None:
        """Work until ``stop`` is requested or the provider gives a notice, then drain.

        Raises EngineDiedError once its jobs have been handed back. This includes a node that is too slow for its pool
        and a server that takes less than it did at the worker's start.
        """
        self._on_ready = on_ready
        sending = [self._tasks.create_task(self._publisher.run()), self._tasks.create_task(self._outbox.run())]
        try:
            await self._work(stop)
        finally:
            self._executor.fail_all(ErrorCode.INTERNAL_ERROR, "the worker failed")  # normally none are left
            await self._publisher.flush()
            await self._flush_outbox(stop)
            await self._heart.remove()
            for task in sending:
                task.cancel()
        if self._watch is not None and self._watch.reason is not None:
            if self._watch.reallocates:
                await notices.reallocate(self._settings.notice, self._settings.notice_url, self._watch.reason)
            raise NodeTooSlowError(f"this node is too slow: {self._watch.reason}")
        if self._has_shrunk:
            raise EngineDiedError(f"the worker left its pool: {self._executor.breaker.change}")

    async def _flush_outbox(self, stop: Stop) -> None:
        flushing = asyncio.create_task(self._outbox.flush(OUTBOX_FLUSH_LIMIT_S))
        force_exit = asyncio.create_task(stop.force_exit.wait())
        await asyncio.wait({flushing, force_exit}, return_when=asyncio.FIRST_COMPLETED)
        force_exit.cancel()
        if not flushing.done():
            flushing.cancel()
            await self._outbox.flush(FORCED_FLUSH_LIMIT_S)

    async def _work(self, stop: Stop) -> None:
        async with asyncio.TaskGroup() as work:
            pulling = work.create_task(self._pull_jobs(stop), name="pulls")
            keeping = [
                work.create_task(self._cards.run(), name="cards"),
                work.create_task(self._beat(), name="heartbeat"),
                work.create_task(self._gateways.run(), name="gateways"),
                work.create_task(self._gate.run(), name="gate"),
                work.create_task(self._watch_for_notice(stop), name="notices"),
                work.create_task(self._watch_pace(stop), name="pace"),
                work.create_task(self._watch_facts(stop), name="facts"),
            ]
            stepping = work.create_task(self._run_engine(), name="engine")
            stop_requested = work.create_task(stop.requested.wait(), name="stopping")
            probing = work.create_task(self._probe(), name="probes")
            await asyncio.wait({stepping, stop_requested, probing}, return_when=asyncio.FIRST_COMPLETED)
            pulling.cancel()
            await self._end_work(stop)
            await _cancel({pulling, stop_requested, stepping, probing, *keeping})
        for ended in (stepping, probing):
            if not ended.cancelled():
                raise ended.result()

    async def _pull_jobs(self, stop: Stop) -> None:
        if self._watch is not None:
            await self._watch.measure(self._settings.models[0])
            if self._watch.reason is not None:
                return
        self._is_measured.set()
        await self._peers.start()
        await self._consumer.wait_for_consumers()
        await self._cards.publish()
        await self._control.start(on_drain=stop.request)
        await self._consumer.start()
        await self._heart.beat()
        self._report_readiness()
        await self._consumer.run()

    def _report_readiness(self) -> None:
        if self._on_ready is None:
            return
        card, _ = self._engine.model_card(self._settings.models[0])
        task = "generate" if card.pooling is None else card.pooling.task
        self._on_ready(task if self._executor.breaker.is_ready else None)

    async def _beat(self) -> None:
        await self._is_measured.wait()  # before that, its heartbeat would offer room for jobs
        await self._heart.run()

    async def _run_engine(self) -> EngineDiedError:
        """Step until the engine is lost; return why."""
        try:
            async for outputs in self._engine.steps():
                if self._watch is None or not self._watch.took(outputs):
                    self._executor.take(outputs)
                    if self._prober is not None:
                        self._prober.take(outputs)
        except EngineDiedError as error:
            death = error
        else:
            death = EngineDiedError("the engine stopped unexpectedly")
        return self._died(death)

    async def _probe(self) -> EngineDiedError:
        """Probe a broken server; return why it is lost."""
        if self._prober is None:
            await asyncio.Event().wait()
            raise AssertionError
        return self._died(await self._prober.run())

    def _died(self, death: EngineDiedError) -> EngineDiedError:
        log.error("the engine died; handing back %d jobs: %s", len(self._executor.held), death)
        self._executor.fail_all(ErrorCode.ENGINE_DIED, str(death))
        return death

    async def _watch_for_notice(self, stop: Stop) -> None:
        settings = self._settings
        await notices.watch(settings.notice, settings.notice_url, lambda: len(self._executor.held), stop.request)

    async def _watch_pace(self, stop: Stop) -> None:
        if self._watch is not None:
            await self._watch.run()
            stop.request()

    async def _watch_facts(self, stop: Stop) -> None:
        """Take no jobs while the server's facts differ, and leave the pool if its limits have shrunk."""
        facts = self._engine.facts_watch
        if facts is not None:
            await self._is_measured.wait()  # the heartbeat period
            await facts.run(lambda change: self._executor.breaker.changed(change, time.monotonic()))
            self._has_shrunk = True
            stop.request()

    async def _end_work(self, stop: Stop) -> None:
        self._executor.stop_accepting()
        await asyncio.gather(self._heart.beat(), self._stop_pulling(), self._drain.run(stop))

    async def _stop_pulling(self) -> None:
        try:
            async with asyncio.timeout(STOP_PULLING_LIMIT_S):
                await self._consumer.stop()
        except TimeoutError:
            log.warning("pulls did not end within %g s", STOP_PULLING_LIMIT_S)

    def _on_attempt_ended(self, attempt: Attempt) -> None:
        self._consumer.settle(attempt)
        if self._watch is not None:
            self._watch.ended(attempt)
        self._refill_needed.set()

    def _on_pause(self) -> None:
        """React to the breaker opening or closing."""
        breaker = self._executor.breaker
        if breaker.is_open(time.monotonic()):
            self._executor.hand_back_waiting()
        self._report_readiness()
        if self._prober is not None:
            self._prober.opened.set()
        self._refill_needed.set()
        self._tasks.create_task(self._heart.beat(), name="heartbeat of a pause")

    async def _on_reconnected(self) -> None:
        self._consumer.forget_pulls()
        self._cards.publish_again()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended: ``wait_for`` of Python 3.11 loses a cancellation that races with the result."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=CANCEL_AGAIN_S)
