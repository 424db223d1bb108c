"""The settings of a worker: frozen, validated, passed down. Code below this layer never reads the environment."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from protocol import subjects
from protocol.process import (
    PORT_PLACE,
    HeaderSecret,
    HttpUrlText,
    PositiveInt,
    PositiveSeconds,
    Settings,
    TelemetrySettings,
)

MAX_PORT: Final = 65535


def _is_own_header(name: str) -> str:
    if name.lower() in _CONNECTION_HEADERS:
        raise ValueError(f"is set by the connection itself; not allowed: {', '.join(sorted(_CONNECTION_HEADERS))}")
    return name


def _is_proxy(value: SecretStr) -> SecretStr:
    address = re.fullmatch(
        r"https?://(?:[^/?#\s]*@)?(?:[\w.-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?/?", value.get_secret_value()
    )
    if address is None or not 1 <= int(address[1] or 1) <= MAX_PORT:
        raise ValueError(
            "must be http://host:port or https://host:port, optionally with user:password@; write / ? # @ in them as "
            "%2F %3F %23 %40"
        )
    return value


_CONNECTION_HEADERS: Final = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"), AfterValidator(_is_own_header)]
ProxyAddress = Annotated[SecretStr, AfterValidator(_is_proxy)]  # secret: it may hold a password
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]  # at most a year: timers reject infinity
PositiveMilliseconds = Annotated[float, Field(gt=0, le=3_600_000)]
Share = Annotated[float, Field(ge=0, lt=1)]
Task = Literal["generate", "embed", "score"]
NoticeKind = Literal["none", "aws", "gcp", "azure", "runpod", "salad"]
REALLOCATING: Final[frozenset[NoticeKind]] = frozenset({"salad"})  # replace a machine on request
DETECTED: Final = "auto"
HonouredField = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
]
Tier = Literal["spot", "reserved", "on-demand", "hosted"]


class LocalEngineSettings(Settings):
    """Spillway's own engine (package ``engine``). The engine chooses unset values and logs them at start."""

    kind: Literal["spillway"] = "spillway"
    path: str  # a model folder, or a name on the Hugging Face hub
    task: Task | None = None  # None: as the model's files say
    pooling: Literal["last", "mean", "cls"] | None = None  # for "embed"; None here and below: as the model's files say
    normalize: bool | None = None
    matryoshka: bool = False  # callers may request fewer dimensions even if the model's files do not say so
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # "int8": linear layers in 8-bit integers, on CPUs with AVX-512 VNNI. Uses a quarter of the memory, is faster, and
    # changes answers slightly: a pool without it does not resume answers of a pool with it, unless `revision` is equal.
    quantize: Literal["int8"] | None = None
    # The name of the weights. Workers of one revision resume each other's answers, regardless of precision and
    # quantization. None: a digest of the files and the precision, so that only identical workers do.
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None
    device: str = "auto"  # "cpu", "cuda", "cuda:1", …; auto: a GPU if torch can use one
    max_model_len: PositiveInt | None = None
    max_sequences: PositiveInt = 64
    max_batched_tokens: PositiveInt | None = None  # per step; None: 512 on a CPU, 2048 on a GPU
    kv_mib: PositiveInt | None = None
    # Share of a GPU's memory to use in all, if kv_mib does not set the size of the KV pool.
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    cuda_graphs: bool = True  # on a GPU: replay recorded steps when every sequence decodes
    # How many times the KV memory is promised to jobs, which rarely reach their maximum length. If they do, the newest
    # are preempted and computed again later.
    kv_overcommit: Annotated[float, Field(ge=1, le=16)] = 1.5
    prefix_cache: bool = True  # reuse the computation of equal prompt prefixes
    # How many tokens to draft per step where a text repeats itself (quotations, code). Never changes an answer.
    draft_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    # LoRA adapters, each served as a separate model: name → a PEFT folder, or a name on the hub.
    adapters: dict[str, str] = Field(default={})
    threads: PositiveInt | None = None
    # After this time without a request, the KV memory and the prefix cache are returned to the system; the next request
    # allocates the memory again. On CPUs only. None: never.
    sleep_after_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None


class ScriptedEngineSettings(Settings):
    """The scripted engine: deterministic text, chosen timing, chosen faults. For tests and benchmarks."""

    kind: Literal["scripted"] = "scripted"
    revision: str = ""  # changes the answers
    tokenizer: str = ""  # adds one token of this name, so that the tokenizer differs
    task: Task = "generate"
    dimensions: PositiveInt = 8  # of vectors, if the task makes them
    ttft_s: Seconds = 0.0
    inter_token_s: Seconds = 0.0
    max_sequences: PositiveInt = 256
    max_kv_tokens: PositiveInt = 1_000_000
    max_model_len: PositiveInt = 8192
    # Whether a prompt may also request faults.
    faults_from_prompt: bool = False


