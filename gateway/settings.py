"""The gateway's settings: frozen, validated, passed down. No other gateway module reads the environment."""

import ipaddress
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, SecretStr

from db.accounts.principal import why_no_leave
from db.money import CLIENTS, TokenPrice, nano_usd
from gateway.tokenizing.settings import ModelTokenSettings
from ledger.settings import PayloadSettings
from protocol.nats.topology import HEARTBEAT_LIMIT_S, HEARTBEAT_PERIOD_S
from protocol.process import HttpUrlText, PositiveInt, PositiveSeconds, Settings, TelemetrySettings
from protocol.subjects import queue_of

REACH_LIMIT_S: Final = 5.0  # a request that waits longer for a limit treats the queue server as unavailable


class S3Settings(Settings):
    """A bucket of Amazon S3 or a compatible service. AWS's environment variables apply to keys left unset."""

    bucket: str
    prefix: str = ""  # of all object names
    endpoint: HttpUrlText | None = None  # None: Amazon S3
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None


class BatchSettings(Settings):
    """``[batches]``: storage of files, and bounds of uploads and batches."""

    s3: S3Settings | None = None  # None: the folder "files" in the data folder, which all gateways must share
    file_ttl_s: PositiveSeconds = 30 * 24 * 3600.0  # of every file, including results; a client may request less
    max_file_bytes: PositiveInt = 2 * 1024**3
    max_tenant_bytes: PositiveInt = 50 * 1024**3  # of a team's files together; results of its batches may exceed it
    max_tenant_files: PositiveInt = 10_000
    # Concurrent uploads of one gateway; more are refused. One tenant may have as many as it leaves free.
    max_uploads: PositiveInt = 16
    upload_silence_s: PositiveSeconds = 30.0  # longest gap between two parts of an upload
    # Lowest average rate in each window, not counting the gateway's own processing time.
    upload_min_bytes_per_s: PositiveInt = 4096
    upload_pace_s: PositiveSeconds = 30.0  # length of the window
    upload_s: PositiveSeconds = 3600.0
    max_lines: PositiveInt = 1_000_000  # of one batch
    max_line_bytes: PositiveInt = 4 * 1024**2
    max_tenant_batches: PositiveInt = 100  # that have not ended
    max_running: PositiveInt = 8  # batches that one gateway runs at a time
    max_open_lines: PositiveInt = 256  # of all these together
    max_line_tries: PositiveInt = 4  # of a failing line; refusals for lack of capacity do not count
    max_message_batch_bytes: PositiveInt = 256 * 1024**2  # the body of POST /v1/messages/batches
    max_message_batch_requests: PositiveInt = 100_000
    lease_s: Annotated[float, Field(ge=0.5, le=600)] = 15.0  # an unreachable gateway then loses its batches
    commit_s: PositiveSeconds = 2.0  # longest time that a result stays only in memory: a crash repeats this much work
    poll_s: PositiveSeconds = 1.0  # between two polls for new batches
    grace_s: PositiveSeconds = 10.0  # for the index or the open lines of a stopped batch to end
    # Before a failed run is retried. A batch that fails three times in the same way is given up.
    retry_s: PositiveSeconds = 5.0


class IdempotencySettings(Settings):
    """Requests that carry an ``Idempotency-Key``."""

    reattach_s: PositiveSeconds = 30.0  # how long a request continues without a reader
    keep_s: PositiveSeconds = 600.0  # how long its answer can be replayed
    max_runs: PositiveInt = 10_000  # running and kept; beyond it, the oldest kept answers are dropped
    max_bytes: PositiveInt = 256 * 1024 * 1024  # of their answers


class ResponseSettings(Settings):
    """``[responses]``: storage of responses, and its bounds."""

    store_by_default: bool = False  # whether a request without ``store`` is stored, as at OpenAI
    keep_s: PositiveSeconds = 30 * 24 * 3600.0
    events_s: PositiveSeconds = 24 * 3600.0  # how long the events of a background response can be read again
    max_response_bytes: PositiveInt = 4 * 1024**2  # of one response with its conversation, compressed
    max_tenant_bytes: PositiveInt = 256 * 1024**2
    max_tenant_responses: PositiveInt = 10_000
    take_over_s: PositiveSeconds = 2.0  # between two searches for responses whose gateway is gone
    retry_s: PositiveSeconds = 5.0  # before a failed response is retried
    silence_s: PositiveSeconds = 10.0  # a connected gateway that does not answer for longer also counts as gone


Usd = Annotated[float, Field(ge=0, le=1_000_000)]


class PriceSettings(Settings):
    """Token prices in USD per million tokens. Cached tokens are a part of prompt tokens."""

    prompt: Usd = 0.0
    cached: Usd | None = None  # default: the price of prompt tokens
    completion: Usd = 0.0

    @property
    def tokens(self) -> TokenPrice:
        """Return the price in the price book's form."""
        cached = self.prompt if self.cached is None else self.cached
        return TokenPrice(*(nano_usd(usd) for usd in (self.prompt, cached, self.completion)))


