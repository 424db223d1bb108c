"""Admission: bounds on what waits, the estimated wait, and each tenant's own bounds.

Every refusal that follows from the state of the workers is "contended" (429) where some are alive and "no capacity"
(503) where none is. A model without workers is not an error: its requests wait, within a bound of their own.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Final

from db.accounts.principal import Principal
from db.accounts.teams import normalized
from gateway.admission.backlog import Backlog
from gateway.admission.capacity import Capacity, ModelCapacity
from gateway.admission.estimate import batch_position, interactive_position, place_of
from gateway.admission.peer_lanes import PeerLanes
from gateway.admission.registry import WorkerRegistry
from gateway.admission.shards import candidate_lanes, choose_lane
from gateway.admission.ticket import Ticket
from gateway.admission.usage import ModelUsage, TenantUsage
from gateway.request.admission import Admission
from gateway.request.mailbox import Failure
from gateway.request.queue_position import QueuePosition
from gateway.settings import GatewaySettings, TenantSettings
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.gateways import LaneInUse
from protocol.nats.bus import Bus

POLL_PERIOD_S: Final = 0.5  # while something waits or has lately come
IDLE_POLL_PERIOD_S: Final = 2.0
RECENT_S: Final = 5.0
MAX_RETRY_AFTER_S: Final = 60  # clients ignore longer ones
UNKNOWN_RETRY_AFTER_S: Final = 5

_NOBODY_IN_PARTICULAR: Final = TenantSettings()


class AdmissionControl:
    """Admits requests and keeps count of them. Run ``run`` as a supervised task."""

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
        self._contended: set[str] = set()  # queues in which jobs waited at the last look
        self._last_entry_s = float("-inf")

    async def run(self) -> None:
        """Ask for the backlog, measure the rates of service, share the lanes in use; never returns."""
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
        """Iterate over (queue, lane, jobs that wait for a worker), of all gateways."""
        for queue in self.queues:
            for lane in subjects.LANES:
                yield queue, lane, self._backlog.lane(queue, lane).waiting

    def waiting_by_lane(self, queue: str) -> dict[str, int]:
        """Jobs that wait in each lane of a queue, over all gateways."""
        return {lane: self._backlog.lane(queue, lane).waiting for lane in subjects.LANES}

    def jobs_per_s(self, queue: str) -> float | None:
        """Return how fast a queue is served, in jobs/s; None while that is unknown."""
        return self.capacity.of(queue).jobs_per_s

    def oldest_waits_s(self) -> Iterator[tuple[str, float]]:
        """Iterate over queues with the wait in seconds of this gateway's oldest job without a worker."""
        now_s = time.monotonic()
        for queue in self.queues:
            yield queue, max(self._backlog.lane(queue, lane).oldest_wait_s(now_s) for lane in subjects.LANES)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def weight_of(self, principal: Principal) -> float:
        """The caller's share of the workers, against other tenants': by his key, his team, or the configuration."""
        if principal.weight is not None:
            return principal.weight
        return self._settings_of(principal.tenant, principal.key_name).weight

    def hosted_leaves(self, principal: Principal) -> tuple[str, ...] | None:
        """Return the configuration's ``allow_hosted`` of the client's tenant; None: not set."""
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
        if capacity.free_sequences >= waiting + admission.sampling.n or self.hosted_has_room(admission):
            return None
        if admission.do_not_queue:
            message = "no worker has a free place, and the request is not to be queued"
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
        """Return why a request cannot be admitted whose servers all ask to wait, or None."""
        wait_s = None if capacity.workers else self.capacity.wait_s(admission.queue, admission.hosted)
        if wait_s is None or wait_s <= admission.queue_wait_s:
            return None
        message = f"the servers of this model ask to wait for {wait_s:.0f} s, longer than the request may wait"
        return Failure(ErrorCode.WAIT_TOO_LONG, message, retry_after_s=math.ceil(wait_s))

    def _queue_refusal(self, admission: Admission, capacity: ModelCapacity, waiting: int) -> Failure | None:
        limits, use = self._limits, self._models[admission.queue]
        most = limits.max_queued_requests
        if not capacity.workers and self.capacity.wait_s(admission.queue, admission.hosted) is None:
            most = min(most, limits.max_queued_without_workers)
        if waiting >= most:
            message = f"{waiting} requests wait for this model already"
            return self._refused(capacity, ErrorCode.TOO_MANY_QUEUED, message, admission)
        # A prompt beyond the bound by itself is let in when none waits: it would never be, otherwise.
        tokens = use.tokens(batch=admission.batch)
        if tokens and tokens + admission.prompt_tokens > limits.max_queued_prompt_tokens:
            message = f"{tokens} prompt tokens wait for this model already, too many to add {admission.prompt_tokens}"
            return self._refused(capacity, ErrorCode.TOO_MANY_QUEUED_TOKENS, message, admission)
        too_many_bytes = self._too_many_bytes(admission, use.bytes(batch=admission.batch))
        if too_many_bytes is not None:
            return self._refused(capacity, ErrorCode.TOO_MANY_QUEUED_BYTES, too_many_bytes, admission)
        rate = capacity.jobs_per_s
        if rate is None or (waiting + 1) / rate <= admission.queue_wait_s:
            return None  # nobody's place is later than the last
        eta_s = self._place_of_next(admission).eta_s
        if eta_s is not None and eta_s > admission.queue_wait_s:
            message = f"the estimated wait is {eta_s:.0f} s, and the caller waits for {admission.queue_wait_s:g} s"
            return self._refused(capacity, ErrorCode.WAIT_TOO_LONG, message, admission)
        return None

    def _too_many_bytes(self, admission: Admission, of_model: int) -> str | None:
        """Return why a job has too many bytes to wait with the others, or None.

        The stream is one for all models, tenants and gateways. No model may hold more of it here than is free, and no
        tenant more than its model may still add: so whoever comes next finds room. These are the dynamic thresholds of
        Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM Transactions
        on Networking 6(2), 1998), with a factor of 1: a model that is alone gets half, two get a third each; a tenant
        that is alone gets half of its model's part.
        """
        tenant = self._tenants.get(admission.principal.tenant)
        of_tenant = 0 if tenant is None else tenant.queued_bytes
        job_bytes = admission.job_bytes
        free = self._stream_bytes - self._backlog.waiting_bytes
        room = min(self._limits.max_queued_bytes - of_model, (free - of_model) // 2)  # after it, as much is free
        if of_model and job_bytes > room:
            return f"{of_model} bytes of jobs wait for this model already, too many to add {job_bytes}"
        if of_tenant and of_tenant + job_bytes > room:
            return f"{of_tenant} bytes of this key's or team's jobs wait already, as many as are left for all others"
        return None

    def _refused(self, capacity: ModelCapacity, code: ErrorCode, message: str, admission: Admission) -> Failure:
        wait_s = None if capacity.workers else self.capacity.wait_s(admission.queue, admission.hosted)
        if wait_s is not None:
            message, retry_after_s = f"the servers of this model ask to wait, and {message}", math.ceil(wait_s)
        elif not capacity.workers:
            message = "the request is not to be queued" if admission.do_not_queue else message
            code, message = ErrorCode.NO_WORKERS, f"no worker is alive, and {message}"
            retry_after_s = UNKNOWN_RETRY_AFTER_S
        else:
            retry_after_s = self.retry_after_s(admission)
        return Failure(code, message, retry_after_s=retry_after_s, is_wanted=admission.do_not_queue)

    def retry_after_s(self, admission: Admission) -> int:
        """Return when a slot may be free for such a request, in whole seconds from 1 to 60."""
        eta_s = self._place_of_next(admission).eta_s
        return UNKNOWN_RETRY_AFTER_S if eta_s is None else max(1, min(MAX_RETRY_AFTER_S, math.ceil(eta_s)))

    def _settings_of(self, tenant: str, key_name: str) -> TenantSettings:
        settings = self._tenant_settings.get(tenant)
        return settings or self._tenant_settings.get(key_name, _NOBODY_IN_PARTICULAR)

    def has_workers(self, queue: str) -> bool:
        """Return whether a worker that serves a queue is alive, hosted ones aside."""
        return self.capacity.of(queue).workers > 0

    def has_room(self, admission: Admission) -> bool:
        """Return whether our workers have free sequences for an interactive request and all that wait already."""
        waiting = self._backlog.interactive(admission.queue)
        return self.capacity.of(admission.queue).free_sequences >= waiting + admission.sampling.n

    def would_wait(self, admission: Admission, limit_s: float) -> bool:
        """Return whether a new interactive request would wait longer for a worker, as far as that is known."""
        if not self.has_workers(admission.queue):
            return True
        eta_s = None if self.has_room(admission) else self._place_of_next(admission).eta_s
        return eta_s is not None and eta_s > limit_s

    # --- lanes and places ---------------------------------------------------------------------------------------------

    def _lane_of_next(self, admission: Admission) -> str:
        if admission.batch:
            return subjects.LOW_LANE
        candidates = candidate_lanes(admission.principal.tenant)
        current = self._lane_in_use(admission, candidates)
        first, second = (self._backlog.lane(admission.queue, lane).waiting for lane in candidates)
        return choose_lane(candidates, (first, second), current)

    def _lane_in_use(self, admission: Admission, candidates: tuple[str, str]) -> str | None:
        """Return the lane in which the tenant's jobs wait, here or elsewhere; all gateways use the same order."""
        tenant, queue, use = admission.principal.tenant, admission.queue, self._tenants.get(admission.principal.tenant)
        for lane in candidates:
            if (use is not None and use.uses(queue, lane)) or self._elsewhere.use(tenant, queue, lane):
                return lane
        return None

    def _place_of_next(self, admission: Admission) -> QueuePosition:
        lane = self._lane_of_next(admission)
        return self._place(admission.queue, lane, self._backlog.lane(admission.queue, lane).waiting)

    def _place(self, queue: str, lane: str, ahead: int) -> QueuePosition:
        backlog = self._backlog
        if lane == subjects.LOW_LANE:
            position = batch_position(ahead, backlog.interactive(queue))
        else:
            resuming = backlog.lane(queue, subjects.RESUME_LANE).waiting
            others = [backlog.lane(queue, other).waiting for other in subjects.HIGH_LANES if other != lane]
            position = interactive_position(ahead, resuming, others)
        return place_of(position, self.capacity.of(queue))

    # --- those admitted -----------------------------------------------------------------------------------------------

    def enter(self, admission: Admission) -> Ticket:
        """Count a request in and choose its lane."""
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
        """A request waits again, after it has been at a hosted pool in vain."""
        admission = ticket.admission
        self._backlog.lane(admission.queue, ticket.lane).enter(admission.request_id, time.monotonic())
        self._backlog.add_bytes(ticket.job_bytes)
        self._models[admission.queue].add(admission, ticket.job_bytes, 1)
        self._tenants[admission.principal.tenant].enter_queue(admission.queue, ticket.lane, ticket.job_bytes)

    def place(self, ticket: Ticket) -> QueuePosition:
        """Return the queue position of a waiting request."""
        admission = ticket.admission
        backlog = self._backlog.lane(admission.queue, ticket.lane)
        return self._place(admission.queue, ticket.lane, backlog.ahead_of(admission.request_id, time.monotonic()))

    def leave_queue(self, ticket: Ticket) -> None:
        """A request no longer waits for its first worker."""
        admission = ticket.admission
        self._backlog.lane(admission.queue, ticket.lane).leave(admission.request_id)
        self._backlog.add_bytes(-ticket.job_bytes)
        self._models[admission.queue].add(admission, ticket.job_bytes, -1)
        self._tenants[admission.principal.tenant].leave_queue(admission.queue, ticket.lane, ticket.job_bytes)

    def taken(self, ticket: Ticket, worker_id: str) -> None:
        """A worker has accepted the request."""
        self.capacity.took(worker_id, ticket.admission.sampling.n)

    def leave(self, ticket: Ticket) -> None:
        """A request has ended."""
        use = self._tenants[ticket.admission.principal.tenant]
        use.in_flight -= 1
        if not use.in_flight:
            del self._tenants[ticket.admission.principal.tenant]


def _tenant_refusal(code: ErrorCode, requests: int, most: int | None, where: str) -> Failure | None:
    if most is None or requests < most:
        return None
    message = f"this key may have {most} requests {where} at a time"
    return Failure(code, message, retry_after_s=UNKNOWN_RETRY_AFTER_S)