class ConnectionSettings(Settings):
    """How to reach an inference server, and the time limits."""

    url: HttpUrlText  # with or without the API's path: http://host:8000 and http://host:8000/v1 are the same
    api_key: HeaderSecret | None = None  # sent as a bearer token
    headers: dict[HeaderName, HeaderSecret] = Field(default={})  # sent with every request
    ca_file: Path | None = None  # trusted authorities; None: SSL_CERT_FILE, else certifi's
    client_cert_file: Path | None = None  # the client certificate, with its chain
    client_key_file: Path | None = None  # None: it is in client_cert_file
    proxy: ProxyAddress | None = None  # variables such as HTTPS_PROXY are not read
    max_sequences: PositiveInt | None = None  # None: what the server reports, else 64
    ready_s: Seconds = 900.0  # how long to wait for a starting server, which may load and compile
    connect_s: PositiveSeconds = 5.0
    silence_s: PositiveSeconds = 60.0  # how long a stream may be silent, before its first token too
    health_limit_s: PositiveSeconds = 10.0  # a server that is unhealthy for this long is lost
    # Maximum interval between checks of what a self-hosted server serves. It is also checked after each reconnect.
    facts_period_s: Annotated[float, Field(ge=1, le=86_400)] = 60.0

    @model_validator(mode="after")
    def _key_must_have_certificate(self) -> Self:
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ValueError("client_key_file: needs client_cert_file")
        if self.api_key is not None and "authorization" in map(str.lower, self.headers):
            raise ValueError("headers, api_key: both set the header 'authorization'")
        return self


class ServerEngineSettings(ConnectionSettings):
    """An inference server behind a URL, reached with token ids or text (docs/reference/engines.md)."""

    kind: Literal[
        "auto", "vllm", "llamacpp", "sglang", "lmdeploy", "trtllm", "tgi", "ollama", "triton", "openai_completions"
    ]  # "auto": detected from the server
    tokenizer: str  # the model's folder, or its tokenizer.json
    model: str | None = None  # as the server calls it; None: the model that it serves
    # The name of the weights, which servers do not report. Pools of one revision resume each other's answers.
    # None: derived from the server's kind and the model's name.
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None
    # None: what the server reports, else as many tokens as its sequences can have.
    max_model_len: PositiveInt | None = None
    max_kv_tokens: PositiveInt | None = None
    # Whether a server that takes text adds BOS itself. None: if the tokenizer does.
    adds_bos: bool | None = None
    # Whether to resume answers as text; a server that strips its output would lose a space. None: if the server's kind
    # or the model's vocabulary rules that out.
    continues: bool | None = None
    # Request fields that an "openai_completions" server supports. None: those of OpenAI's API.
    honours: tuple[HonouredField, ...] | None = None
    # The command that starts the server, if the worker owns it. "{port}", here and in `url`, becomes a free port, which
    # is also in the variable PORT.
    exec: str | None = None
    exec_stop_s: Seconds = 10.0  # between its SIGTERM and its SIGKILL
    exec_restarts: Annotated[int, Field(ge=0)] = 5  # within half an hour; above that, the worker exits with an error

    @model_validator(mode="after")
    def _command_must_fit(self) -> Self:
        try:
            words = None if self.exec is None else shlex.split(self.exec)
        except ValueError as error:
            raise ValueError(f"exec: {error}") from error
        if words == []:
            raise ValueError("exec: must name a command")
        if (PORT_PLACE in self.url) != (PORT_PLACE in (self.exec or "")):
            raise ValueError(f"url, exec: {PORT_PLACE} must be in both or in neither")
        return self


class VllmInProcessSettings(Settings):
    """vLLM's engine without its server: AsyncLLM in the worker's own process (docs/reference/engines.md)."""

    kind: Literal["vllm_inprocess"]
    model: str  # a model folder, or a name on the Hugging Face hub
    tokenizer: str = Field(default_factory=lambda known: known["model"])  # a folder; required if `model` is not one
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None  # as ServerEngineSettings.revision
    max_model_len: PositiveInt | None = None  # None, here and below: what vLLM reports
    max_sequences: PositiveInt | None = None
    max_kv_tokens: PositiveInt | None = None
    # vLLM's AsyncEngineArgs by name: tensor_parallel_size, quantization, …
    engine_args: dict[str, Any] = Field(default={})
    silence_s: PositiveSeconds = 60.0  # how long a stream may be silent, before its first token too


