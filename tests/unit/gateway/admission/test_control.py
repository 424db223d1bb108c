from typing import Any

import pytest

from gateway.admission.control import AdmissionControl
from gateway.errors import Failure
from protocol.errors import ErrorCode
from protocol.generation import Grammar
from protocol.job import Heartbeat, Paused, Sampling
from tests.unit.gateway.admission.controls import admission, beat, control


def fill(gate: AdmissionControl, jobs: int, **rest: Any) -> None:
    for number in range(jobs):
        gate.enter(admission(f"{rest}{number}", **rest))


def serve(gate: AdmissionControl, jobs_per_s: int) -> None:
    """Add one fully used worker with a known service rate."""
    gate.capacity.on_heartbeat(beat(running=1, jobs_taken=1))
    gate.capacity.on_heartbeat(beat(running=1, jobs_taken=1 + 10 * jobs_per_s))
    gate.capacity.of("m").measure(10.0, contended=True)


def refused(gate: AdmissionControl, **rest: Any) -> Failure:
    failure = gate.refusal(admission("next", **rest))
    assert failure is not None
    assert failure.retry_after_s is not None
    assert 1 <= failure.retry_after_s <= 60
    return failure


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_queued_requests": 3}, ErrorCode.TOO_MANY_QUEUED),
        ({"max_queued_prompt_tokens": 35}, ErrorCode.TOO_MANY_QUEUED_TOKENS),
        ({"max_queued_bytes": 4 * admission().job_bytes - 1}, ErrorCode.TOO_MANY_QUEUED_BYTES),
    ],
)
def test_bounds_on_waiting_requests(limits: dict[str, int], code: ErrorCode) -> None:
    gate = control(limits=limits)
    gate.capacity.on_heartbeat(beat(running=1))
    tickets = [gate.enter(admission(f"{n}", tokens=10, tenant=f"t{n}")) for n in range(3)]
    assert refused(gate, tokens=10).code is code
    tickets[0].accepted("w")
    assert gate.refusal(admission("next", tokens=10)) is None
    for ticket in tickets:
        ticket.close()
        ticket.close()
    assert gate.refusal(admission("next", tokens=10)) is None


def test_a_prompt_larger_than_the_bound_is_admitted_if_none_waits() -> None:
    gate = control(limits={"max_queued_prompt_tokens": 5})
    gate.enter(admission("first", tokens=10)).close()
    ticket = gate.enter(admission("second", tokens=10))
    assert refused(gate, tokens=1).code is ErrorCode.NO_WORKERS
    ticket.close()
    assert gate.refusal(admission("third", tokens=10)) is None


def test_without_workers_requests_wait_within_a_separate_bound() -> None:
    gate = control(limits={"max_queued_without_workers": 3})
    fill(gate, 2)
    assert gate.refusal(admission("next")) is None
    fill(gate, 1, tenant="other")
    assert refused(gate).code is ErrorCode.NO_WORKERS
    gate.capacity.on_heartbeat(beat())
    assert gate.refusal(admission("next")) is None


def test_bounds_do_not_apply_while_slots_are_free() -> None:
    gate = control(limits={"max_queued_requests": 1})
    gate.capacity.on_heartbeat(beat(free=3))
    fill(gate, 2)
    assert gate.refusal(admission("next")) is None
    assert refused(gate, sampling=Sampling(max_tokens=1, n=2)).code is ErrorCode.TOO_MANY_QUEUED


def test_batch_requests_do_not_block_interactive_ones() -> None:
    gate = control(limits={"max_queued_requests": 3, "max_queued_prompt_tokens": 3})
    gate.capacity.on_heartbeat(beat())
    fill(gate, 3, batch=True)
    assert refused(gate, batch=True).code is ErrorCode.TOO_MANY_QUEUED
    fill(gate, 2)
    assert gate.refusal(admission("next")) is None
    fill(gate, 1, tenant="other")
    assert refused(gate).code is ErrorCode.TOO_MANY_QUEUED


