from typing import Any

from gateway.admission.capacity import Backlog, LaneBacklog
from protocol import subjects
from protocol.nats.bus import Bus
from protocol.nats.topology import QueueBounds, apply


def test_own_jobs_count_without_a_poll() -> None:
    lane = LaneBacklog()
    lane.enter("a", 0.0)
    lane.enter("b", 0.0)
    assert lane.waiting == 2
    lane.leave("a")
    lane.leave("a")
    assert lane.waiting == 1


def test_polls_and_changes_add_up() -> None:
    """A job that entered during the poll may or may not be in its answer; earlier ones are."""
    lane = LaneBacklog()
    lane.enter("a", 0.0)
    asked = lane.asked()
    lane.enter("b", 0.0)
    lane.answered(11, asked)  # "a" and ten of other gateways
    assert lane.waiting == 12
    lane.leave("a")
    assert lane.waiting == 11
    lane.answered(0, lane.asked())
    assert lane.waiting == 1  # "b" is being published, even if the stream does not have it


def test_queue_positions_of_own_jobs() -> None:
    lane = LaneBacklog()
    for job in "abcd":
        lane.enter(job, 0.0)
    assert [lane.ahead_of(job, 0.0) for job in "abcd"] == [0, 1, 2, 3]
    lane.leave("a")
    assert [lane.ahead_of(job, 1.0) for job in "bcd"] == [0, 1, 2]
    lane.answered(6, lane.asked())  # three jobs of other gateways at unknown positions
    assert [lane.ahead_of(job, 2.0) for job in "bcd"] == [0, 2, 4]
    lane.enter("e", 0.0)
    assert lane.ahead_of("e", 2.0) == 3 * 7 // 4  # entered after the ranks were computed: the last one


async def test_jobs_of_other_gateways_are_polled(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="test")
    try:
        await apply(bus, ["m/1", "m2"], QueueBounds())
        for lane, jobs in {"h3": 2, "low": 3}.items():
            for number in range(jobs):
                await bus.publish_durable(subjects.job_subject("m/1", lane), b"x", message_id=f"{lane}{number}")
        backlog = Backlog(bus, ["m/1", "m2"])
        assert backlog.total("m/1") == 0
        await backlog.poll()
        assert backlog.lane("m/1", "h3").waiting == 2
        assert (backlog.interactive("m/1"), backlog.total("m/1"), backlog.total("m2")) == (2, 5, 0)
    finally:
        await bus.close()


async def test_a_failed_poll_changes_nothing(caplog: Any, nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="test")
    try:
        backlog = Backlog(bus, ["m"])  # there is no such stream
        backlog.lane("m", "h0").enter("a", 0.0)
        await backlog.poll()
        await backlog.poll()
        assert backlog.total("m") == 1
        assert len([record for record in caplog.records if "backlog" in record.message]) == 1
    finally:
        await bus.close()
