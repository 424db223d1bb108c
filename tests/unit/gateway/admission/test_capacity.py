import pytest

from gateway.admission.capacity import Capacity
from tests.unit.gateway.admission.controls import beat


def capacity_with(*beats: object) -> Capacity:
    capacity = Capacity(["m", "m2"])
    for one in beats:
        capacity.on_heartbeat(one)  # type: ignore[arg-type]
    return capacity


def test_live_workers_are_added_up() -> None:
    capacity = capacity_with(beat("a", free=3, running=1), beat("b", free=2), beat("a", free=4))
    assert (capacity.of("m").workers, capacity.of("m").free_sequences, capacity.of("m").running) == (2, 6, 0)
    capacity.on_heartbeat(beat("b", free=2, draining=True))
    assert (capacity.of("m").workers, capacity.of("m").free_sequences) == (1, 4)
    capacity.keep(lambda _worker_id, _now_s: False, 0.0)
    assert (capacity.of("m").workers, capacity.of("m").free_sequences) == (0, 0)


def test_sequences_of_own_jobs_count_until_the_next_heartbeat() -> None:
    capacity = capacity_with(beat("a", free=3))
    capacity.took("a", 2)
    assert capacity.of("m").free_sequences == 1
    capacity.took("a", 5)
    capacity.took("unknown", 1)
    assert capacity.of("m").free_sequences == 0
    capacity.on_heartbeat(beat("a", free=2))
    assert capacity.of("m").free_sequences == 2


def test_a_worker_of_several_models_counts_for_each() -> None:
    capacity = capacity_with(beat("a", free=3, models=("m", "m2", "not configured here")))
    assert (capacity.of("m").workers, capacity.of("m2").free_sequences) == (1, 3)


def test_the_rate_is_measured_only_while_jobs_wait() -> None:
    capacity = capacity_with(beat(running=4, jobs_taken=4))
    model = capacity.of("m")
    for taken in range(5, 25):  # one job completed per second, because there was no more demand
        capacity.on_heartbeat(beat(running=4, jobs_taken=taken))
        model.measure(1.0, contended=False)
    assert model.jobs_per_s is None
    for taken in range(29, 109, 4):
        capacity.on_heartbeat(beat(running=4, jobs_taken=taken))
        model.measure(1.0, contended=True)
    assert model.jobs_per_s == pytest.approx(4, rel=0.05)


def test_jobs_accepted_while_a_worker_fills_up_are_not_completed_ones() -> None:
    capacity = capacity_with(beat(free=64))
    capacity.on_heartbeat(beat(running=64, jobs_taken=64))
    capacity.of("m").measure(1.0, contended=True)
    assert capacity.of("m").jobs_per_s is None
    capacity.on_heartbeat(beat(running=64, jobs_taken=80))  # too few have ended
    capacity.of("m").measure(1.0, contended=True)
    assert capacity.of("m").jobs_per_s is None
    capacity.on_heartbeat(beat(running=64, jobs_taken=128))
    capacity.of("m").measure(2.0, contended=True)
    assert capacity.of("m").jobs_per_s == pytest.approx(64 / 4, rel=0.05)


def test_the_rate_follows_the_number_of_workers() -> None:
    capacity = capacity_with(beat("a"))
    capacity.on_heartbeat(beat("a", jobs_taken=20))
    capacity.of("m").measure(2.0, contended=True)
    assert capacity.of("m").jobs_per_s == pytest.approx(10)
    capacity.on_heartbeat(beat("b"))
    assert capacity.of("m").jobs_per_s == pytest.approx(20)
    capacity.keep(lambda _worker_id, _now_s: False, 0.0)
    assert capacity.of("m").jobs_per_s is None
    capacity.on_heartbeat(beat("c"))
    assert capacity.of("m").jobs_per_s == pytest.approx(10)  # the rate of one worker is still known
