"""Admission control: bounds on waiting requests, the estimated wait, and each tenant's own bounds.

A refusal that depends on the workers is "contended" (429) if some are alive, and "no capacity" (503) if none is.
A model without workers is not an error: its requests wait, within a separate bound.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from db.accounts.principal import Principal
from db.accounts.teams import normalized
from gateway.admission.capacity import Backlog, Capacity, ModelCapacity
from gateway.admission.lanes import PeerLanes, candidate_lanes, choose_lane
from gateway.admission.registry import WorkerRegistry
from gateway.errors import Failure
from gateway.request.request import Admission, QueuePosition
from gateway.settings import GatewaySettings, TenantSettings
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.gateways import LaneInUse
from protocol.nats.bus import Bus


def interactive_position(ahead_in_lane: int, resuming: int, other_lanes: Iterable[int]) -> int:
    """Return the queue position of a job in a high lane; ``other_lanes``: the jobs in each of the others.

    Workers serve the resume lane first, then the high lanes round-robin: before a job is served, every other lane is
    served at most as often as the job's own.
    """
    return resuming + ahead_in_lane + sum([min(waiting, ahead_in_lane) for waiting in other_lanes]) + 1


def batch_position(ahead_in_lane: int, interactive: int) -> int:
    """Return the queue position of a job in the low lane, after all interactive jobs."""
    return interactive + ahead_in_lane + 1


def with_eta(position: int, capacity: ModelCapacity) -> QueuePosition:
    """Return a queue position with its estimated wait."""
    rate = capacity.jobs_per_s
    return QueuePosition(position, None if rate is None else position / rate)


# --- usage ------------------------------------------------------------------------------------------------------------
#
# Requests and jobs at this gateway, counted per queue and per tenant.


class ModelUsage:
    """Tokens and bytes of the jobs waiting in one queue."""

    __slots__ = ("_bytes", "_tokens")

    def __init__(self) -> None:
        self._tokens = [0, 0]  # interactive, batch
        self._bytes = [0, 0]

    def add(self, admission: Admission, job_bytes: int, sign: int) -> None:
        """Add (1) or remove (-1) a waiting request."""
        self._tokens[admission.batch] += sign * admission.prompt.tokens
        self._bytes[admission.batch] += sign * job_bytes

    def tokens(self, *, batch: bool) -> int:
        """Return the waiting prompt tokens: all of them for ``batch``, else only those of interactive requests."""
        return sum(self._tokens) if batch else self._tokens[0]

    def bytes(self, *, batch: bool) -> int:
        """Return the bytes of the waiting jobs, in the same way."""
        return sum(self._bytes) if batch else self._bytes[0]


class TenantUsage:
    """Counts of one tenant's requests."""

    __slots__ = ("_queued", "in_flight", "queued", "queued_bytes")

    def __init__(self) -> None:
        self.in_flight = 0
        self.queued = 0
        self.queued_bytes = 0
        self._queued: Counter[tuple[str, str]] = Counter()  # by queue and lane

    def enter(self, queue: str, lane: str, job_bytes: int) -> None:
        """Count an admitted request, which waits."""
        self.in_flight += 1
        self.enter_queue(queue, lane, job_bytes)

    def enter_queue(self, queue: str, lane: str, job_bytes: int) -> None:
        """Count an admitted request as waiting."""
        self.queued += 1
        self.queued_bytes += job_bytes
        self._queued[queue, lane] += 1

    def leave_queue(self, queue: str, lane: str, job_bytes: int) -> None:
        """Count a request as no longer waiting."""
        self.queued -= 1
        self.queued_bytes -= job_bytes
        self._queued[queue, lane] -= 1
        if not self._queued[queue, lane]:
            del self._queued[queue, lane]

    def uses(self, queue: str, lane: str) -> bool:
        """Return whether a job of the tenant waits in this lane of this queue."""
        return (queue, lane) in self._queued

    def lanes(self) -> Iterable[tuple[str, str]]:
        """Iterate over the (queue, lane) pairs in which the tenant's jobs wait."""
        return self._queued.keys()


# --- ticket -----------------------------------------------------------------------------------------------------------
#
# The ticket of an admitted request: its lane, its queue position, and the counts that it must release.


