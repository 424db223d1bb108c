import time

from nats.aio.msg import Msg

from gateway.admission.registry import EXCUSED_SILENCE_S, FORGET_AFTER_S, WorkerRegistry
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.job import encode
from protocol.nats.bus import Bus
from protocol.nats.topology import HEARTBEAT_LIMIT_S
from tests.unit.gateway.telemetry.test_exposition import beat


def registry(bus: Bus | None = None) -> WorkerRegistry:
    return WorkerRegistry(bus)  # type: ignore[arg-type]  # these tests send nothing


def test_a_silent_worker_is_lost() -> None:
    workers = registry()
    assert not workers.alive("w", 0.0)
    workers.seen("w", 10.0)
    assert workers.alive("w", 10.0 + HEARTBEAT_LIMIT_S)
    assert not workers.alive("w", 10.01 + HEARTBEAT_LIMIT_S)


def test_workers_are_not_lost_because_the_gateway_was_silent() -> None:
    workers = registry()
    workers.seen("w", 10.0)
    workers.reset_silence(20.0)
    assert workers.alive("w", 20.0 + EXCUSED_SILENCE_S / 2)
    assert not workers.alive("w", 20.0 + EXCUSED_SILENCE_S)


def test_workers_lost_long_ago_are_forgotten() -> None:
    workers = registry()
    workers.seen("old", 0.0)
    workers.seen("new", 10.0)
    workers.forget_dead(FORGET_AFTER_S + 5)
    assert set(workers._last_seen_s) == {"new"}


def test_a_loss_is_reported_at_once_and_ends_with_the_next_message() -> None:
    workers = registry()
    losses: list[tuple[str, ErrorCode]] = []
    workers.on_lost = lambda worker_id, code, _reason, _now_s: losses.append((worker_id, code))
    workers.seen("w", 10.0)
    workers.lose("w", ErrorCode.WORKER_LOST, "gone", 10.1)
    assert not workers.alive("w", 10.1)
    assert losses == [("w", ErrorCode.WORKER_LOST)]
    workers.seen("w", 10.2)
    assert workers.alive("w", 10.2)


def test_workers_disconnected_by_the_server_may_reconnect() -> None:
    workers = registry()
    losses: list[str] = []
    workers.on_lost = lambda worker_id, _code, _reason, _now_s: losses.append(worker_id)
    workers.seen("cut", 10.0)
    workers.excuse("cut", 10.0)
    workers.lose("cut", ErrorCode.WORKER_LOST, "gone", 10.1)
    workers.lose_silent(["cut"], 11.9)
    assert losses == []
    workers.lose("cut", ErrorCode.WORKER_DRAINING, "it has said so", 11.9)  # certain, not inferred from silence
    workers.lose_silent(["cut"], 12.1)
    assert losses == ["cut", "cut"]


async def test_a_signed_off_worker_is_not_alive_even_while_silence_is_excused() -> None:
    workers = registry()
    for worker_id in ("w1", "w2"):
        subject = subjects.heartbeat_subject(worker_id)
        await workers._on_heartbeat(Msg(None, subject=subject, data=encode(beat(worker_id))))  # type: ignore[arg-type]
    now_s = time.monotonic()
    workers.reset_silence(now_s)
    assert {one.worker_id for one in workers.live_beats(now_s)} == {"w1", "w2"}
    await workers._on_heartbeat(Msg(None, subject=subjects.heartbeat_subject("w1")))  # type: ignore[arg-type]
    assert [one.worker_id for one in workers.live_beats(now_s)] == ["w2"]


async def test_a_worker_cannot_sign_off_or_send_heartbeats_as_another() -> None:
    workers = registry()
    subject = subjects.heartbeat_subject("pool.box.w1")
    await workers._on_heartbeat(Msg(None, subject=subject, data=encode(beat("pool.box.w1"))))  # type: ignore[arg-type]
    status = Msg(None, subject=subject, headers={"Status": "404"})  # type: ignore[arg-type]
    await workers._on_heartbeat(status)
    forged = Msg(None, subject=subject, data=encode(beat("w2")))  # type: ignore[arg-type]
    await workers._on_heartbeat(forged)
    assert [one.worker_id for one in workers.live_beats(time.monotonic())] == ["pool.box.w1"]