TokenServerSettings = ServerEngineSettings | VllmInProcessSettings  # engines whose tokens come from another engine


class ChatEngineSettings(ConnectionSettings):
    """A server or a hosted API that takes messages and returns no token ids (docs/reference/engines.md)."""

    model: str  # as the server calls it
    # As ServerEngineSettings.revision. An answer is resumed with an assistant message, if the server takes one.
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None
    max_model_len: PositiveInt = 131_072  # prompt and output tokens of all running conversations: the limit for pulling
    max_output_tokens: PositiveInt | None = None  # for callers that set no limit; None: the server's default
    # A field that the API lacks is refused with a 400 that names it, or dropped and named in a response header.
    unsupported: Literal["refuse", "drop"] = "refuse"


class OpenAIChatSettings(ChatEngineSettings):
    """An API that speaks OpenAI's chat format."""

    kind: Literal["openai_chat"]
    # Differences between servers: see pool_worker.engines.chat_formats.openai_profiles.
    profile: Literal[
        "openai",
        "azure",
        "openrouter",
        "together",
        "groq",
        "deepseek",
        "mistral",
        "gemini",
        "ray",
        "openllm",
        "tgi",
        "vllm",
        "sglang",
    ]
    api_version: str = "2024-10-21"  # Azure OpenAI only

    @model_validator(mode="after")
    def _azure_asks_deployments(self) -> Self:
        if self.profile == "azure" and re.search(r"/openai/v\d\w*/*$", self.url):
            raise ValueError(
                "url: profile 'azure' needs /openai/deployments; for the API at /openai/v1, use profile 'openai'"
            )
        return self


class ClaudeSettings(ChatEngineSettings):
    """Anthropic's Messages API, at any provider."""

    api_version: str
    max_output_tokens: PositiveInt = 8192  # the API requires a limit
    thinks: bool = False  # adaptive thinking, sent as reasoning
    continues: bool = False  # whether the model continues an assistant message; newer models do not


class AnthropicSettings(ClaudeSettings):
    """Anthropic's Messages API at Anthropic's."""

    kind: Literal["anthropic"]
    url: HttpUrlText = "https://api.anthropic.com"
    # Newer versions do not know temperature, top_p and top_k; nor do newer models.
    api_version: Literal["2026-10-21", "2023-06-01"] = "2026-10-21"


class AwsSettings(ChatEngineSettings):
    """Amazon's APIs. Without an API key, requests are signed with credentials from AWS' default chain."""

    aws_region: Annotated[str, Field(pattern="^[a-z0-9-]+$")]
    aws_profile: str | None = None  # in ~/.aws; None: the environment or the machine's role


class BedrockSettings(AwsSettings):
    """Amazon Bedrock's ConverseStream."""

    kind: Literal["bedrock"]
    continues: bool = False  # whether the model continues an assistant message

    @model_validator(mode="before")
    @classmethod
    def _url_by_region(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"https://bedrock-runtime.{given.get('aws_region')}.amazonaws.com", **given}


class SageMakerSettings(AwsSettings):
    """An endpoint of Amazon SageMaker whose container speaks OpenAI's chat format."""

    kind: Literal["sagemaker"]
    endpoint: str  # the endpoint's name
    profile: Literal["vllm", "tgi", "sglang"] = "vllm"  # the server in the container, as OpenAIChatSettings.profile

    @model_validator(mode="before")
    @classmethod
    def _url_by_region(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"https://runtime.sagemaker.{given.get('aws_region')}.amazonaws.com", **given}


class GoogleSettings(ChatEngineSettings):
    """Google's Vertex AI, with credentials from Google's default chain."""

    project: Annotated[str, Field(pattern="^[a-z0-9:.-]+$")]
    location: Annotated[str, Field(pattern="^[a-z0-9-]+$")]  # a region, or "global"

    @model_validator(mode="before")
    @classmethod
    def _url_by_location(cls, given: dict[str, Any]) -> dict[str, Any]:
        prefix = "" if given.get("location") == "global" else f"{given.get('location')}-"
        return {"url": f"https://{prefix}aiplatform.googleapis.com", **given}


class VertexSettings(GoogleSettings):
    """Gemini on Vertex AI."""

    kind: Literal["vertex"]
    thinks: bool = False  # whether thinking is sent as reasoning