class ModelSettings(ModelTokenSettings):
    """One model that clients may request. It exists because it is configured, even if no worker is alive."""

    price: PriceSettings | None = None  # charged to clients; None: free, and not counted in budgets


class LimitSettings(Settings):
    """Limits of one gateway, checked before a request costs anything."""

    max_body_bytes: PositiveInt = 4 * 1024 * 1024
    # Of all bodies being read. No tenant may use more than it leaves free; a body without room waits.
    max_reading_bytes: PositiveInt = 256 * 1024 * 1024
    max_messages: PositiveInt = 2048
    max_prompt_tokens: PositiveInt | None = None  # in addition to the model's context length
    max_prompt_logprobs: PositiveInt = 131_072  # in one answer, including candidates: about 20 MB in the gateway
    max_total_tokens: PositiveInt | None = None  # prompt + max_tokens x n
    max_choices: PositiveInt = 16
    max_prompts: PositiveInt = 128  # of one completion; each counts as one request in all other limits
    max_in_flight: PositiveInt = 10_000  # requests at this gateway, including queued ones
    # Per model. Batch requests count all waiting ones, interactive requests only interactive ones.
    max_queued_requests: PositiveInt = 8_000  # waiting for a worker, over all gateways
    max_queued_prompt_tokens: PositiveInt = 20_000_000  # of requests waiting at this gateway
    max_queued_bytes: PositiveInt = 128 * 1024 * 1024  # of their jobs, including prompts
    max_queued_without_workers: PositiveInt = 5_000  # waiting while no worker of the model is alive
    # Embeddings that this gateway awaits or is sending: a request with 2048 inputs may have 32 MiB.
    max_vector_bytes: PositiveInt = 512 * 1024 * 1024
    # Of unread and incomplete answers; one tenant may use at most a quarter.
    max_unread_bytes: PositiveInt = 512 * 1024 * 1024
    max_unpublished_usage: PositiveInt = 50_000  # records in memory while the queue server is unavailable


LEAVE_S: Final = 5.0  # longer than two health checks of a load balancer at two-second intervals


class TimeoutSettings(Settings):
    """Time limits of a request in each state; each has its own error."""

    body_s: PositiveSeconds = 60.0  # headers → the whole request body
    queue_wait_s: PositiveSeconds = 600.0
    # A request that may go to a hosted pool does so if it would wait longer for own workers.
    overflow_after_s: Annotated[float, Field(ge=0, le=31_536_000)] = 2.0
    first_token_s: PositiveSeconds = 300.0  # accepted → first token
    inter_token_s: PositiveSeconds = 60.0
    total_s: PositiveSeconds = 3600.0
    # How long a stream whose worker was lost waits for a worker with the same weights, while others are alive.
    revision_wait_s: PositiveSeconds = 30.0
    # A worker without heartbeats for longer is lost. At least two heartbeats may be late.
    worker_silence_s: Annotated[float, Field(ge=2 * HEARTBEAT_PERIOD_S)] = HEARTBEAT_LIMIT_S
    # How long a request waits for the queue server to report what is left of its limits.
    limits_s: PositiveSeconds = REACH_LIMIT_S
    cancel_s: PositiveSeconds = 5.0  # wait for the exact counts of a stopped attempt
    # How long an answer waits if neither the queue nor the disk stores its record. Then it is sent anyway.
    row_s: PositiveSeconds = 10.0
    unread_s: PositiveSeconds = 30.0  # wait of an answer behind unread earlier ones on its connection
    headers_grace_s: PositiveSeconds = 0.5  # streams: how long a refusal by the worker can still become a 4xx
    # Period of ": queued position=… eta=…" comments, because load balancers close silent connections after 60-100 s.
    # 0: none, for parsers that reject comments.
    queued_comment_s: Annotated[float, Field(ge=0)] = 12.0
    # How long new requests are accepted after SIGTERM, while /readyz fails, until load balancers stop sending them.
    leave_s: Annotated[float, Field(ge=0, le=600)] | None = None  # default: LEAVE_S; of `spillway up`: 0
    shutdown_s: PositiveSeconds = 30.0  # how long running requests may continue after that


# A page's origin as browsers send it, or "*" for any.
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]


def _is_network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not an address or a network (such as 10.1.2.0/24): {error}") from error
    return text


