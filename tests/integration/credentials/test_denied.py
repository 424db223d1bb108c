"""What a stolen worker cannot do: everything but what it needs for its own jobs, tried with a real server."""

from pathlib import Path

import pytest
from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import BusError
from protocol.nats.access import WORKERS_API, access_options, worker_role
from protocol.nats.bus import API, Bus
from protocol.nats.objects import PromptKeys, get_object, put_object, seal, unseal
from spillway.nats_accounts import of_pool
from tests.integration.credentials.conftest import MODEL, OTHER_MODEL, TRUSTED_QUEUE, Queue
from tests.waiting import until

OWN_LANE = subjects.job_consumer(MODEL, "h0")
OTHER_LANE = subjects.job_consumer(OTHER_MODEL, "h0")


def pulls(queue: str) -> tuple[str, ...]:
    """What a worker of a queue publishes to get at its jobs: also at those that resume."""
    lanes = [subjects.job_consumer(queue, lane) for lane in ("h0", subjects.RESUME_LANE, subjects.LOW_LANE)]
    calls = ("js.CONSUMER.MSG.NEXT.RQ.{}", "js.CONSUMER.INFO.RQ.{}", "$JS.ACK.RQ.{}.1.1.1.1.0")
    return (*(call.format(lane) for lane in lanes for call in calls), subjects.oldest_job_subject(queue, "h0"))


# Of a worker "w1" on the machine "box" of pool "demo".
PUBLISHES = {
    "jobs of other pools": (
        f"js.CONSUMER.MSG.NEXT.RQ.{OTHER_LANE}",
        f"$JS.API.CONSUMER.MSG.NEXT.RQ.{OTHER_LANE}",
        f"$JS.ACK.RQ.{OTHER_LANE}.1.1.1.1.0",
        f"js.CONSUMER.INFO.RQ.{OTHER_LANE}",
        f"oldest.{subjects.escape(OTHER_MODEL)}.h0",
    ),
    "jobs of its own model that demand trusted pools": (
        *pulls(TRUSTED_QUEUE),
        subjects.job_subject(TRUSTED_QUEUE, "h0"),
        subjects.job_subject(TRUSTED_QUEUE, subjects.RESUME_LANE),
        f"js.CONSUMER.DURABLE.CREATE.RQ.{subjects.job_consumer(TRUSTED_QUEUE, 'h0')}",
    ),
    "frames and control of trusted workers": (
        "fr.g1.vault.pool.w1",
        subjects.control_subject("vault.pool.w1"),
        subjects.heartbeat_subject("vault.pool.w1"),
        subjects.attempt_usage_subject("vault", "vault.pool.w1"),
    ),
    "jobs that it was not given": (
        "js.STREAM.MSG.GET.RQ",
        "$JS.API.STREAM.MSG.GET.RQ",
        "$JS.API.DIRECT.GET.RQ",
        "js.CONSUMER.CREATE.RQ.spy",
        "$JS.API.CONSUMER.CREATE.RQ.spy",
    ),
    "jobs of its own making": (subjects.job_subject(MODEL, "h0"),),
    "frames in another's name": (
        "fr.g1",
        "fr.g1.w1",
        "fr.g1.demo.pool.w1",
        "fr.g1.demo.box",
        "fr.g1.other.box.w1",
    ),
    "usage of others": (
        subjects.REQUEST_USAGE_SUBJECT,
        subjects.INTENT_USAGE_SUBJECT,
        subjects.ATTEMPT_USAGE_SUBJECT,
        subjects.attempt_usage_subject("other", "other.box.w1"),
        subjects.attempt_usage_subject("other", "demo.box.w1"),
        subjects.attempt_usage_subject("demo", "demo.pool.w1"),
        subjects.PARKED_USAGE_SUBJECT,
        subjects.PAYLOAD_SUBJECT,
        subjects.dead_letter_subject(MODEL),
    ),
    "webhooks": (subjects.WEBHOOK_EVENT_SUBJECT, subjects.WEBHOOKS_STATE, "$JS.ACK.WEBHOOKS.webhooks.1.1.1.1.0"),
    "what is kept of responses": (
        subjects.response_subject("team", "resp_1", "cancel"),
        subjects.response_subject("team", "resp_1", "events"),
        subjects.runs_subject("g1"),
        "js.STREAM.MSG.GET.RES",
        "$JS.API.STREAM.MSG.GET.RES",
        "js.STREAM.PURGE.RES",
    ),
    "keys and limits": (
        subjects.KEYS_CHANGED_SUBJECT,
        subjects.QUOTA_WANTED,
        subjects.BUDGET_REFUSED,
        subjects.LEDGER_WANTED,
        subjects.LANES_IN_USE,
        subjects.kv_subject(subjects.QUOTAS_BUCKET, "key"),
        subjects.kv_subject(subjects.IDEMPOTENCY_BUCKET, "claim"),
        "js.STREAM.MSG.GET.KV_quotas",
    ),
    "cards of models that it does not serve": (
        subjects.model_card_subject(OTHER_MODEL),
        "$KV.models.>",
        "js.STREAM.PURGE.OBJ_artifacts",
    ),
    "heartbeats and control of others": (
        subjects.heartbeat_subject("w1"),
        subjects.heartbeat_subject("demo.pool.w1"),
        subjects.heartbeat_subject("other.box.w1"),
        subjects.control_subject("demo.box.w2"),
        subjects.control_subject("other.box.w1"),
    ),
    "gateways' own talk": (subjects.answers_subject("g1"), subjects.open_requests_subject("g1"), "_INBOX.gateway.1"),
    "prompts of its own making": ("$O.prompts.C.1", "$O.prompts.M.cA==", "js.STREAM.PURGE.OBJ_prompts"),
    "administration of streams": tuple(
        f"{prefix}.{call}"
        for prefix in ("js", "$JS.API")
        for call in (
            "INFO",
            "STREAM.NAMES",
            "STREAM.CREATE.X",
            "STREAM.UPDATE.RQ",
            "STREAM.PURGE.RQ",
            "STREAM.DELETE.USAGE",
            "STREAM.MSG.DELETE.RQ",
            f"CONSUMER.DELETE.RQ.{OWN_LANE}",
            f"CONSUMER.DURABLE.CREATE.RQ.{OWN_LANE}",
            "CONSUMER.CREATE.OBJ_prompts",
            "CONSUMER.CREATE.OBJ_artifacts.c",
        )
    ),
}
SUBSCRIBES = (
    ">",
    "_INBOX.>",
    "_INBOX.gateway.>",
    "_INBOX.worker.demo.pool.>",
    "_INBOX.worker.other.box.>",
    "fr.>",
    "rq.>",
    "usage.>",
    "ctl.>",
    "ctl.demo.box",
    "ctl.demo.pool.w1",
    "ctl.other.box.w1",
    "ctl.vault.pool.w1",
    "_INBOX.worker.vault.pool.>",
    subjects.job_subject(TRUSTED_QUEUE, "*"),
    "$KV.quotas.>",
    "$KV.models.*",
    "$O.prompts.>",
    "ans.*",
    "open.*",
    "runs.*",
    "res.>",
    "oldest.*.*",
    subjects.KEYS_CHANGED_SUBJECT,
    "$JS.ACK.>",
    "$SYS.>",
)


