"""Names on the bus: every subject, stream, consumer and bucket, built in one place.

A model's name may have any character, but NATS subjects and consumer names may not, so names are escaped: every byte
outside ``[A-Za-z0-9_-]`` becomes ``=XX`` (``org/model.v1`` → ``org=2Fmodel=2Ev1``).
"""

import re
from typing import Final

INTERACTIVE_STREAM: Final = "RQ"
USAGE_STREAM: Final = "USAGE"
PAYLOADS_STREAM: Final = "PAYLOADS"
PARKED_STREAM: Final = "PARKED"
WEBHOOKS_STREAM: Final = "WEBHOOKS"
RESPONSES_STREAM: Final = "RES"
WORKERS_BUCKET: Final = "workers"
MODELS_BUCKET: Final = "models"
ARTIFACTS_BUCKET: Final = "artifacts"
PROMPTS_BUCKET: Final = "prompts"
IDEMPOTENCY_BUCKET: Final = "idempotency"
QUOTAS_BUCKET: Final = "quotas"
FLEET_BUCKET: Final = "fleet"
BATCHES_BUCKET: Final = "batches"

LEDGER_CONSUMER: Final = "ledger"
PAYLOADS_CONSUMER: Final = "payloads"
WEBHOOKS_CONSUMER: Final = "webhooks"
DEAD_LETTER_STREAM: Final = "DLQ"

# The lanes of each queue: one subject and one durable consumer each. Workers serve ``resume`` first (those requests
# were admitted long ago, and their streams stand still), then the high lanes round-robin, over which gateways spread
# the tenants, and then ``low``, the batch lane.
RESUME_LANE: Final = "resume"
HIGH_LANES: Final = ("h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7")
LOW_LANE: Final = "low"
LANES: Final = (RESUME_LANE, *HIGH_LANES, LOW_LANE)

# Jobs that require trusted pools have a separate queue with the same lanes, which other pools' credentials may not
# consume. Its name, also in subjects, is the model's with this suffix; no model's name may end with it.
TRUSTED_MARK: Final = "@trusted"
HOSTED_TIER: Final = "hosted"  # tier of pools that serve only their own lane

# Sent by the server when a connection ends, if its configuration imports these events into the account.
DISCONNECTS: Final = "$SYS.ACCOUNT.*.DISCONNECT"

REQUEST_USAGE_SUBJECT: Final = "usage.request"
ATTEMPT_USAGE_SUBJECT: Final = "usage.attempt"  # used by workers of an older release; see ``attempt_usage_subject``
INTENT_USAGE_SUBJECT: Final = "usage.intent"
PAYLOAD_SUBJECT: Final = "payloads.request"
PARKED_USAGE_SUBJECT: Final = "parked.usage"
WEBHOOK_EVENT_SUBJECT: Final = "webhooks.event"
RESPONSE_SUBJECTS: Final = "res.>"

# A worker's id has one token, or three with credentials: pool, name of the credentials, instance.
HEARTBEATS: Final = f"$KV.{WORKERS_BUCKET}.>"
_HEARTBEAT_PREFIX: Final = HEARTBEATS.removesuffix(">")

# Core NATS, no payload: API keys changed in SQL; reload them.
KEYS_CHANGED_SUBJECT: Final = "config.keys.changed"

# Core NATS, requests without a payload: workers ask gateways for the time of a lane's oldest job.
OLDEST_JOBS: Final = "oldest.*.*"

# Core NATS: each gateway reports to the others the lanes in which its tenants' jobs wait.
LANES_IN_USE: Final = "lanes.in-use"

# Core NATS, an account's id: a gateway needs amounts of a limit that others may hold idle.
QUOTA_WANTED: Final = "quotas.wanted"

# Core NATS: a ledger process reports the state of webhooks, for the gateways' metrics.
WEBHOOKS_STATE: Final = "webhooks.state"

# Core NATS, a sequence of USAGE: a gateway waits until everything up to it is in SQL; writers write intents at once.
LEDGER_WANTED: Final = "ledger.wanted"

# Core NATS, an account's id: the rest of a budget no longer covers a request, for webhooks.
BUDGET_REFUSED: Final = "quotas.budget-refused"

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def escape(name: str) -> str:
    """Escape a name as one subject token, valid also in consumer and key names."""
    return _UNSAFE.sub(lambda found: "".join(f"={byte:02X}" for byte in found.group().encode()), name)


