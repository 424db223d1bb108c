"""Overflow: moves requests to hosted pools while own workers cannot take them soon.

    a new attempt ──────────────choose──> hosted lane of one pool, if the wait would be too long
    waits in its own lane ───────move───> there, as another attempt, after ``overflow_after_s``
    not accepted there in time <─move──── back to its own lane, as another attempt

A move is a new attempt, because a worker may be accepting the current one at this moment: the fence admits only one of
them. While own workers have room, no hosted pool is chosen, so later requests go to own workers again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Final

from gateway.admission.control import AdmissionControl
from gateway.admission.registry import WorkerRegistry
from gateway.dispatch.hosted import HostedDemand, HostedPool, HostedPools, HostedSlot, Offer
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.revisions import ServingWorker
from gateway.request.request import Admission
from gateway.settings import GatewaySettings
from protocol import subjects
from protocol.job import TAKES_MESSAGES, Frame

TAKEN_LIMIT_S: Final = 1.5  # for a hosted worker with room to accept a job
# Time to live of a job in a hosted lane. A worker that pulls it later must not send it to the hosted provider.
JOB_LIMIT_S: Final = TAKEN_LIMIT_S + 0.5
LINGER_S: Final = (
    JOB_LIMIT_S + 2.0
)  # how long the money of a withdrawn attempt stays reserved, in case a worker accepted it
FREE_PLACES_GRACE_S: Final = 1.0  # how long a request waits for free own slots that do not take it

Spawn = Callable[[Coroutine[Any, Any, None]], None]
Allowed = Callable[[Admission], tuple[str, ...]]  # returns the providers that a request may still use


class Overflow:
    """Decides from memory; only a reservation of a pool's cap waits."""

    def __init__(
        self,
        pools: HostedPools,
        control: AdmissionControl,
        registry: WorkerRegistry,
        settings: GatewaySettings,
        allowed: Allowed,
    ) -> None:
        """``allowed``: called before each move, because the policy may have changed."""
        self._pools = pools
        self._control = control
        self._registry = registry
        self._after_s = settings.timeouts.overflow_after_s
        self._only_hosted = settings.only_hosted
        self._allowed = allowed
        self._moving: set[str] = set()  # requests that wait for a reservation
        self._lingering: dict[tuple[str, int], HostedSlot] = {}  # by request and attempt
        control.hosted_has_room = self._has_room

    def _stays(self, admission: Admission) -> bool:
        """Return whether a request always waits for own workers, as batch jobs do."""
        return not admission.hosted or (admission.batch and admission.model not in self._only_hosted)

    def _has_room(self, admission: Admission) -> bool:
        if self._stays(admission):
            return False
        completion_tokens = admission.prompt.sampling.max_tokens * admission.prompt.sampling.n

        def reads(pool: HostedPool) -> bool:
            takers = self._takers(pool, admission.model)
            return any(server.takes != TAKES_MESSAGES or admission.prompt.conversation is not None for server in takers)

        wanted = _wanted(admission, admission.hosted, completion_tokens)
        return not isinstance(self._pools.offer(wanted, (), reads), str)

    # --- to a hosted pool ---------------------------------------------------------------------------------------------

    async def choose(self, request: OpenRequest) -> None:
        """Find a hosted pool for the current attempt before it is published, if own workers are full."""
        admission, current = request.admission, request.current
        if self._stays(admission) or current.hosted is not None or current.is_back:
            return
        if not self._control.would_wait(admission, 0.0 if admission.do_not_queue else self._after_s):
            return
        offer = self._offer(request)
        slot = None if offer is None else await self._pools.take(offer, admission.prompt.sampling.n)
        if slot is None:
            return
        if request.current is current and request.waits_for_worker(current.number):
            request.reserve_hosted_slot(slot)
        else:
            slot.refund()

    def look(self, requests: Iterable[OpenRequest], now_s: float, spawn: Spawn) -> None:
        """Move requests that have waited too long."""
        for request in requests:
            if request.state is not State.QUEUED or self._stays(request.admission):
                continue
            slot = request.current.hosted
            if slot is not None:
                if now_s - slot.made_s >= TAKEN_LIMIT_S:
                    slot.pool.pause(now_s)
                    request.move(request.attempt, None, now_s)
            elif request.request_id not in self._moving and self._has_waited(request, now_s):
                offer = self._offer(request)
                if offer is not None:
                    self._moving.add(request.request_id)
                    offer.pool.promised += request.admission.prompt.sampling.n  # already, for the next request's offer
                    spawn(self._move(request, offer))

    def _has_waited(self, request: OpenRequest, now_s: float) -> bool:
        admission = request.admission
        waited_s = now_s - request.current.queued_s
        if not self._control.has_workers(admission.queue):
            return not request.current.is_back or waited_s >= TAKEN_LIMIT_S
        if waited_s < self._after_s:
            return False
        return waited_s >= self._after_s + FREE_PLACES_GRACE_S or not self._control.has_room(admission)

    async def _move(self, request: OpenRequest, offer: Offer) -> None:
        attempt = request.attempt
        offer.pool.promised -= request.admission.prompt.sampling.n
        try:
            slot = await self._pools.take(offer, request.admission.prompt.sampling.n)
        finally:
            self._moving.discard(request.request_id)
        if slot is None:
            return
        if request.waits_for_worker(attempt):
            request.move(attempt, slot, time.monotonic())
        else:
            slot.refund()

    def _offer(self, request: OpenRequest) -> Offer | None:
        """Return a pool that can take the rest of a request, or None after noting the reason."""
        admission, held = request.admission, request.choices.held_tokens()
        left = max(0, admission.prompt.sampling.max_tokens * admission.prompt.sampling.n - held)
        wanted = _wanted(admission, self._allowed(admission), left, held)
        failed = request.log.hosted_failed
        offer = self._pools.offer(wanted, failed, lambda pool: self._fits(request, pool))
        if isinstance(offer, str) and failed and admission.model in self._only_hosted:  # there is no other worker
            offer = self._pools.offer(wanted, (), lambda pool: self._fits(request, pool))
        if isinstance(offer, str):
            request.wait_for_own_workers(offer)
            return None
        return offer

    def _fits(self, request: OpenRequest, pool: HostedPool) -> bool:
        """Return whether a worker of the pool can read the prompt and continue the held output."""
        return any(server.may_take(request) for server in self._takers(pool, request.admission.model))

    def _takers(self, pool: HostedPool, model: str) -> Iterator[ServingWorker]:
        """Return the pool's live workers that serve a model."""
        for beat in self._registry.live_beats(time.monotonic()):
            if beat.tier == subjects.HOSTED_TIER and beat.pool == pool.name and model in beat.models:
                yield ServingWorker.of(beat, model)

    # --- cost ---------------------------------------------------------------------------------------------------------

    def left(self, request: OpenRequest) -> None:
        """Settle the hosted slot of the current attempt, which has ended."""
        slot, current = request.current.hosted, request.current
        if slot is None:
            return
        if current.accepted is not None:
            slot.settle()
            return
        slot.release_capacity()
        key = (request.request_id, current.number)
        self._lingering[key] = slot
        asyncio.get_running_loop().call_later(LINGER_S, self._refund, key)

    def _refund(self, key: tuple[str, int]) -> None:
        slot = self._lingering.pop(key, None)
        if slot is not None:
            slot.refund()

    def on_unowned_frame(self, frame: Frame) -> None:
        """Charge an unowned attempt if it ran at a hosted pool."""
        slot = self._lingering.pop((frame.request_id, frame.attempt), None)
        if slot is not None:
            slot.settle()


def _wanted(
    admission: Admission, providers: tuple[str, ...], completion_tokens: int, held_tokens: int = 0
) -> HostedDemand:
    # Each choice is a separate call to the hosted API, which reads the prompt and the held output each time.
    prompts = admission.prompt.sampling.n if admission.prompt.pooling is None else 1
    return HostedDemand(
        admission.model,
        providers,
        admission.prompt.tokens * prompts + held_tokens,
        completion_tokens,
        admission.prompt.sampling.n,
        admission.arrival.received_unix_ms,
    )