class VertexAnthropicSettings(ClaudeSettings, GoogleSettings):
    """Claude on Vertex AI."""

    kind: Literal["vertex_anthropic"]
    api_version: Literal["2026-10-21", "vertex-2023-10-16"] = "2026-10-21"  # as AnthropicSettings.api_version


# Engines that take messages.
AnyChatSettings = (
    OpenAIChatSettings
    | AnthropicSettings
    | BedrockSettings
    | SageMakerSettings
    | VertexSettings
    | VertexAnthropicSettings
)

EngineSettings = Annotated[
    LocalEngineSettings | ScriptedEngineSettings | ServerEngineSettings | VllmInProcessSettings | AnyChatSettings,
    Field(discriminator="kind"),
]


class GateSettings(Settings):
    """When a pool takes jobs of a model that a cheaper tier serves. Batch jobs never open the gate."""

    backlog_jobs: Annotated[int, Field(ge=0)] | None = None  # opens when more jobs than this wait
    oldest_s: Seconds | None = None  # opens when a job has waited longer


class WatchSettings(Settings):
    """When a node is too slow to stay, always at comparable load (docs/reference/engines.md)."""

    max_tpot_ms: PositiveMilliseconds | None = None  # for a single request; so is max_ttft_ms
    max_ttft_ms: PositiveMilliseconds | None = None  # for a prompt of 256 tokens
    max_slowdown: Annotated[float, Field(gt=1)] = 2.0  # against its own best at this load, and the pool's median
    slow_for_s: PositiveSeconds = 120.0
    start_limit_s: PositiveSeconds = 20.0  # how long to measure before taking jobs
    reallocate: bool = False  # ask the provider (see `notice`) for another machine before leaving
    # The fields below have no keys in spillway.toml.
    period_s: ClassVar[float] = 1.0
    window_s: ClassVar[float] = 30.0
    tpot_stretch: ClassVar[int] = 200  # gaps for a normal


class WorkerSettings(Settings):
    """Everything one worker process needs."""

    worker_id: str  # unique among live workers; a subject token
    pool: str
    machine: str = ""  # the machine that the fleet controller launched it on; "": none
    provider: str = "local"
    region: str = "local"
    tier: Tier = "on-demand"
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    nats_urls: tuple[str, ...]
    nats_domain: str | None = None  # JetStream domain, if the queue is reached through a leaf node
    nats_credentials: Path | SecretStr | None = None  # NATS credentials; None: those in the URLs
    nats_ca_file: Path | None = None  # trusted authorities for the queue server; None: the system's
    models: tuple[str, ...]  # the model names that callers use
    trusted: bool = False  # it takes only jobs that demand trusted pools
    engine: EngineSettings
    batch_reserve: Share = 0.1  # share of the engine that batch jobs leave free for interactive ones
    gate: GateSettings | None = None  # None: it takes jobs whenever it has room
    drain_s: Seconds = 25.0  # how long running jobs may continue after SIGTERM or a notice
    watch: WatchSettings | None = None  # None: its speed is not judged
    notice: NoticeKind = "none"  # the provider that gives reclaim notices
    notice_url: HttpUrlText | None = None  # replaces the provider's own metadata server
    telemetry: TelemetrySettings = TelemetrySettings()
    # The fields below have no keys in spillway.toml.
    gateway_probe_period_s: float = 2.0
    gateway_gone_after_s: float = 5.0  # without a listener; a gateway that only reconnects is back sooner
    # How often an unreadable job is offered, with growing delays: about one minute in all.
    max_unreadable_deliveries: int = 40

    @model_validator(mode="after")
    def _provider_must_reallocate(self) -> Self:
        if self.watch is not None and self.watch.reallocate and self.notice not in REALLOCATING:
            raise ValueError(f"watch.reallocate: requires notice to be one of {', '.join(sorted(REALLOCATING))}")
        return self

    @property
    def is_hosted(self) -> bool:
        """True if its engine is a third party's API: prompts leave the installation."""
        return self.tier == subjects.HOSTED_TIER

    @property
    def asks_server(self) -> bool:
        """True if the engine is a separate server, which may be broken while this worker is healthy."""
        return isinstance(self.engine, ConnectionSettings | VllmInProcessSettings)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that it serves, for each of its models."""
        return (subjects.hosted_lane(self.pool),) if self.is_hosted else subjects.LANES

    @property
    def adapters(self) -> frozenset[str]:
        """The ``models`` that are adapters of the engine's model."""
        return frozenset(self.engine.adapters) if isinstance(self.engine, LocalEngineSettings) else frozenset()