class ConnectionSettings(Settings):
    """Limits of a connection before its client is authenticated. They need no proxy in front."""

    # Of one gateway. Beyond it, the longest idle connection is closed; if none is idle, the new one gets a 503.
    max_total: PositiveInt = 16_000
    # Addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted. Behind any other proxy
    # all clients share its address, also for limits and for failed logins.
    trusted_proxies: tuple[Annotated[str, AfterValidator(_is_network)], ...] = ("127.0.0.1", "::1")
    # More get a 429. Trusted proxies are exempt.
    max_per_address: PositiveInt = 2_000
    max_head_bytes: PositiveInt = 64 * 1024  # request line and headers; more get a 431
    max_headers: PositiveInt = 200
    head_s: PositiveSeconds = 10.0  # the connection, or the head's first byte → the whole head
    # Longest idle time between requests. Longer than any client or proxy keeps a connection (httpx 5 s, nginx 60 s, Go
    # 90 s, Google's load balancers 600 s): the sender must be the one that closes, or a request can cross the close.
    keep_alive_s: PositiveSeconds = 620.0


def _is_leave(text: str) -> str:
    reason = why_no_leave(text)
    if reason is not None:
        raise ValueError(reason)
    return text


class TenantSettings(Settings):
    """Bounds of one tenant at each gateway. Other tenants have weight 1 and no bounds.

    The weight of a key or team takes precedence.
    """

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # share of the workers, relative to other tenants
    max_in_flight: PositiveInt | None = None  # requests, including queued ones
    max_queued: PositiveInt | None = None  # requests that wait for a worker
    # Hosted APIs that its prompts may be sent to, unless its team or key sets this (db.accounts.principal).
    allow_hosted: tuple[Annotated[str, AfterValidator(_is_leave)], ...] | None = None


class HostedPoolSettings(Settings):
    """The gateway's settings of a pool of tier "hosted" (docs/how-to/hosted.md)."""

    provider: str
    models: tuple[str, ...]
    prices: dict[str, PriceSettings] = Field(default={})  # token prices that the provider charges, by model
    usd_per_day: Annotated[float, Field(gt=0, le=1_000_000)] | None = None  # caps, for UTC days and months
    usd_per_month: Annotated[float, Field(gt=0, le=1_000_000)] | None = None

    @property
    def caps(self) -> dict[Literal["day", "month"], float]:
        """Caps in USD by period."""
        caps: dict[Literal["day", "month"], float | None] = {"day": self.usd_per_day, "month": self.usd_per_month}
        return {period: usd for period, usd in caps.items() if usd is not None}


class QueueSettings(Settings):
    """Bounds of the streams, and their replicas in a cluster."""

    max_jobs: PositiveInt = 50_000
    max_mib: PositiveInt = 512
    usage_max_mib: PositiveInt = 2048
    replicas: Annotated[int, Field(ge=1, le=5)] = 1


class GatewaySettings(Settings):
    """All settings of one gateway process."""

    gateway_id: str  # unique among the live gateways; a subject token
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    public_url: str | None = None  # that links in error bodies begin with; None: they are relative
    nats_urls: tuple[str, ...]
    nats_credentials: Path | None = None  # the gateway's user at the queue server; None: from the URLs
    nats_ca_file: Path | None = None  # CA of the queue server's certificate; None: the system's CAs
    database_url: str
    data_dir: Path
    key_pepper: SecretStr
    models: dict[str, ModelSettings]
    tenants: dict[str, TenantSettings] = Field(default={})  # by tenant, or by the name of the API key
    hosted: dict[str, HostedPoolSettings] = Field(default={})  # by pool
    pools: dict[str, tuple[str, ...]] = Field(default={})  # names of the pools of each model
    only_hosted: frozenset[str] = frozenset()  # models without other pools, except trusted ones
    trusted: frozenset[str] = frozenset()  # models with trusted pools
    only_trusted: frozenset[str] = frozenset()  # models with only trusted pools
    by_messages: frozenset[str] = frozenset()  # models with pools that take messages instead of token ids
    only_by_messages: frozenset[str] = frozenset()  # and no others; they have a tokenizer for counting
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    connections: ConnectionSettings = ConnectionSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    queue: QueueSettings = QueueSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    payloads: PayloadSettings = PayloadSettings()
    batches: BatchSettings = BatchSettings()
    responses: ResponseSettings = ResponseSettings()
    max_attempts: PositiveInt = 6
    open_metrics: bool = False  # GET /metrics requires no API key
    share_prefix_cache: bool = False  # among all tenants, who can then detect others' prompts by timing
    cors_origins: tuple[Origin, ...] = ()  # of sites whose pages may call the API
    # An unknown field similar to a known one gets a 400, instead of being ignored and reported.
    strict_fields: bool = False

    @property
    def queues(self) -> list[str]:
        """One queue per model, and a second one for models with trusted pools."""
        return [*self.models, *(queue_of(model, trusted=True) for model in sorted(self.trusted))]

    @property
    def prices(self) -> dict[tuple[str, str], TokenPrice]:
        """Token prices by model and payee: CLIENTS for the operator's charges to clients, or a hosted pool."""
        clients = {(name, CLIENTS): model.price.tokens for name, model in self.models.items() if model.price}
        pools = {
            (model, pool): price.tokens
            for pool, hosted in self.hosted.items()
            for model, price in hosted.prices.items()
        }
        return clients | pools