class Ticket:
    """One request's entry in the counts of admission control. Its methods are idempotent and may come in any order."""

    __slots__ = ("_control", "_is_open", "_waits", "admission", "job_bytes", "lane")

    def __init__(self, control: "AdmissionControl", admission: Admission, lane: str, job_bytes: int) -> None:
        self.admission = admission
        self.job_bytes = job_bytes
        self.lane = lane  # of the first attempt
        self._control = control
        self._waits = True
        self._is_open = True

    def queue_position(self) -> QueuePosition | None:
        """Return the queue position; None once the request no longer waits for its first worker."""
        return self._control.queue_position(self) if self._waits else None

    def accepted(self, worker_id: str) -> None:
        """Note that a worker has accepted the request."""
        self._control.taken(self, worker_id)
        self.leave_queue()

    def leave_queue(self) -> None:
        """Note that the request no longer waits for its first worker."""
        if self._waits:
            self._waits = False
            self._control.leave_queue(self)

    def enter_queue(self) -> None:
        """Note that the request waits again for its first worker, in the same lane as before."""
        if self._is_open and not self._waits:
            self._waits = True
            self._control.enter_queue(self)

    def close(self) -> None:
        """Note that the request has ended."""
        self.leave_queue()
        if self._is_open:
            self._is_open = False
            if self.admission.reservation is not None:
                self.admission.reservation.release_concurrency()
            self._control.leave(self)


# --- control ----------------------------------------------------------------------------------------------------------

POLL_PERIOD_S: Final = 0.5  # while jobs wait or have recently been admitted
IDLE_POLL_PERIOD_S: Final = 2.0
RECENT_S: Final = 5.0
MAX_RETRY_AFTER_S: Final = 60  # clients ignore longer ones
UNKNOWN_RETRY_AFTER_S: Final = 5

_DEFAULT_TENANT: Final = TenantSettings()


