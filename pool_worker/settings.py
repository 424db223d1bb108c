"""The settings of a worker: frozen, validated, passed down. Nothing below reads the environment."""

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
            "must be http://host:port or https://host:port, perhaps with user:password@, where / ? # @ are written "
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
ProxyAddress = Annotated[SecretStr, AfterValidator(_is_proxy)]  # its password is a secret
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]  # a year: timers take no infinity
PositiveMilliseconds = Annotated[float, Field(gt=0, le=3_600_000)]
Share = Annotated[float, Field(ge=0, lt=1)]
Task = Literal["generate", "embed", "score"]
NoticeKind = Literal["none", "aws", "gcp", "azure", "runpod", "salad"]
REALLOCATING: Final[frozenset[NoticeKind]] = frozenset({"salad"})  # who moves a container to another machine when asked
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
    """Our own engine (package ``engine``). Unset values are chosen by the engine and printed at start."""

    kind: Literal["spillway"] = "spillway"
    path: str  # a model folder, or a name on the Hugging Face hub
    task: Task | None = None  # None: what the model's files say that it is for
    pooling: Literal["last", "mean", "cls"] | None = None  # of "embed"; None: likewise, as is the next
    normalize: bool | None = None
    matryoshka: bool = False  # callers may ask for fewer dimensions, even if the model's files do not say so
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # "int8": linear layers in 8-bit integers, on CPUs with AVX-512 VNNI: a quarter of the memory, faster, and slightly
    # other answers: a pool without it does not go on with what one with it has begun, unless `revision` says so.
    quantize: Literal["int8"] | None = None
    # What the weights are called. Workers of one name go on with each other's answers, whatever their precision and
    # quantisation; None: a digest of the files and of what they are computed in, so that only equal ones do.
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None
    device: str = "auto"  # "cpu", "cuda", "cuda:1", …; auto: a GPU if torch can use one
    max_model_len: PositiveInt | None = None
    max_sequences: PositiveInt = 64
    max_batched_tokens: PositiveInt | None = None  # per step; unset: 512 on a CPU, 2048 on a GPU
    kv_mib: PositiveInt | None = None
    # Of a GPU's memory: how much is used in all, if kv_mib does not say how much the KV pool may take.
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    cuda_graphs: bool = True  # on a GPU, replay recorded steps where every sequence decodes
    # How many times the KV memory is promised to jobs, which rarely become as long as they may. Where they do, the
    # newest give way and are computed again.
    kv_overcommit: Annotated[float, Field(ge=1, le=16)] = 1.5
    prefix_cache: bool = True  # prompts that begin like an earlier one are not computed again
    # How many tokens to guess and compute beside the next one where a text repeats itself (quotations, code); never
    # changes an answer.
    draft_tokens: Annotated[int, Field(ge=0, le=64)] = 0
    # LoRA adapters of this model, each served as a model of its own: its name → a PEFT folder, or its name on the hub.
    adapters: dict[str, str] = Field(default={})
    threads: PositiveInt | None = None
    # After so long without a request the KV memory and the prefix cache go back to the system; the next request takes
    # the memory again. On CPUs only. None: never.
    sleep_after_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = None


class ScriptedEngineSettings(Settings):
    """The scripted engine: deterministic text, chosen timing, chosen faults. For tests and benchmarks."""

    kind: Literal["scripted"] = "scripted"
    revision: str = ""  # answers differ by it
    tokenizer: str = ""  # another one than usual: it has one token more, of this name
    task: Task = "generate"
    dimensions: PositiveInt = 8  # of the vectors, if those are its task
    ttft_s: Seconds = 0.0
    inter_token_s: Seconds = 0.0
    max_sequences: PositiveInt = 256
    max_kv_tokens: PositiveInt = 1_000_000
    max_model_len: PositiveInt = 8192
    # Faults may also be asked for by a prompt, but only where this is on.
    faults_from_prompt: bool = False