def unescape(token: str) -> str:
    """Undo ``escape``."""
    return re.sub(rb"=([0-9A-F]{2})", lambda found: bytes.fromhex(found[1].decode()), token.encode()).decode()


def queue_of(model: str, *, trusted: bool) -> str:
    """Return the name of a model's queue, or of its separate queue for trusted pools."""
    return f"{model}{TRUSTED_MARK}" if trusted else model


def model_of(queue: str) -> str:
    """Return the model whose jobs are in a queue."""
    return queue.removesuffix(TRUSTED_MARK)


def job_subject(queue: str, lane: str) -> str:
    return f"rq.{escape(queue)}.{lane}"


def hosted_lane(pool: str) -> str:
    """Return a hosted pool's lane in each of its models' queues, for jobs that may go to its provider."""
    return f"{HOSTED_TIER}-{escape(pool)}"


def job_consumer(queue: str, lane: str) -> str:
    """Return the durable consumer that all workers of a queue share for a lane."""
    return f"{escape(queue)}_{lane}"


def frames_subject(gateway_id: str) -> str:
    """Return the subject to which workers send step frames for the requests of one gateway."""
    return f"fr.{gateway_id}"


def frames_by_worker_subject(reply_subject: str, worker_id: str) -> str:
    """Return the subject to which only one worker may send frames."""
    return f"{reply_subject}.{worker_id}"


def attempt_usage_subject(pool: str, worker_id: str) -> str:
    """Return the subject of one worker's usage records."""
    return f"{ATTEMPT_USAGE_SUBJECT}.{escape(pool)}.{worker_id}"


def worker_of_usage(subject: str) -> str:
    """Return the worker whose usage records have this subject; empty for gateways and workers of an older release."""
    return subject.removeprefix(f"{ATTEMPT_USAGE_SUBJECT}.").partition(".")[2] if subject.count(".") > 2 else ""


def oldest_job_subject(queue: str, lane: str) -> str:
    """Return the subject of one lane among ``OLDEST_JOBS``."""
    return f"oldest.{escape(queue)}.{lane}"


def answers_subject(gateway_id: str) -> str:
    """Return the subject on which other gateways read this one's answers of requests with an ``Idempotency-Key``."""
    return f"ans.{gateway_id}"


def response_subject(tenant: str, response_id: str, what: str) -> str:
    """Return the subject of one kind of a stored response's data (``gateway.responses.store``)."""
    return f"res.{escape(tenant)}.{escape(response_id)}.{what}"


def runs_subject(gateway_id: str) -> str:
    """Return the subject on which other gateways ask this one for its running background responses."""
    return f"runs.{gateway_id}"


def open_requests_subject(gateway_id: str) -> str:
    """Return the subject on which ledger writers ask a gateway for its open requests."""
    return f"open.{gateway_id}"


def worker_prefix(pool: str, name: str) -> str:
    """Return the id prefix of all workers that use the credentials with this name."""
    return f"{escape(pool)}.{name}"


def connection_name(worker_id: str) -> str:
    """Return the name of a worker's connection, which identifies it in the server's disconnect events."""
    return f"spillway-worker {worker_id}"


def worker_of_connection(name: str) -> str | None:
    """Return the worker with this connection name; None if it is not a worker's."""
    prefix, _, worker_id = name.partition(" ")
    return worker_id if prefix == "spillway-worker" and worker_id else None


def dead_letter_subject(model: str) -> str:
    return f"dlq.{escape(model)}"


def control_subject(worker_id: str) -> str:
    """Return the subject to which gateways send Cancel, Resend and Ping for one worker."""
    return f"ctl.{worker_id}"


def kv_subject(bucket: str, key: str) -> str:
    """Return the subject of a KV entry: publish to put, subscribe to watch."""
    return f"$KV.{bucket}.{key}"


def heartbeat_subject(worker_id: str) -> str:
    """Return the subject of one worker's registry entry."""
    return kv_subject(WORKERS_BUCKET, worker_id)


def worker_of_heartbeat(subject: str) -> str:
    """Return the worker whose registry entry has this subject."""
    return subject.removeprefix(_HEARTBEAT_PREFIX)


def model_card_subject(model: str) -> str:
    return kv_subject(MODELS_BUCKET, escape(model))
