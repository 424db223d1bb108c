"""spillway.toml: models, pools, prices and limits in one file, validated together with the environment.

Environment variables take precedence over the file. Their names are ``SPILLWAY_`` and the key's path joined by ``__``:
``SPILLWAY_GATEWAY__PORT=9000``, ``SPILLWAY_NATS__URLS='["tls://queue:4222"]'``. Only this module reads the environment.
Processes get frozen settings from the methods of ``Config``.
"""

import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource
from pydantic_settings.exceptions import SettingsError
from pydantic_settings.sources import JsonConfigSettingsSource

from console.settings import ConsoleSettings, LoginSettings
from db.money import CLIENTS, MACHINE, ConfiguredPrice, Price, nano_usd
from db.url import DatabaseUrl
from fleet.settings import FleetSettings
from gateway.settings import (
    BatchSettings,
    ConnectionSettings,
    GatewaySettings,
    IdempotencySettings,
    LimitSettings,
    ModelSettings,
    Origin,
    PriceSettings,
    ResponseSettings,
    TenantSettings,
    TimeoutSettings,
)
from ledger.settings import LedgerSettings, PayloadSettings
from ledger.webhooks.settings import WebhookSettings
from pool_worker.settings import LocalEngineSettings, ScriptedEngineSettings, WorkerSettings
from protocol.errors import ExpectedError
from protocol.process import HostText, PositiveInt, PositiveSeconds, Settings, TelemetrySettings
from spillway import ROOMS
from spillway.children import resolved_config_path
from spillway.config_problems import explain, keys_of, source_of
from spillway.config_values import (
    ENV_PREFIX,
    MappingEnvSource,
    Problem,
    masked_secrets,
    merge,
    spelled_as,
    unexpanded,
)
from spillway.nats_accounts import of_pool
from spillway.nats_section import NatsSection, worker_id
from spillway.otel_variables import is_disabled, telemetry_defaults
from spillway.pool_section import ModelName, PoolSettings, gateway_view, only_by_messages

DEFAULT_CONFIG_NAME: Final = "spillway.toml"
DEMO_MODEL_NAME: Final = "spillway-demo"
DEMO_MODEL_PATH: Final = ROOMS / "models" / DEMO_MODEL_NAME


class ConfigError(ExpectedError):
    """The configuration is invalid; the message names every invalid key."""


class GatewaySection(Settings):
    """``[gateway]``: address, limits and timeouts."""

    host: HostText = "127.0.0.1"  # "::": all IPv4 and IPv6 addresses
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free port
    max_attempts: PositiveInt = 6
    open_metrics: bool = False
    share_prefix_cache: bool = False
    cors_origins: tuple[Origin, ...] = ()
    strict_fields: bool = False
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    connections: ConnectionSettings = ConnectionSettings()
    idempotency: IdempotencySettings = IdempotencySettings()


class DatabaseSection(Settings):
    """``[database]``: the database of usage and keys. Default: SQLite in the data folder."""

    url: DatabaseUrl | None = None


class AuthSection(LoginSettings):
    """``[auth]``: the pepper of API keys, and the login to the pages."""

    pepper: SecretStr | None = None  # hashed with every API key. Default: generated once and kept in the data folder


class LedgerSection(Settings):
    """``[ledger]``: the writer's batches, and the retention of rows."""

    batch_records: PositiveInt = 500
    batch_wait_s: PositiveSeconds = 0.25
    retention_days: PositiveInt | None = None  # of requests and attempts; rollups are kept. None: no limit


class PayloadsSection(PayloadSettings):
    """``[payloads]``: storage of requests and answers, for clients that consent.

    Its key comes from the environment (``SPILLWAY_PAYLOADS__KEY``) or from a file, never from spillway.toml.
    """

    key_file: Path | None = None  # file that holds the key; used instead of SPILLWAY_PAYLOADS__KEY