class ConnectionSettings(Settings):
    """The way to an inference server, and the limits of waiting for it."""

    url: HttpUrlText  # with or without the API's own path: http://host:8000 and http://host:8000/v1 are the same
    api_key: HeaderSecret | None = None  # sent as a bearer token
    headers: dict[HeaderName, HeaderSecret] = Field(default={})  # sent with every request
    ca_file: Path | None = None  # who vouches for its certificate; None: SSL_CERT_FILE, else the usual authorities
    client_cert_file: Path | None = None  # a certificate that it asks for, and the certificate's chain
    client_key_file: Path | None = None  # None: it is in the same file
    proxy: ProxyAddress | None = None  # the way there; variables such as HTTPS_PROXY are not read
    max_sequences: PositiveInt | None = None  # None: what the server tells, and where it does not, 64
    ready_s: Seconds = 900.0  # how long a starting server is waited for: it may have to load and compile
    connect_s: PositiveSeconds = 5.0
    silence_s: PositiveSeconds = 60.0  # how long a stream may be silent, before its first token too
    health_limit_s: PositiveSeconds = 10.0  # a server that is not healthy for so long is lost
    # How often at least a server of one's own is asked what it serves, beside each time that it was away.
    facts_period_s: Annotated[float, Field(ge=1, le=86_400)] = 60.0

    @model_validator(mode="after")
    def _key_must_have_certificate(self) -> Self:
        if self.client_key_file is not None and self.client_cert_file is None:
            raise ValueError("client_key_file: needs client_cert_file")
        if self.api_key is not None and "authorization" in map(str.lower, self.headers):
            raise ValueError("headers, api_key: both set the header 'authorization'")
        return self


class ServerEngineSettings(ConnectionSettings):
    """An inference server that is asked in token ids, or in text, by its URL (docs/reference/engines.md)."""

    kind: Literal[
        "auto", "vllm", "llamacpp", "sglang", "lmdeploy", "trtllm", "tgi", "ollama", "triton", "openai_completions"
    ]  # "auto": the server is asked
    tokenizer: str  # the model's folder, or its tokenizer.json: what prompts are counted and answers are read with
    model: str | None = None  # as the server calls it; None: what it serves
    # A server does not tell what weights it has: pools of one revision go on with what another of them has begun. None:
    # those of servers of this kind that call the model so.
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None
    # None: what the server tells, and where it does not, as many tokens as its sequences can have.
    max_model_len: PositiveInt | None = None
    max_kv_tokens: PositiveInt | None = None
    # Whether a server that is asked in text begins what it reads with BOS by itself. None: if the tokenizer does.
    adds_bos: bool | None = None
    # Whether begun answers are gone on with in text: a server that strips what it says would lose a blank. None: where
    # its kind, or the model's vocabulary, makes sure that it does not.
    continues: bool | None = None
    # What "openai_completions" honours of the request's fields, by their names; None: what OpenAI's API has.
    honours: tuple[HonouredField, ...] | None = None
    # The command that starts the server, where that is the worker's business; "{port}", here and in `url`, becomes a
    # free port, which the variable PORT holds, too.
    exec: str | None = None
    exec_stop_s: Seconds = 10.0  # between its SIGTERM and its SIGKILL
    exec_restarts: Annotated[int, Field(ge=0)] = 5  # within half an hour; one more, and the worker ends with an error

    @model_validator(mode="after")
    def _command_must_fit(self) -> Self:
        try:
            words = None if self.exec is None else shlex.split(self.exec)
        except ValueError as error:
            raise ValueError(f"exec: {error}") from error
        if words == []:
            raise ValueError("exec: names no command")
        if (PORT_PLACE in self.url) != (PORT_PLACE in (self.exec or "")):
            raise ValueError(f"url, exec: {PORT_PLACE} must be in both or in neither")
        return self


