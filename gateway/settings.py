"""The gateway's settings: frozen, validated, passed down. Nothing below reads the environment."""

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

REACH_LIMIT_S: Final = 1.0  # past it the queue server is as good as away, for who waits for a limit


class S3Settings(Settings):
    """A bucket of Amazon S3, or of anything that speaks its API. What is None here AWS's own variables may say."""

    bucket: str
    prefix: str = ""  # of all names in it
    endpoint: HttpUrlText | None = None  # None: Amazon's
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None


class BatchSettings(Settings):
    """``[batches]``: where files are kept, for how long, and how much of the fleet batches may ask for."""

    s3: S3Settings | None = None  # None: the folder "files" below the data folder, which all gateways must share
    file_ttl_s: PositiveSeconds = 30 * 24 * 3600.0  # of every file, results included; a client may ask for less
    max_file_bytes: PositiveInt = 2 * 1024**3
    max_tenant_bytes: PositiveInt = 50 * 1024**3  # of a team's files together; its batches' results may exceed it
    max_tenant_files: PositiveInt = 10_000
    # At a time, of one gateway; more are told to come again. A tenant may have as many as it leaves free.
    max_uploads: PositiveInt = 16
    upload_silence_s: PositiveSeconds = 30.0  # between two parts of an upload
    # So much must come on the average of each window, not counting the time that the gateway itself takes.
    upload_min_bytes_per_s: PositiveInt = 4096
    upload_pace_s: PositiveSeconds = 30.0  # the window
    upload_s: PositiveSeconds = 3600.0
    max_lines: PositiveInt = 1_000_000  # of one batch
    max_line_bytes: PositiveInt = 4 * 1024**2
    max_tenant_batches: PositiveInt = 100  # that are not over yet
    max_running: PositiveInt = 8  # batches that one gateway feeds at a time
    max_open_lines: PositiveInt = 256  # of all of them together
    max_line_tries: PositiveInt = 4  # of a line that fails; refusals for want of room do not count
    max_message_batch_bytes: PositiveInt = 256 * 1024**2  # the body of POST /v1/messages/batches: all of its requests
    max_message_batch_requests: PositiveInt = 100_000
    lease_s: Annotated[float, Field(ge=0.5, le=600)] = 15.0  # a gateway that is gone for longer loses its batches
    commit_s: PositiveSeconds = 2.0  # how old a result may get in memory: a crash costs so much work
    poll_s: PositiveSeconds = 1.0  # between two looks for work to take
    grace_s: PositiveSeconds = 10.0  # for the index, or open lines, of a batch that was stopped to end
    retry_s: PositiveSeconds = 5.0  # after a run that failed; one that fails in the same way three times is given up


class IdempotencySettings(Settings):
    """Requests that carry an ``Idempotency-Key``."""

    reattach_s: PositiveSeconds = 30.0  # how long one continues without a reader
    keep_s: PositiveSeconds = 600.0  # how long its answer can be replayed
    max_runs: PositiveInt = 10_000  # running and kept; past a bound, the oldest kept answers go
    max_bytes: PositiveInt = 256 * 1024 * 1024  # of their answers


class ResponseSettings(Settings):
    """``[responses]``: which responses are kept, for how long, and how much of them."""

    store_by_default: bool = False  # whether a request that does not say ``store`` is stored, as OpenAI does it
    keep_s: PositiveSeconds = 30 * 24 * 3600.0
    events_s: PositiveSeconds = 24 * 3600.0  # how long the events of a background response can be read again
    max_response_bytes: PositiveInt = 4 * 1024**2  # of one, with its conversation, compressed
    max_tenant_bytes: PositiveInt = 256 * 1024**2
    max_tenant_responses: PositiveInt = 10_000
    take_over_s: PositiveSeconds = 2.0  # between two looks for responses whose gateway is gone
    retry_s: PositiveSeconds = 5.0  # before a response that could not be made is tried again
    silence_s: PositiveSeconds = 10.0  # a gateway that is connected and does not answer for longer is gone, too


Usd = Annotated[float, Field(ge=0, le=1_000_000)]


class PriceSettings(Settings):
    """Token prices in USD per million. Cached tokens are a part of prompt tokens."""

    prompt: Usd = 0.0
    cached: Usd | None = None  # default: like other prompt tokens
    completion: Usd = 0.0

    @property
    def tokens(self) -> TokenPrice:
        """Return the price as the price book has it."""
        cached = self.prompt if self.cached is None else self.cached
        return TokenPrice(*(nano_usd(usd) for usd in (self.prompt, cached, self.completion)))


class ModelSettings(ModelTokenSettings):
    """One model that callers may name. It exists because it is configured, not because a worker is alive."""

    price: PriceSettings | None = None  # what callers are charged; None: nothing, and budgets do not count it