def test_a_request_is_refused_if_the_estimated_wait_exceeds_its_limit() -> None:
    gate = control()
    gate.capacity.on_heartbeat(beat())
    fill(gate, 40)
    assert gate.refusal(admission("next", queue_wait_s=0.1)) is None  # the rate is unknown
    serve(gate, jobs_per_s=2)
    assert gate.refusal(admission("next", queue_wait_s=25.0)) is None
    failure = refused(gate, queue_wait_s=15.0)
    assert failure.code is ErrorCode.WAIT_TOO_LONG
    assert "20 s" in failure.message
    assert failure.retry_after_s == 21  # the 41st job at two per second
    assert gate.refusal(admission("next", queue_wait_s=15.0, tenant="light")) is None  # another lane


def test_retry_after_is_never_more_than_a_minute() -> None:
    gate = control(limits={"max_queued_requests": 200})
    serve(gate, jobs_per_s=1)
    fill(gate, 200)
    assert refused(gate).retry_after_s == 60


def test_callers_that_will_not_wait() -> None:
    gate = control()
    no_workers = refused(gate, do_not_queue=True)
    assert no_workers.code is ErrorCode.NO_WORKERS
    assert no_workers.message == "No worker is alive. The request does not allow queuing."
    gate.capacity.on_heartbeat(beat(free=1))
    assert gate.refusal(admission("next", do_not_queue=True)) is None
    ticket = gate.enter(admission("first"))
    assert refused(gate, do_not_queue=True).code is ErrorCode.NO_FREE_PLACE
    ticket.accepted("w")  # its slot is used, as the next heartbeat will report
    assert refused(gate, do_not_queue=True).code is ErrorCode.NO_FREE_PLACE