class Stranger:
    """Somebody with the credentials of one machine, and what the server has told them."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def on_error(self, error: Exception) -> None:
        self.told.append(str(error).lower())

    def was_denied(self, what: str, subject: str) -> bool:
        """Report whether the last thing that the server said is that this is denied."""
        return f'permissions violation for {what} "{subject}"'.lower() in "".join(self.told[-1:])


@pytest.fixture
def stranger() -> Stranger:
    return Stranger()


@pytest.fixture
async def stolen(queue: Queue, stranger: Stranger) -> Bus:
    """The connection of a machine "box" of pool "demo"."""
    credentials = queue.authority.issue(of_pool("demo"), "box", lasts_s=3600)
    bus = await queue.connect_worker(credentials, "demo", "box")
    bus.client._error_cb = stranger.on_error
    return bus


async def heard_out(bus: Bus) -> None:
    """Return when the server has taken all that was sent before."""
    await bus.api("STREAM.INFO.RQ")


@pytest.mark.parametrize("what", PUBLISHES)
async def test_it_may_not_publish(stolen: Bus, stranger: Stranger, what: str) -> None:
    for subject in PUBLISHES[what]:
        await stolen.publish(subject, b"{}", reply=f"{stolen._inbox_prefix}.0")
        await heard_out(stolen)
        assert stranger.was_denied("publish to", subject), (subject, stranger.told)


async def test_it_may_not_subscribe(stolen: Bus, stranger: Stranger) -> None:
    for subject in SUBSCRIBES:
        subscription = await stolen.client.subscribe(subject)
        await heard_out(stolen)
        assert stranger.was_denied("subscription to", subject), (subject, stranger.told)
        await subscription.unsubscribe()


async def test_a_trusted_worker_takes_nothing_but_what_demands_it(queue: Queue, stranger: Stranger) -> None:
    vault = await queue.connect_worker(queue.folder / f"{of_pool('vault')}.creds", "vault", "pool")
    vault.client._error_cb = stranger.on_error
    for subject in pulls(TRUSTED_QUEUE):
        await vault.publish(subject, b"", reply=f"{vault._inbox_prefix}.0")
        await heard_out(vault)
    assert stranger.told == []
    for subject in pulls(MODEL):
        await vault.publish(subject, b"{}", reply=f"{vault._inbox_prefix}.0")
        await heard_out(vault)
        assert stranger.was_denied("publish to", subject), (subject, stranger.told)


async def test_it_may_do_what_its_jobs_need(stolen: Bus, stranger: Stranger) -> None:
    for subject in (
        subjects.frames_by_worker_subject(subjects.frames_subject("g1"), "demo.box.w1"),
        subjects.heartbeat_subject("demo.box.w1"),
        subjects.attempt_usage_subject("demo", "demo.box.w1"),
        subjects.model_card_subject(MODEL),
        f"$JS.ACK.RQ.{OWN_LANE}.1.1.1.1.0",
        f"{WORKERS_API}.CONSUMER.MSG.NEXT.RQ.{OWN_LANE}",
    ):
        await stolen.publish(subject, b"")
    await stolen.client.subscribe(subjects.control_subject("demo.box.w1"))
    await heard_out(stolen)
    assert stranger.told == []


async def test_the_server_does_nothing_for_it_that_it_may_not_do_itself(queue: Queue, stolen: Bus) -> None:
    """Whoever asks names the subject of the answer: one without a body, sent to the right place, is an order."""
    gateway = await queue.connect("gateway")
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    for subject in (subjects.KEYS_CHANGED_SUBJECT, subjects.QUOTA_WANTED, "fr.>"):
        await gateway.subscribe(subject, hear)
    await put_object(gateway, subjects.PROMPTS_BUCKET, "p", b"data")
    await gateway.publish_durable(subjects.INTENT_USAGE_SUBJECT, b"intent", message_id="1")
    before = {stream: await _messages(gateway, stream) for stream in ("RQ", "USAGE", "OBJ_prompts", "KV_quotas")}
    targets = (
        "$JS.API.STREAM.PURGE.USAGE",
        "$JS.API.STREAM.DELETE.USAGE",
        "js.STREAM.DELETE.USAGE",
        "$JS.API.STREAM.DELETE.RQ",
        subjects.KEYS_CHANGED_SUBJECT,
        subjects.QUOTA_WANTED,
        subjects.REQUEST_USAGE_SUBJECT,
        subjects.kv_subject(subjects.QUOTAS_BUCKET, "key"),
        subjects.job_subject(MODEL, "h0"),
        "fr.g1",
    )
    for target in targets:
        for call, body in (
            (f"CONSUMER.MSG.NEXT.RQ.{OWN_LANE}", b'{"batch": 1, "no_wait": true}'),
            ("STREAM.MSG.GET.OBJ_prompts", b'{"seq": 1}'),
            ("STREAM.MSG.GET.OBJ_prompts", b'{"seq": 99}'),
        ):
            await stolen.publish(f"{WORKERS_API}.{call}", body, reply=target)
    await heard_out(stolen)
    await heard_out(gateway)
    after = {stream: await _messages(gateway, stream) for stream in before}
    assert (heard, after) == ([], before)
    # In the streams' own account it does.
    await gateway.publish(f"{API}.STREAM.MSG.GET.OBJ_prompts", b'{"seq": 1}', reply=subjects.KEYS_CHANGED_SUBJECT)
    await until(lambda: heard == [subjects.KEYS_CHANGED_SUBJECT])


async def _messages(bus: Bus, stream: str) -> int:
    return int((await bus.api(f"STREAM.INFO.{stream}"))["state"]["messages"])


async def test_a_prompt_of_another_is_noise(stolen: Bus, queue: Queue) -> None:
    gateway = await queue.connect("gateway")
    keys, secret = PromptKeys(), b"confidential " * 30_000
    await put_object(gateway, subjects.PROMPTS_BUCKET, "p", seal(secret, keys.of("r"), "p"))
    read = await get_object(stolen, subjects.PROMPTS_BUCKET, "p")  # it may: its own jobs' are there, too
    assert b"confidential" not in read
    assert unseal(read, keys.of("r"), "p") == secret


async def test_expired_and_revoked_credentials_are_refused_and_cut_off(queue: Queue) -> None:
    credentials = queue.authority.issue(of_pool("demo"), "lost", lasts_s=3600)
    bus = await queue.connect_worker(credentials, "demo", "lost")
    expired = queue.authority.issue(of_pool("demo"), "old", lasts_s=-1)
    with pytest.raises(BusError, match="(?i)authorization"):
        await _connect_soon(queue, expired, "old")
    assert queue.authority.revoke("pool-demo.lost", keep_newest=False) == 1
    queue.reload()
    await until(lambda: not bus.connected)


async def _connect_soon(queue: Queue, credentials: Path, name: str) -> None:
    options = access_options(credentials, None, worker_role(f"demo.{name}"))
    await Bus.connect(queue.server.url, name="late", options=options, first_limit_s=3.0)