class LimitSettings(Settings):
    """Limits of one gateway, checked before a request costs anything."""

    max_body_bytes: PositiveInt = 4 * 1024 * 1024
    # Of all bodies that are being read. No tenant holds more of it than they leave; what finds no room waits.
    max_reading_bytes: PositiveInt = 256 * 1024 * 1024
    max_messages: PositiveInt = 2048
    max_prompt_tokens: PositiveInt | None = None  # beyond the model's own context length
    max_prompt_logprobs: PositiveInt = 131_072  # told by one answer, candidates counted: some 20 MB in the gateway
    max_total_tokens: PositiveInt | None = None  # prompt + max_tokens x n
    max_choices: PositiveInt = 16
    max_prompts: PositiveInt = 128  # of one completion; each is a request of its own in all other limits
    max_in_flight: PositiveInt = 10_000  # requests held by this gateway, queued ones included
    # Of each model. Batch jobs see all that waits, interactive ones only what is interactive: no batch keeps them out.
    max_queued_requests: PositiveInt = 8_000  # that wait for a worker, of all gateways
    max_queued_prompt_tokens: PositiveInt = 20_000_000  # of this gateway's waiting requests
    max_queued_bytes: PositiveInt = 128 * 1024 * 1024  # of their jobs, prompts and all
    max_queued_without_workers: PositiveInt = 5_000  # that wait while no worker of the model is alive
    # Embeddings that this gateway waits for or is sending: a request of 2048 inputs may have 32 MiB of them.
    max_vector_bytes: PositiveInt = 512 * 1024 * 1024
    # Of answers that their callers have not read, or that are not complete yet; one tenant has a quarter at most.
    max_unread_bytes: PositiveInt = 512 * 1024 * 1024
    max_unpublished_usage: PositiveInt = 50_000  # records kept in memory while the queue server is away


LEAVE_S: Final = 5.0  # longer than a load balancer takes that looks every two seconds, twice


class TimeoutSettings(Settings):
    """Time limits of a request in each state; each has its own error."""

    body_s: PositiveSeconds = 60.0  # headers → the whole request body
    queue_wait_s: PositiveSeconds = 600.0
    # A request that may go to a hosted pool does so where our own workers would let it wait for longer.
    overflow_after_s: Annotated[float, Field(ge=0, le=31_536_000)] = 2.0
    first_token_s: PositiveSeconds = 300.0  # accepted → first token
    inter_token_s: PositiveSeconds = 60.0
    total_s: PositiveSeconds = 3600.0
    # A stream whose worker is lost continues with the same weights only: so long it waits for them while others run.
    revision_wait_s: PositiveSeconds = 30.0
    # A worker whose heartbeats are missing for longer is lost; two of them, at least, may be late.
    worker_silence_s: Annotated[float, Field(ge=2 * HEARTBEAT_PERIOD_S)] = HEARTBEAT_LIMIT_S
    # How long a request waits for the queue server to say what is left of its limits, which others may have used up.
    limits_s: PositiveSeconds = REACH_LIMIT_S
    cancel_s: PositiveSeconds = 5.0  # how long the exact counts of a stopped attempt are waited for
    # An accepted request is answered: where neither queue nor disk stores its row, it waits so long, and no longer.
    row_s: PositiveSeconds = 10.0
    unread_s: PositiveSeconds = 30.0  # how long an answer waits behind earlier ones on its connection that nobody reads
    headers_grace_s: PositiveSeconds = 0.5  # streaming: how long a refusal by the worker may still become a 4xx
    # Period of ": queued position=… eta=…" comments; load balancers cut silence at 60-100 s. 0: none, for parsers that
    # choke on them.
    queued_comment_s: Annotated[float, Field(ge=0)] = 12.0
    # After SIGTERM, while /readyz says no, new requests are still taken for so long: load balancers turn away first.
    leave_s: Annotated[float, Field(ge=0, le=600)] | None = None  # default: LEAVE_S; of `spillway up`: 0
    shutdown_s: PositiveSeconds = 30.0  # how long running requests may go on after that


# A page's origin as browsers send it, or "*": any.
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]


def _is_network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no address and no network (such as 10.1.2.0/24): {error}") from error
    return text


