"""The permissions of each part, checked without a server."""

import re

import pytest

from protocol import subjects
from protocol.nats.access import PARTS, SERVICES_FOR_WORKERS, Permissions, of_part, of_worker

MODELS = ("org/model.v1", "other")


def matches(pattern: str, subject: str) -> bool:
    """Match a subject like the queue server."""
    wanted, given = pattern.split("."), subject.split(".")
    for number, token in enumerate(wanted):
        if token == ">":
            return len(given) > number
        if number >= len(given) or token not in {"*", given[number]}:
            return False
    return len(wanted) == len(given)


def may_publish(allowed: Permissions, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in allowed.publish)


@pytest.fixture
def worker() -> Permissions:
    return of_worker("pool a", "box", MODELS, subjects.LANES)


def test_a_worker_pulls_every_lane_of_its_models_and_no_other(worker: Permissions) -> None:
    for model in MODELS:
        for lane in subjects.LANES:
            assert may_publish(worker, f"js.CONSUMER.MSG.NEXT.RQ.{subjects.job_consumer(model, lane)}")
            assert may_publish(worker, f"$JS.ACK.RQ.{subjects.job_consumer(model, lane)}.1.2.3.4.5")
    assert not may_publish(worker, f"js.CONSUMER.MSG.NEXT.RQ.{subjects.job_consumer('third', 'h0')}")
    assert not may_publish(worker, f"js.CONSUMER.MSG.NEXT.RQ.{subjects.job_consumer('other', 'hosted-x')}")
    hosted = of_worker("api", "box", MODELS, (subjects.hosted_lane("api"),))
    assert not may_publish(hosted, f"js.CONSUMER.MSG.NEXT.RQ.{subjects.job_consumer('other', 'h0')}")


def test_trusted_pools_and_others_share_no_consumer(worker: Permissions) -> None:
    trusted = of_worker("vault", "box", MODELS, subjects.LANES, trusted=True)
    theirs = {subject for subject in trusted.publish if "RQ." in subject or subject.startswith("oldest.")}
    assert theirs
    assert not theirs & set(worker.publish)
    for model in MODELS:
        queue = subjects.queue_of(model, trusted=True)
        assert subjects.model_of(queue) == subjects.model_of(model) == model
        for lane in subjects.LANES:
            assert may_publish(trusted, f"js.CONSUMER.MSG.NEXT.RQ.{subjects.job_consumer(queue, lane)}")
        assert may_publish(trusted, subjects.model_card_subject(model))


def test_a_worker_publishes_only_under_its_own_id(worker: Permissions) -> None:
    own, others = "pool=20a.box.w1", ("pool=20a.box2.w1", "pool=20b.box.w1", "w1", "pool=20a.box", "pool=20a.box.w1.x")
    for say in (
        lambda worker_id: subjects.frames_by_worker_subject("fr.g1", worker_id),
        subjects.heartbeat_subject,
        lambda worker_id: subjects.attempt_usage_subject("pool a", worker_id),
    ):
        assert may_publish(worker, say(own))
        assert not [other for other in others if may_publish(worker, say(other))]


def test_all_subjects_of_a_worker_cross_into_the_streams_account(worker: Permissions) -> None:
    """Frames are exported to the other account; all else are its services, and all of them are used."""
    served = SERVICES_FOR_WORKERS.values()
    for subject in worker.publish:
        example = subject.replace("*", "x").replace(">", "x")
        assert subject.startswith("fr.") or any(matches(pattern, example) for pattern in served), subject
    for pattern in served:
        assert any(matches(pattern, subject.replace(">", "x")) for subject in worker.publish), pattern


def test_no_part_may_do_everything() -> None:
    for part in (*PARTS, "worker"):
        allowed = of_worker("p", "n", MODELS, subjects.LANES) if part == "worker" else of_part(part)
        for subject in (*allowed.publish, *allowed.subscribe):
            assert not re.match(r"^(>|\*|\$JS\.API\.>|\$JS\.>|\$KV\.>|\$SYS\.>|_INBOX\.>)", subject), (part, subject)
        assert len(set(allowed.publish)) == len(allowed.publish)


def test_only_gateways_create_streams_and_jobs() -> None:
    for part in ("ledger", "fleet", "admin"):
        for subject in ("rq.m.h0", "$JS.API.STREAM.CREATE.RQ", "$JS.API.STREAM.DELETE.RQ", "fr.g.w"):
            assert not may_publish(of_part(part), subject)
        assert may_publish(of_part(part), "ctl.w") == (part == "fleet")  # drain commands
    assert not may_publish(of_part("gateway"), "$JS.API.STREAM.DELETE.RQ")
