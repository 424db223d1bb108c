from gateway.dispatch.registry import FORGET_AFTER_S, FORGIVENESS_S, WorkerRegistry
from protocol.bus import Bus
from protocol.topology import HEARTBEAT_LIMIT_S


def registry(bus: Bus | None = None) -> WorkerRegistry:
    return WorkerRegistry(bus)  # type: ignore[arg-type]  # these tests speak to nobody


def test_silence_is_death() -> None:
    workers = registry()
    assert not workers.alive("w", 0.0)
    workers.heard("w", 10.0)
    assert workers.alive("w", 10.0 + HEARTBEAT_LIMIT_S)
    assert not workers.alive("w", 10.01 + HEARTBEAT_LIMIT_S)


def test_nobody_is_judged_for_our_own_silence() -> None:
    workers = registry()
    workers.heard("w", 10.0)
    workers.forgive(20.0)
    assert workers.alive("w", 20.0 + FORGIVENESS_S / 2)
    assert not workers.alive("w", 20.0 + FORGIVENESS_S)


def test_the_long_dead_are_forgotten() -> None:
    workers = registry()
    workers.heard("old", 0.0)
    workers.heard("new", 10.0)
    workers.forget_dead(FORGET_AFTER_S + 5)
    assert set(workers._heard_s) == {"new"}