class ConnectionSettings(Settings):
    """Limits of a connection before its client is known. They need no proxy in front."""

    # Of one gateway; past it the one that has been idle for longest is closed, or else the new one gets a 503.
    max_total: PositiveInt = 16_000
    # Addresses and networks of the proxies in front, who are believed what X-Forwarded-For and X-Forwarded-Proto say. A
    # proxy that is not named here is itself the address that everybody has, also for limits and wrong passwords.
    trusted_proxies: tuple[Annotated[str, AfterValidator(_is_network)], ...] = ("127.0.0.1", "::1")
    # More are a 429. Proxies that are trusted are excepted.
    max_per_address: PositiveInt = 2_000
    max_head_bytes: PositiveInt = 64 * 1024  # request line and headers; more is a 431
    max_headers: PositiveInt = 200
    head_s: PositiveSeconds = 10.0  # the connection, or the head's first byte → the whole head
    # How long one may be idle between requests. Longer than any client or proxy keeps one (httpx 5 s, nginx 60 s, Go
    # 90 s, Google's load balancers 600 s): who closes must be the one who sends, or a request can cross the closing.
    keep_alive_s: PositiveSeconds = 620.0


def _is_leave(text: str) -> str:
    reason = why_no_leave(text)
    if reason is not None:
        raise ValueError(reason)
    return text


class TenantSettings(Settings):
    """Bounds of one tenant at each gateway. Tenants that are not named have weight 1 and no bounds of their own.

    A weight that a team or a key has of its own comes first.
    """

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # share of the workers, against other tenants'
    max_in_flight: PositiveInt | None = None  # requests, queued ones included
    max_queued: PositiveInt | None = None  # requests that wait for a worker
    # Which hosted APIs its prompts may go to, where its team or key says nothing itself (db.accounts.principal).
    allow_hosted: tuple[Annotated[str, AfterValidator(_is_leave)], ...] | None = None


class HostedPoolSettings(Settings):
    """The gateway's settings of a pool of tier "hosted" (docs/how-to/hosted.md)."""

    provider: str
    models: tuple[str, ...]
    prices: dict[str, PriceSettings] = Field(default={})  # what its tokens cost us, by model
    usd_per_day: Annotated[float, Field(gt=0, le=1_000_000)] | None = None  # its caps, in days and months of UTC
    usd_per_month: Annotated[float, Field(gt=0, le=1_000_000)] | None = None

    @property
    def caps(self) -> dict[Literal["day", "month"], float]:
        """USD by period."""
        caps: dict[Literal["day", "month"], float | None] = {"day": self.usd_per_day, "month": self.usd_per_month}
        return {period: usd for period, usd in caps.items() if usd is not None}


class QueueSettings(Settings):
    """Bounds of the streams, and how many copies a cluster keeps."""

    max_jobs: PositiveInt = 50_000
    max_mib: PositiveInt = 512
    usage_max_mib: PositiveInt = 2048
    replicas: Annotated[int, Field(ge=1, le=5)] = 1


class GatewaySettings(Settings):
    """Everything one gateway process needs."""

    gateway_id: str  # unique among the live gateways; a subject token
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    nats_urls: tuple[str, ...]
    nats_credentials: Path | None = None  # our user at the queue server; None: what the URLs say
    nats_ca_file: Path | None = None  # who vouches for the queue server's certificate; None: the usual authorities
    database_url: str
    data_dir: Path
    key_pepper: SecretStr
    models: dict[str, ModelSettings]
    tenants: dict[str, TenantSettings] = Field(default={})  # by tenant, or by the name of the API key
    hosted: dict[str, HostedPoolSettings] = Field(default={})  # by pool
    pools: dict[str, tuple[str, ...]] = Field(default={})  # by model the names of those that serve it
    only_hosted: frozenset[str] = frozenset()  # models that no other pool serves, trusted ones aside
    trusted: frozenset[str] = frozenset()  # models with trusted pools
    only_trusted: frozenset[str] = frozenset()  # models that no other pool serves
    by_messages: frozenset[str] = frozenset()  # models with pools that take messages instead of token ids
    only_by_messages: frozenset[str] = frozenset()  # and with no others: these have a tokenizer, to count by
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
    open_metrics: bool = False  # GET /metrics takes no API key
    share_prefix_cache: bool = False  # among all tenants, who then can find out what others have asked
    cors_origins: tuple[Origin, ...] = ()  # of other sites' pages that may call the API from a browser
    strict_fields: bool = False  # an unknown field that is near a known one is a 400, instead of ignored and named

    @property
    def queues(self) -> list[str]:
        """One for each model, and for those with trusted pools another one."""
        return [*self.models, *(queue_of(model, trusted=True) for model in sorted(self.trusted))]

    @property
    def prices(self) -> dict[tuple[str, str], TokenPrice]:
        """Token prices by model and payee: us by clients, or a hosted pool by us."""
        callers = {(name, CLIENTS): model.price.tokens for name, model in self.models.items() if model.price}
        pools = {
            (model, pool): price.tokens
            for pool, hosted in self.hosted.items()
            for model, price in hosted.prices.items()
        }
        return callers | pools