PAUSED: dict[str, tuple[list[Heartbeat], ErrorCode, int]] = {
    # live workers · the code of a request that does not allow queuing · its Retry-After
    "no worker": ([], ErrorCode.NO_WORKERS, 5),
    "one that waits": ([beat(free=4, paused=Paused("429", 19_001))], ErrorCode.NO_FREE_PLACE, 20),
    "the first of two": (
        [beat(paused=Paused("429", 30_000)), beat("b", paused=Paused("503", 10))], ErrorCode.NO_FREE_PLACE, 1,
    ),
    "one that is broken": ([beat(free=4, paused=Paused("401"))], ErrorCode.NO_WORKERS, 5),
    "one that leaves": ([beat(draining=True, paused=Paused("429", 9000))], ErrorCode.NO_WORKERS, 5),
    "one that is full, one that waits": ([beat(), beat("b", paused=Paused("429", 9000))], ErrorCode.NO_FREE_PLACE, 5),
    "one that waits, one that is broken": (
        [beat(paused=Paused("429", 9000)), beat("b", paused=Paused("401"))], ErrorCode.NO_WORKERS, 5,
    ),
    "one that waits, a hosted pool that is full": (
        [beat(paused=Paused("429", 9000)), beat("b", tier="hosted", provider="openai")], ErrorCode.NO_WORKERS, 5,
    ),
    "one of another model": ([beat(models=("x",), paused=Paused("429", 9000))], ErrorCode.NO_WORKERS, 5),
    "a hosted pool": (
        [beat(tier="hosted", provider="openai", paused=Paused("429", 9000))], ErrorCode.NO_FREE_PLACE, 9,
    ),
    "a hosted pool of another provider": (
        [beat(tier="hosted", provider="other", paused=Paused("429", 9000))], ErrorCode.NO_WORKERS, 5,
    ),
    "one that waited and serves": (
        [beat(paused=Paused("429", 9000)), beat(free=0)], ErrorCode.NO_FREE_PLACE, 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAUSED)
def test_paused_servers_are_not_missing_workers(case: str) -> None:
    beats, code, retry_after_s = PAUSED[case]
    gate = control(limits={"max_queued_without_workers": 1})
    for one in beats:
        gate.capacity.on_heartbeat(one)
    failure = refused(gate, do_not_queue=True, hosted=("openai",))
    assert (failure.code, failure.retry_after_s) == (code, retry_after_s)
    impatient = gate.refusal(admission("next", queue_wait_s=0.5, hosted=("openai",)))
    waits_longer = retry_after_s in {9, 20}
    assert (impatient and impatient.code) == (ErrorCode.WAIT_TOO_LONG if waits_longer else None)
    fill(gate, 2, tenant="other")
    has_workers = code is not ErrorCode.NO_WORKERS
    assert (gate.refusal(admission("next", hosted=("openai",))) is None) == has_workers
    gate.capacity.keep(lambda _worker, _now_s: False, 0.0)  # all are dead
    assert refused(gate, do_not_queue=True, hosted=("openai",)).code is ErrorCode.NO_WORKERS


def test_bounds_and_weights_of_tenants() -> None:
    gate = control(tenants={"shop": {"weight": 3, "max_in_flight": 2, "max_queued": 1}})
    ticket = gate.enter(admission("1", key_name="shop"))
    assert refused(gate, key_name="shop").code is ErrorCode.TENANT_QUEUED
    ticket.accepted("w")
    second = gate.enter(admission("2", key_name="shop"))
    assert refused(gate, key_name="shop").code is ErrorCode.TENANT_IN_FLIGHT
    second.close()
    assert gate.refusal(admission("3", key_name="shop")) is None
    ticket.close()
    assert gate._tenants == {}


def test_a_tenants_queue_bound_does_not_apply_while_a_slot_is_free() -> None:
    gate = control(tenants={"shop": {"max_queued": 1}})
    gate.capacity.on_heartbeat(beat(free=2))
    gate.enter(admission("1", key_name="shop"))  # being published
    assert gate.refusal(admission("2", key_name="shop")) is None
    gate.enter(admission("2", key_name="shop"))
    assert refused(gate, key_name="shop").code is ErrorCode.TENANT_QUEUED


def test_queue_positions_in_fair_lanes() -> None:
    """Before a job is served, no other lane is served more often than its own."""
    gate = control()
    fill(gate, 10, tenant="heavy")
    light = gate.enter(admission("light 1", tenant="light"))
    last = gate.enter(admission("light 2", tenant="light"))
    batch = gate.enter(admission("batch", batch=True))
    positions = [ticket.queue_position() for ticket in (light, last, batch)]
    assert [one.position for one in positions if one is not None] == [1, 3, 13]
    serve(gate, jobs_per_s=2)
    position = last.queue_position()
    assert position is not None
    assert position.eta_s == pytest.approx(1.5)
    last.accepted("w")
    assert last.queue_position() is None


def test_the_oldest_waiting_job_of_each_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = control()
    monkeypatch.setattr("gateway.admission.control.time.monotonic", lambda: 100.0)
    assert list(gate.oldest_waits_s()) == [("m", 0.0)]
    first, second = (gate.enter(admission(f"{at}", tenant=f"{at}", admitted_s=at)) for at in (70.0, 90.0))
    assert list(gate.oldest_waits_s()) == [("m", 30.0)]
    first.accepted("w")
    assert list(gate.oldest_waits_s()) == [("m", 10.0)]
    second.close()
    assert list(gate.oldest_waits_s()) == [("m", 0.0)]


# --- shares of the queue's bytes --------------------------------------------------------------------------------------

MIB = 1024 * 1024
LARGE = Sampling(max_tokens=1, grammar=Grammar("regex", "a" * MIB))


def enter_until_refused(gate: AdmissionControl, **rest: Any) -> int:
    """Return how many large jobs are admitted."""
    for number in range(1000):
        asked = admission(f"{rest} {number}", **rest)
        failure = gate.refusal(asked)
        if failure is not None:
            assert failure.code is ErrorCode.TOO_MANY_QUEUED_BYTES
            return number
        gate.enter(asked)
    raise AssertionError("no request was refused")


def busy(**rest: Any) -> AdmissionControl:
    gate = control(**rest)
    gate.capacity.on_heartbeat(beat(running=1))
    return gate


def test_all_bytes_of_a_job_count() -> None:
    """18 requests with a pattern of 3.9 MB each filled the queue for all tenants: only prompts were counted."""
    gate = busy(limits={"max_queued_bytes": 10 * MIB})
    assert enter_until_refused(gate, sampling=LARGE) < 10


def test_a_greedy_tenant_leaves_an_equal_share_to_others() -> None:
    gate = busy(queue={"max_mib": 30})
    mine = enter_until_refused(gate, sampling=LARGE, tenant="greedy")
    assert 6 <= mine <= 8
    theirs = enter_until_refused(gate, sampling=LARGE, tenant="next")
    assert 2 <= theirs <= 4
    assert gate.refusal(admission("small", tenant="innocent")) is None


def test_one_tenant_leaves_half_of_a_models_bound() -> None:
    gate = busy(limits={"max_queued_bytes": 20 * MIB})
    assert 9 <= enter_until_refused(gate, sampling=LARGE, tenant="greedy") <= 10
    assert gate.refusal(admission("other", sampling=LARGE, tenant="other")) is None


def test_one_models_jobs_leave_room_for_anothers() -> None:
    gate = busy(queue={"max_mib": 30}, models={"m": {}, "other": {}})
    for number in range(1000):  # each of another tenant
        asked = admission(f"{number}", sampling=LARGE, tenant=f"t{number}")
        if gate.refusal(asked) is not None:
            break
        gate.enter(asked)
    assert 13 <= number <= 15
    assert gate.refusal(admission("next", model="other", sampling=LARGE, tenant="x")) is None


def test_bytes_of_other_gateways_reduce_the_share() -> None:
    gate = busy(queue={"max_mib": 30})
    gate._backlog._polled_bytes = 20 * MIB
    assert 1 <= enter_until_refused(gate, sampling=LARGE) <= 3
    for ticket in [gate.enter(admission("one", sampling=LARGE, tenant="z"))]:
        ticket.close()
    assert gate._backlog.waiting_bytes < 30 * MIB


async def test_hosted_workers_do_not_count_as_own_capacity() -> None:
    hosted = {"api": {"provider": "openai", "models": ["m"]}}
    gate = control(hosted=hosted, limits={"max_queued_without_workers": 1})
    gate.capacity.on_heartbeat(beat("api-1", free=4, tier="hosted", pool="api"))
    gate.capacity.on_heartbeat(beat("api-2", free=4, tier="hosted", pool="unknown"))
    assert not gate.has_workers("m")
    assert gate.would_wait(admission(), 1e9)
    assert gate.capacity.hosted("api", "m").free_sequences == 4
    gate.enter(admission())
    assert gate.refusal(admission("req_2")) is not None
    gate.hosted_has_room = lambda _: True
    assert gate.refusal(admission("req_2")) is None
    gate.capacity.on_heartbeat(beat("ours", free=9))
    assert not gate.would_wait(admission("req_2"), 0.0)


async def test_a_request_back_from_a_hosted_pool_keeps_its_lane() -> None:
    gate = control()
    ticket = gate.enter(admission())
    ticket.leave_queue()
    assert [jobs for _, _, jobs in gate.waiting_jobs() if jobs] == []
    ticket.enter_queue()
    ticket.enter_queue()
    assert [(lane, jobs) for _, lane, jobs in gate.waiting_jobs() if jobs] == [(ticket.lane, 1)]
    ticket.close()
    ticket.enter_queue()
    assert [jobs for _, _, jobs in gate.waiting_jobs() if jobs] == []


def test_requests_for_trusted_pools_have_a_separate_queue() -> None:
    gate = control(trusted={"m"}, limits={"max_queued_requests": 1, "max_queued_without_workers": 1})
    ordinary, confidential = admission(), admission("req_2", trusted=True)
    gate.capacity.on_heartbeat(beat("vault", free=2, trusted=True))
    assert gate.refusal(confidential) is None
    gate.enter(ordinary)  # no worker serves it
    assert (gate.has_workers("m"), gate.has_workers(confidential.queue)) == (False, True)
    refusal = gate.refusal(admission("req_3"))
    assert refusal is not None
    assert refusal.code is ErrorCode.NO_WORKERS
    assert gate.refusal(confidential) is None
    gate.capacity.on_heartbeat(beat("w", free=0))
    for number in range(2):
        gate.enter(admission(f"c{number}", trusted=True))
    assert gate.refusal(confidential) is not None
    gate.capacity.on_heartbeat(beat("w", free=2))
    assert gate.refusal(admission("req_4")) is None


def test_a_tenants_lane_depends_on_the_queue() -> None:
    gate = control(trusted={"m"})
    first = gate.enter(admission(trusted=True))
    assert [(queue, lane) for queue, lane, jobs in gate.waiting_jobs() if jobs] == [("m@trusted", first.lane)]
    assert [(one.queue, one.lane) for one in gate._lanes_in_use()] == [("m@trusted", first.lane)]
    assert gate.queue_position(first).position == gate.queue_position(gate.enter(admission("req_2"))).position == 1