class AdmissionControl:
    """Admits requests and counts them. Run ``run`` as a supervised task."""

    def __init__(self, bus: Bus, settings: GatewaySettings, registry: WorkerRegistry) -> None:
        self.queues = settings.queues
        self._limits = settings.limits
        self._stream_bytes = settings.queue.max_mib * 1024 * 1024
        self._tenant_settings = {normalized(name): tenant for name, tenant in settings.tenants.items()}
        self._backlog = Backlog(bus, self.queues)
        self.capacity = Capacity(
            self.queues, [(name, model) for name, pool in settings.hosted.items() for model in pool.models]
        )
        self.hosted_has_room: Callable[[Admission], bool] = lambda _: False  # gateway.dispatch.overflow
        self._elsewhere = PeerLanes(bus, settings.gateway_id)
        self._registry = registry
        registry.on_beat = self.capacity.on_heartbeat
        self._models = {queue: ModelUsage() for queue in self.queues}
        self._tenants: dict[str, TenantUsage] = {}
        self._contended: set[str] = set()  # queues in which jobs waited at the last poll
        self._last_entry_s = float("-inf")

    async def run(self) -> None:
        """Poll the backlog, measure service rates and publish the lanes in use; never returns."""
        await self._elsewhere.start()
        last_s = time.monotonic()
        while True:
            await self._backlog.poll()
            await self._elsewhere.publish(self._lanes_in_use())
            now_s = time.monotonic()
            self._elsewhere.forget_old(now_s)
            self.capacity.keep(self._registry.alive, now_s)
            self._measure(now_s - last_s)
            last_s = now_s
            is_busy = bool(self._contended) or now_s - self._last_entry_s < RECENT_S
            await asyncio.sleep(POLL_PERIOD_S if is_busy else IDLE_POLL_PERIOD_S)

    def _measure(self, elapsed_s: float) -> None:
        for queue in self.queues:
            waits = self._backlog.total(queue) > 0
            contended = waits and queue in self._contended
            self.capacity.of(queue).measure(elapsed_s, contended=contended)
            (self._contended.add if waits else self._contended.discard)(queue)

    def _lanes_in_use(self) -> Iterator[LaneInUse]:
        for tenant, use in self._tenants.items():
            for queue, lane in use.lanes():
                yield LaneInUse(tenant, queue, lane)

    def waiting_jobs(self) -> Iterator[tuple[str, str, int]]:
        """Iterate over (queue, lane, jobs that wait for a worker), over all gateways."""
        for queue in self.queues:
            for lane in subjects.LANES:
                yield queue, lane, self._backlog.lane(queue, lane).waiting

    def waiting_by_lane(self, queue: str) -> dict[str, int]:
        """Return the number of jobs waiting in each lane of a queue, over all gateways."""
        return {lane: self._backlog.lane(queue, lane).waiting for lane in subjects.LANES}

    def jobs_per_s(self, queue: str) -> float | None:
        """Return the service rate of a queue in jobs/s; None while unknown."""
        return self.capacity.of(queue).jobs_per_s

    def oldest_waits_s(self) -> Iterator[tuple[str, float]]:
        """Iterate over queues with the wait in seconds of this gateway's oldest job without a worker."""
        now_s = time.monotonic()
        for queue in self.queues:
            yield queue, max(self._backlog.lane(queue, lane).oldest_wait_s(now_s) for lane in subjects.LANES)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def weight_of(self, principal: Principal) -> float:
        """Return the client's share of the workers relative to other tenants, by its key, team or the configuration."""
        if principal.weight is not None:
            return principal.weight
        return self._settings_of(principal.tenant, principal.key_name).weight

    def hosted_leaves(self, principal: Principal) -> tuple[str, ...] | None:
        """Return the configured ``allow_hosted`` of the client's tenant; None if not set."""
        return self._settings_of(principal.tenant, principal.key_name).allow_hosted

    def refusal(self, admission: Admission) -> Failure | None:
        """Return why this request cannot be admitted now, or None. From memory, a few microseconds."""
        refusal = self._in_flight_refusal(admission)
        if refusal is not None:
            return refusal
        capacity = self.capacity.of(admission.queue)
        interactive = self._backlog.interactive(admission.queue)
        waiting = interactive + (
            self._backlog.lane(admission.queue, subjects.LOW_LANE).waiting if admission.batch else 0
        )
        if capacity.free_sequences >= waiting + admission.prompt.sampling.n or self.hosted_has_room(admission):
            return None
        if admission.do_not_queue:
            message = "No worker has a free slot, and the request does not allow queuing."
            return self._refused(capacity, ErrorCode.NO_FREE_PLACE, message, admission)
        return (
            self._tenant_queue_refusal(admission)
            or self._busy_refusal(admission, capacity)
            or self._queue_refusal(admission, capacity, waiting)
        )

    def _in_flight_refusal(self, admission: Admission) -> Failure | None:
        use, settings = (
            self._tenants.get(admission.principal.tenant),
            self._settings_of(admission.principal.tenant, admission.principal.key_name),
        )
        in_flight = 0 if use is None else use.in_flight
        return _tenant_refusal(ErrorCode.TENANT_IN_FLIGHT, in_flight, settings.max_in_flight, "in flight")

    def _tenant_queue_refusal(self, admission: Admission) -> Failure | None:
        use, settings = (
            self._tenants.get(admission.principal.tenant),
            self._settings_of(admission.principal.tenant, admission.principal.key_name),
        )
        return _tenant_refusal(
            ErrorCode.TENANT_QUEUED, 0 if use is None else use.queued, settings.max_queued, "waiting"
        )

    def _busy_refusal(self, admission: Admission, capacity: ModelCapacity) -> Failure | None:
        """Refuse a request if all servers ask to wait longer than it may wait."""
        wait_s = None if capacity.workers else self.capacity.wait_s(admission.queue, admission.hosted)
        if wait_s is None or wait_s <= admission.arrival.queue_wait_s:
            return None
        message = f"The servers of this model ask to wait {wait_s:.0f} s, longer than the request may wait."
        return Failure(ErrorCode.WAIT_TOO_LONG, message, retry_after_s=math.ceil(wait_s))

    def _queue_refusal(self, admission: Admission, capacity: ModelCapacity, waiting: int) -> Failure | None:
        limits, use = self._limits, self._models[admission.queue]
        bound = limits.max_queued_requests
        if not capacity.workers and self.capacity.wait_s(admission.queue, admission.hosted) is None:
            bound = min(bound, limits.max_queued_without_workers)
        if waiting >= bound:
            message = f"{waiting} requests already wait for this model."
            return self._refused(capacity, ErrorCode.TOO_MANY_QUEUED, message, admission)
        # A prompt that exceeds the bound alone is admitted if none waits: otherwise it never could be.
        tokens = use.tokens(batch=admission.batch)
        if tokens and tokens + admission.prompt.tokens > limits.max_queued_prompt_tokens:
            message = f"{tokens} prompt tokens already wait for this model: too many to add {admission.prompt.tokens}."
            return self._refused(capacity, ErrorCode.TOO_MANY_QUEUED_TOKENS, message, admission)
        too_many_bytes = self._too_many_bytes(admission, use.bytes(batch=admission.batch))
        if too_many_bytes is not None:
            return self._refused(capacity, ErrorCode.TOO_MANY_QUEUED_BYTES, too_many_bytes, admission)
        rate = capacity.jobs_per_s
        if rate is None or (waiting + 1) / rate <= admission.arrival.queue_wait_s:
            return None  # even the last position is served in time
        eta_s = self._position_of_next(admission).eta_s
        if eta_s is not None and eta_s > admission.arrival.queue_wait_s:
            message = (
                f"The estimated wait is {eta_s:.0f} s; the request waits at most {admission.arrival.queue_wait_s:g} s."
            )
            return self._refused(capacity, ErrorCode.WAIT_TOO_LONG, message, admission)
        return None

    def _too_many_bytes(self, admission: Admission, of_model: int) -> str | None:
        """Return why a job's bytes exceed the bounds on waiting jobs, or None.

        All models, tenants and gateways share one stream. At this gateway no model may use more of it than is free, and
        no tenant more than its model may still add, so that the next one finds room. These are the dynamic thresholds
        of Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM
        Transactions on Networking 6(2), 1998), with a factor of 1: one model alone gets half, two get a third each;
        one tenant alone gets half of its model's share.
        """
        tenant = self._tenants.get(admission.principal.tenant)
        of_tenant = 0 if tenant is None else tenant.queued_bytes
        job_bytes = admission.job_bytes
        free = self._stream_bytes - self._backlog.waiting_bytes
        room = min(self._limits.max_queued_bytes - of_model, (free - of_model) // 2)  # at least as much stays free
        if of_model and job_bytes > room:
            return f"{of_model} bytes of jobs already wait for this model: too many to add {job_bytes}."
        if of_tenant and of_tenant + job_bytes > room:
            return f"{of_tenant} bytes of this key's or team's jobs already wait: its share of the queue is full."
        return None

    def _refused(self, capacity: ModelCapacity, code: ErrorCode, message: str, admission: Admission) -> Failure:
        wait_s = None if capacity.workers else self.capacity.wait_s(admission.queue, admission.hosted)
        if wait_s is not None:
            message, retry_after_s = f"The servers of this model ask to wait. {message}", math.ceil(wait_s)
        elif not capacity.workers:
            message = "The request does not allow queuing." if admission.do_not_queue else message
            code, message = ErrorCode.NO_WORKERS, f"No worker is alive. {message}"
            retry_after_s = UNKNOWN_RETRY_AFTER_S
        else:
            retry_after_s = self.retry_after_s(admission)
        return Failure(code, message, retry_after_s=retry_after_s, is_wanted=admission.do_not_queue)

    def retry_after_s(self, admission: Admission) -> int:
        """Return the estimated time until such a request could run, in whole seconds from 1 to 60."""
        eta_s = self._position_of_next(admission).eta_s
        return UNKNOWN_RETRY_AFTER_S if eta_s is None else max(1, min(MAX_RETRY_AFTER_S, math.ceil(eta_s)))

    def _settings_of(self, tenant: str, key_name: str) -> TenantSettings:
        settings = self._tenant_settings.get(tenant)
        return settings or self._tenant_settings.get(key_name, _DEFAULT_TENANT)

    def has_workers(self, queue: str) -> bool:
        """Return whether a worker that serves the queue is alive, not counting hosted ones."""
        return self.capacity.of(queue).workers > 0

    def has_room(self, admission: Admission) -> bool:
        """Return whether our own workers have free sequences for an interactive request and all waiting ones."""
        waiting = self._backlog.interactive(admission.queue)
        return self.capacity.of(admission.queue).free_sequences >= waiting + admission.prompt.sampling.n

    def would_wait(self, admission: Admission, limit_s: float) -> bool:
        """Return whether a new interactive request is expected to wait longer than ``limit_s`` for a worker."""
        if not self.has_workers(admission.queue):
            return True
        eta_s = None if self.has_room(admission) else self._position_of_next(admission).eta_s
        return eta_s is not None and eta_s > limit_s

    # --- lanes and queue positions ------------------------------------------------------------------------------------

    def _lane_of_next(self, admission: Admission) -> str:
        if admission.batch:
            return subjects.LOW_LANE
        candidates = candidate_lanes(admission.principal.tenant)
        current = self._lane_in_use(admission, candidates)
        first, second = (self._backlog.lane(admission.queue, lane).waiting for lane in candidates)
        return choose_lane(candidates, (first, second), current)

    def _lane_in_use(self, admission: Admission, candidates: tuple[str, str]) -> str | None:
        """Return the lane in which the tenant's jobs wait at any gateway; all gateways use the same order."""
        tenant, queue, use = admission.principal.tenant, admission.queue, self._tenants.get(admission.principal.tenant)
        for lane in candidates:
            if (use is not None and use.uses(queue, lane)) or self._elsewhere.use(tenant, queue, lane):
                return lane
        return None

    def _position_of_next(self, admission: Admission) -> QueuePosition:
        lane = self._lane_of_next(admission)
        return self._position(admission.queue, lane, self._backlog.lane(admission.queue, lane).waiting)

    def _position(self, queue: str, lane: str, ahead: int) -> QueuePosition:
        backlog = self._backlog
        if lane == subjects.LOW_LANE:
            position = batch_position(ahead, backlog.interactive(queue))
        else:
            resuming = backlog.lane(queue, subjects.RESUME_LANE).waiting
            others = [backlog.lane(queue, other).waiting for other in subjects.HIGH_LANES if other != lane]
            position = interactive_position(ahead, resuming, others)
        return with_eta(position, self.capacity.of(queue))

    # --- admitted requests --------------------------------------------------------------------------------------------

    def enter(self, admission: Admission) -> Ticket:
        """Count an admitted request and choose its lane."""
        self._last_entry_s = admission.admitted_s
        lane = self._lane_of_next(admission)
        self._backlog.lane(admission.queue, lane).enter(admission.request_id, admission.admitted_s)
        job_bytes = admission.job_bytes
        self._backlog.add_bytes(job_bytes)
        self._models[admission.queue].add(admission, job_bytes, 1)
        use = self._tenants.get(admission.principal.tenant)
        if use is None:
            use = self._tenants[admission.principal.tenant] = TenantUsage()
        use.enter(admission.queue, lane, job_bytes)
        return Ticket(self, admission, lane, job_bytes)

    def enter_queue(self, ticket: Ticket) -> None:
        """Count a request that waits again after a hosted pool did not take it."""
        admission = ticket.admission
        self._backlog.lane(admission.queue, ticket.lane).enter(admission.request_id, time.monotonic())
        self._backlog.add_bytes(ticket.job_bytes)
        self._models[admission.queue].add(admission, ticket.job_bytes, 1)
        self._tenants[admission.principal.tenant].enter_queue(admission.queue, ticket.lane, ticket.job_bytes)

    def queue_position(self, ticket: Ticket) -> QueuePosition:
        """Return the queue position of a waiting request, or None."""
        admission = ticket.admission
        backlog = self._backlog.lane(admission.queue, ticket.lane)
        return self._position(admission.queue, ticket.lane, backlog.ahead_of(admission.request_id, time.monotonic()))

    def leave_queue(self, ticket: Ticket) -> None:
        """Count a request as no longer waiting for its first worker."""
        admission = ticket.admission
        self._backlog.lane(admission.queue, ticket.lane).leave(admission.request_id)
        self._backlog.add_bytes(-ticket.job_bytes)
        self._models[admission.queue].add(admission, ticket.job_bytes, -1)
        self._tenants[admission.principal.tenant].leave_queue(admission.queue, ticket.lane, ticket.job_bytes)

    def taken(self, ticket: Ticket, worker_id: str) -> None:
        """Count a request that a worker has accepted."""
        self.capacity.took(worker_id, ticket.admission.prompt.sampling.n)

    def leave(self, ticket: Ticket) -> None:
        """Remove an ended request from the counts."""
        use = self._tenants[ticket.admission.principal.tenant]
        use.in_flight -= 1
        if not use.in_flight:
            del self._tenants[ticket.admission.principal.tenant]


def _tenant_refusal(code: ErrorCode, requests: int, limit: int | None, where: str) -> Failure | None:
    if limit is None or requests < limit:
        return None
    message = f"This key may have {limit} requests {where} at a time."
    return Failure(code, message, retry_after_s=UNKNOWN_RETRY_AFTER_S)