class Config(BaseSettings):
    """The content of spillway.toml."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    data_dir: Path = Path("data")
    gateway: GatewaySection = GatewaySection()
    nats: NatsSection = NatsSection()
    database: DatabaseSection = DatabaseSection()
    auth: AuthSection = AuthSection()
    console: ConsoleSettings = ConsoleSettings()
    ledger: LedgerSection = LedgerSection()
    telemetry: TelemetrySettings = TelemetrySettings()
    payloads: PayloadsSection = PayloadsSection()
    webhooks: WebhookSettings = WebhookSettings()
    batches: BatchSettings = BatchSettings()
    responses: ResponseSettings = ResponseSettings()
    models: Annotated[dict[ModelName, ModelSettings], Field(min_length=1)]
    tenants: dict[str, TenantSettings] = {}  # by name of the API key
    fleet: FleetSettings = FleetSettings()
    pools: dict[str, PoolSettings] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003  # pydantic-settings fixes the signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only the values that ``load_config`` passes: it reads the file and the environment."""
        return (init_settings,)

    @model_validator(mode="after")
    def _names_must_agree(self) -> "Config":
        names = list(self.models)
        for model in self.models.values():
            names.extend(model.aliases)
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"models: {', '.join(sorted(twice))} is defined twice (as a model or as an alias)")
        for pool_name, pool in self.pools.items():
            for model_name in pool.models:
                if model_name not in self.models:
                    raise ValueError(
                        f"pools.{pool_name}.models: {model_name!r} is not defined in [models]. "
                        f"Defined models: {', '.join(self.models)}"
                    )
            for model_name in pool.prices:
                if model_name not in pool.models:
                    raise ValueError(
                        f"pools.{pool_name}.prices.{model_name}: is not in pools.{pool_name}.models: "
                        f"{', '.join(pool.models)}"
                    )
            for adapter in pool.engine.adapters if isinstance(pool.engine, LocalEngineSettings) else ():
                if adapter not in pool.models:
                    raise ValueError(
                        f"pools.{pool_name}.engine.adapters: {adapter!r} is not in pools.{pool_name}.models. Add it: "
                        f"an adapter is served as a model. pools.{pool_name}.models: {', '.join(pool.models)}"
                    )
        return self

    @model_validator(mode="after")
    def _models_without_card_must_name_a_tokenizer(self) -> "Config":
        for model_name in self.models.keys() & only_by_messages(self.pools).keys():
            if self.models[model_name].tokenizer is None:
                raise ValueError(
                    f"models.{model_name}.tokenizer: required to count tokens, because only pools that take messages "
                    "serve this model. Set it to a tokenizer.json, a folder with one, or tiktoken:o200k_base"
                )
        return self

    @property
    def database_url(self) -> str:
        """URL of the database. Default: SQLite in the data folder."""
        return self.database.url or f"sqlite:///{self.data_dir.resolve() / 'spillway.db'}"

    def gateway_settings(self, pepper: SecretStr) -> GatewaySettings:
        """Return the settings of a gateway process."""
        return GatewaySettings(
            gateway_id=process_id("gw"),
            **{name: getattr(self.gateway, name) for name in GatewaySection.model_fields},
            **self.queue_settings("gateway"),
            database_url=self.database_url,
            data_dir=self.data_dir,
            key_pepper=pepper,
            public_url=self.auth.public_url,
            models=self._models_with_lengths(),
            tenants=self.tenants,
            **gateway_view(self.pools),
            queue=self.nats.queue,
            payloads=self.payload_settings(),
            batches=self.batches,
            responses=self.responses,
            telemetry=self.telemetry,
        )

    def login_settings(self) -> LoginSettings:
        """Return the settings of the login to the pages of a gateway."""
        return LoginSettings(**{name: getattr(self.auth, name) for name in LoginSettings.model_fields})

    def _models_with_lengths(self) -> dict[str, ModelSettings]:
        """Return the models. Those without a model card get the context length of their pools."""
        lengths = only_by_messages(self.pools)
        return {
            name: model
            if model.context_length is not None or name not in lengths
            else model.model_copy(update={"context_length": lengths[name]})
            for name, model in self.models.items()
        }

    def payload_settings(self) -> PayloadSettings:
        """Return the settings for sealing and opening payloads. Raises ConfigError for an unusable key file."""
        section = self.payloads
        fields = section.model_dump(exclude={"key_file"})
        if section.key_file is None:
            return PayloadSettings(**fields)
        try:
            return PayloadSettings(**{**fields, "key": SecretStr(section.key_file.read_text())})
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "must contain keys of 32 random bytes in hex"
            raise ConfigError(f"payloads.key_file: {section.key_file}: {reason}") from error

    def ledger_settings(self) -> LedgerSettings:
        """Return the settings of a ledger writer."""
        return LedgerSettings(
            **self.queue_settings("ledger"),
            database_url=self.database_url,
            prices=tuple(self._prices()),
            **self.ledger.model_dump(),
        )

    def _prices(self) -> Iterator[ConfiguredPrice]:
        for name, model in self.models.items():
            if model.price is not None:
                yield ConfiguredPrice(name, CLIENTS, _token_price(model.price))
        for name, pool in self.pools.items():
            for model_name, price in pool.prices.items():
                yield ConfiguredPrice(model_name, name, _token_price(price))
            hourly = (nano_usd(pool.usd_per_hour), nano_usd(pool.on_demand_usd_per_hour))
            machine = Price(machine_nano_usd=hourly[0], on_demand_nano_usd=hourly[1])
            yield ConfiguredPrice(MACHINE, name, machine)

    def worker_settings(self, pool_name: str, machine: str = "") -> WorkerSettings:
        """Return the settings of a pool's worker. Raises ConfigError if there is no such pool, and CredentialsError.

        ``machine``: id of the machine, if the fleet controller launched it.
        """
        pool = self.pools.get(pool_name)
        if pool is None:
            raise ConfigError(f"pools.{pool_name}: no such pool; defined pools: {', '.join(self.pools) or 'none'}")
        fields = pool.model_dump(
            exclude={"workers", "prices", "usd_per_day", "usd_per_month", "on_demand_usd_per_hour", "fleet"}
        )
        nats = self.queue_settings(of_pool(pool_name))
        credentials = nats["nats_credentials"] = self.nats.credentials_text or nats["nats_credentials"]
        return WorkerSettings(
            worker_id=worker_id(process_id("w"), pool_name, credentials),
            pool=pool_name,
            machine=machine,
            nats_domain=self.nats.domain,
            **nats,
            telemetry=self.telemetry,
            **fields,
        )

    def queue_settings(self, part: str) -> dict[str, Any]:
        """Return the settings of the queue server for a part or a pool. Raises ConfigError without ``urls``."""
        if not self.nats.urls:
            raise ConfigError(
                "nats.urls: required: only `spillway up` starts an embedded queue server. While it runs, use "
                f"--config {resolved_config_path(self.data_dir)}"
            )
        return {
            "nats_urls": self.nats.urls,
            "nats_credentials": self.nats.credentials_of(part),
            "nats_ca_file": self.nats.ca_file,
        }