class VllmInProcessSettings(Settings):
    """vLLM's engine without its server: AsyncLLM in the worker's own process (docs/reference/engines.md)."""

    kind: Literal["vllm_inprocess"]
    model: str  # a model's folder, or its name on the Hugging Face hub
    tokenizer: str = Field(default_factory=lambda known: known["model"])  # a folder, where `model` is none
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None  # as ServerEngineSettings.revision
    max_model_len: PositiveInt | None = None  # None, here and below: what vLLM finds
    max_sequences: PositiveInt | None = None
    max_kv_tokens: PositiveInt | None = None
    # Of vLLM's AsyncEngineArgs, by their names: tensor_parallel_size, quantization, …
    engine_args: dict[str, Any] = Field(default={})
    silence_s: PositiveSeconds = 60.0  # how long a stream may be silent, before its first token too


TokenServerSettings = ServerEngineSettings | VllmInProcessSettings  # those whose tokens are asked of another's engine


class ChatEngineSettings(ConnectionSettings):
    """A server or a hosted API that takes messages and gives no token ids (docs/reference/engines.md)."""

    model: str  # as the server calls it
    # As ServerEngineSettings.revision; a begun answer continues by an assistant's message, where the server takes one.
    revision: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] | None = None
    max_model_len: PositiveInt = 131_072  # prompt and output tokens of one conversation: what the worker pulls up to
    max_output_tokens: PositiveInt | None = None  # where the caller names no limit; None: the server's own
    # What becomes of a field that the API lacks: a 400 that names it, or it is left out, which a header tells.
    unsupported: Literal["refuse", "drop"] = "refuse"


class OpenAIChatSettings(ChatEngineSettings):
    """An API that speaks OpenAI's chat format."""

    kind: Literal["openai_chat"]
    # What differs there: pool_worker.engines.chat_formats.openai_profiles.
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
    api_version: str = "2024-10-21"  # of Azure OpenAI

    @model_validator(mode="after")
    def _azure_asks_deployments(self) -> Self:
        if self.profile == "azure" and re.search(r"/openai/v\d\w*/*$", self.url):
            raise ValueError("url: the profile 'azure' asks /openai/deployments; for the API at /openai/v1: 'openai'")
        return self


class ClaudeSettings(ChatEngineSettings):
    """Anthropic's Messages API, at any provider."""

    api_version: str
    max_output_tokens: PositiveInt = 8192  # the API requires a limit
    thinks: bool = False  # whether it is asked to think as it sees fit, which is sent as reasoning
    continues: bool = False  # whether the model continues an assistant's message: newer ones do not


class AnthropicSettings(ClaudeSettings):
    """Anthropic's Messages API at Anthropic's."""

    kind: Literal["anthropic"]
    url: HttpUrlText = "https://api.anthropic.com"
    # The newer one knows no temperature, top_p and top_k; newer models do not either.
    api_version: Literal["2026-10-21", "2023-06-01"] = "2026-10-21"


class AwsSettings(ChatEngineSettings):
    """Amazon's APIs: requests are signed with the credentials that AWS' own chain finds, if there is no API key."""

    aws_region: Annotated[str, Field(pattern="^[a-z0-9-]+$")]
    aws_profile: str | None = None  # of ~/.aws; None: what the environment says, or the machine's role


class BedrockSettings(AwsSettings):
    """Amazon Bedrock's ConverseStream."""

    kind: Literal["bedrock"]
    continues: bool = False  # whether the model continues an assistant's message

    @model_validator(mode="before")
    @classmethod
    def _url_by_region(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"https://bedrock-runtime.{given.get('aws_region')}.amazonaws.com", **given}


class SageMakerSettings(AwsSettings):
    """An endpoint of Amazon SageMaker whose container speaks OpenAI's chat format."""

    kind: Literal["sagemaker"]
    endpoint: str  # its name
    profile: Literal["vllm", "tgi", "sglang"] = "vllm"  # which server the container has, as OpenAIChatSettings.profile

    @model_validator(mode="before")
    @classmethod
    def _url_by_region(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"https://runtime.sagemaker.{given.get('aws_region')}.amazonaws.com", **given}


class GoogleSettings(ChatEngineSettings):
    """Google's Vertex AI, with the credentials that Google's own chain finds."""

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
    thinks: bool = False  # whether its thinking is sent as reasoning


class VertexAnthropicSettings(ClaudeSettings, GoogleSettings):
    """Claude on Vertex AI."""

    kind: Literal["vertex_anthropic"]
    api_version: Literal["2026-10-21", "vertex-2023-10-16"] = "2026-10-21"  # as AnthropicSettings.api_version


# Those of pools that take messages.
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
    """Conditions on which a pool takes jobs of a model that a cheaper tier serves. Batch jobs never open the gate."""

    backlog_jobs: Annotated[int, Field(ge=0)] | None = None  # when more than so many wait
    oldest_s: Seconds | None = None  # when one has waited for longer


class WatchSettings(Settings):
    """Conditions on which a node is too slow to stay, always at comparable load (docs/reference/engines.md)."""

    max_tpot_ms: PositiveMilliseconds | None = None  # of one request alone, as are the next
    max_ttft_ms: PositiveMilliseconds | None = None  # of a prompt of 256 tokens
    max_slowdown: Annotated[float, Field(gt=1)] = 2.0  # beside its own best at this load, and the pool's median
    slow_for_s: PositiveSeconds = 120.0
    start_limit_s: PositiveSeconds = 20.0  # how long it may be measured before it takes jobs
    reallocate: bool = False  # ask the provider for another machine before leaving (`notice` names it)
    # For these, spillway.toml has no keys.
    period_s: ClassVar[float] = 1.0
    window_s: ClassVar[float] = 30.0
    tpot_stretch: ClassVar[int] = 200  # gaps that make a normal


class WorkerSettings(Settings):
    """Everything one worker process needs."""

    worker_id: str  # unique among the live workers; a subject token
    pool: str
    machine: str = ""  # that the fleet controller launched it on; "": none
    provider: str = "local"
    region: str = "local"
    tier: Tier = "on-demand"
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0
    nats_urls: tuple[str, ...]
    nats_domain: str | None = None  # of JetStream, where the queue is reached through a leaf node
    nats_credentials: Path | SecretStr | None = None  # our user at the queue server; None: what the URLs say
    nats_ca_file: Path | None = None  # who vouches for the queue server's certificate; None: the usual authorities
    models: tuple[str, ...]  # the names under which callers know what this engine serves
    trusted: bool = False  # it takes the jobs that demand trusted pools, and no others
    engine: EngineSettings
    batch_reserve: Share = 0.1  # of the engine, which batch jobs leave free for interactive ones
    gate: GateSettings | None = None  # None: it takes jobs whenever it has room
    drain_s: Seconds = 25.0  # how long running jobs may continue after SIGTERM or a notice
    watch: WatchSettings | None = None  # None: its speed is not judged
    notice: NoticeKind = "none"  # who says that the machine will be taken away, and how
    notice_url: HttpUrlText | None = None  # instead of the provider's own metadata server
    telemetry: TelemetrySettings = TelemetrySettings()
    # From here on, spillway.toml has no keys.
    gateway_probe_period_s: float = 2.0
    gateway_gone_after_s: float = 5.0  # without a listener; one that only reconnects is back sooner
    # A job that cannot be read here is offered again so often, later each time: for about a minute in all.
    strange_deliveries: int = 40

    @model_validator(mode="after")
    def _provider_must_reallocate(self) -> Self:
        if self.watch is not None and self.watch.reallocate and self.notice not in REALLOCATING:
            raise ValueError(f"watch.reallocate: needs a notice of {', '.join(sorted(REALLOCATING))}")
        return self

    @property
    def is_hosted(self) -> bool:
        """True if its engine is somebody else's API: what goes there leaves the installation."""
        return self.tier == subjects.HOSTED_TIER

    @property
    def asks_server(self) -> bool:
        """True if the engine is another's, which may be broken while this worker is well."""
        return isinstance(self.engine, ConnectionSettings | VllmInProcessSettings)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes that it serves, of each of its models."""
        return (subjects.hosted_lane(self.pool),) if self.is_hosted else subjects.LANES

    @property
    def adapters(self) -> frozenset[str]:
        """Those of ``models`` that are adapters of the engine's model."""
        return frozenset(self.engine.adapters) if isinstance(self.engine, LocalEngineSettings) else frozenset()