def _token_price(price: PriceSettings) -> Price:
    return Price(nano_usd(price.prompt), nano_usd(price.cached), nano_usd(price.completion))


def process_id(kind: str) -> str:
    """Return an id for a process: unique among all running processes, and containing the host's name."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:24]
    return f"{kind}-{host}-{os.getpid()}-{secrets.token_hex(3)}"


def load_config(
    path: Path,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Read a TOML file (or the JSON that ``up`` writes for its children), apply the environment, and validate.

    Precedence, highest first: ``overrides`` (command-line options), the environment, the file, ``defaults``. Raises
    ConfigError, which names each invalid key.
    """
    from_file = read_file(path)
    if "key" in from_file.get("payloads", {}):
        raise ConfigError(
            f"{path}: payloads.key: not allowed in this file; use SPILLWAY_PAYLOADS__KEY or payloads.key_file"
        )
    return _validated(merge(defaults or {}, from_file), str(path), env, overrides)


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file without validating it. Raises ConfigError."""
    source_class = JsonConfigSettingsSource if path.suffix == ".json" else TomlConfigSettingsSource
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        return source_class(Config, path)()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from error


def config_without_file(
    defaults: Mapping[str, Any], env: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Build a configuration from ``defaults``, the environment and ``overrides``, in rising precedence."""
    return _validated(defaults, "options", env, overrides)


def default_config(
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str = str(DEMO_MODEL_PATH),
) -> Config:
    """Build a configuration of one model (folder, hub name or "scripted"; default: the demo) and one local worker."""
    return _validated(_one_model(model), "defaults", env, overrides)


def _one_model(model: str) -> dict[str, Any]:
    if model == "scripted":
        name, engine = "scripted", ScriptedEngineSettings(inter_token_s=0.02, faults_from_prompt=True).model_dump()
    else:
        is_folder = Path(model).is_absolute() or Path(model).is_dir()
        name = Path(model).resolve().name if is_folder else model
        engine = LocalEngineSettings(path=model).model_dump(exclude_none=True)
    return {"models": {name: {}}, "pools": {"local": {"models": [name], "engine": engine}}}


def _validated(
    base: Mapping[str, Any], where: str, env: Mapping[str, str] | None, overrides: Mapping[str, Any] | None
) -> Config:
    environment = dict(os.environ if env is None else env)
    _refuse_unknown_sections(environment)
    try:
        merged = merge(base, spelled_as(base, MappingEnvSource(Config, environment)()))
        _refuse(unexpanded(merged), where, environment)
        config = Config(**_with_otel(merge(merged, overrides or {}), environment))
    except ValidationError as error:
        problems = [
            f"{source_of(keys_of(problem), where, environment)}: {explain(problem, Config)}"
            for problem in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from error
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from error
    _refuse(masked_secrets(config), where, environment)
    return config


def _with_otel(values: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration whose missing ``[telemetry]`` keys come from OpenTelemetry's variables."""
    given = values.get("telemetry", {})
    if not isinstance(given, Mapping):
        return dict(values)
    telemetry = {**telemetry_defaults(env), **given}
    if is_disabled(env):
        telemetry.pop("otlp_endpoint", None)
    return {**values, "telemetry": telemetry} if telemetry else dict(values)


def _refuse(problems: Iterable[Problem], where: str, env: Mapping[str, str]) -> None:
    lines = [f"{source_of(keys, where, env)}: {'.'.join(keys)}: {message}" for keys, message in problems]
    if lines:
        raise ConfigError("\n".join(lines))


def _refuse_unknown_sections(env: Mapping[str, str]) -> None:
    """Reject variables of unknown sections: they are probably misspelled, and pydantic-settings ignores them."""
    for name in env:
        section, nested, _ = name.removeprefix(ENV_PREFIX).partition("__")
        if name.startswith(ENV_PREFIX) and nested and section.lower() not in Config.model_fields:
            raise ConfigError(f"environment: {name}: unknown section {section.lower()!r}")
