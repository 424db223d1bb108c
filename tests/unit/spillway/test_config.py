from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from db.money import Price
from pool_worker.settings import LocalEngineSettings
from spillway.children import resolved_config_path, run_dir_of
from spillway.cli import app
from spillway.config import (
    DEMO_MODEL_PATH,
    Config,
    ConfigError,
    GatewaySection,
    default_config,
    load_config,
)
from spillway.up import _resolve

GOOD = """
data_dir = "somewhere"
[nats]
urls = ["tls://queue:4222"]
[models.small]
aliases = ["gpt-4o-mini"]
context_length = 2048
[pools.cheap]
provider = "runpod"
region = "eu-1"
tier = "spot"
usd_per_hour = 0.4
models = ["small"]
[pools.cheap.engine]
kind = "spillway"
path = "org/small"
"""


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> Config:
    path = tmp_path / "spillway.toml"
    path.write_text(text)
    return load_config(path, env=env or {})


def test_a_file_becomes_the_settings_of_each_part(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    gateway = config.gateway_settings(SecretStr("pepper"))
    assert gateway.models["small"].context_length == 2048
    assert gateway.nats_urls == ("tls://queue:4222",)
    worker = config.worker_settings("cheap")
    assert (worker.pool, worker.provider, worker.tier, worker.usd_per_hour) == ("cheap", "runpod", "spot", 0.4)
    assert worker.engine.kind == "spillway"
    assert worker.engine.path == "org/small"
    assert config.ledger_settings().database_url.endswith("somewhere/spillway.db")


def test_a_pool_has_a_gate_only_where_the_file_says_so(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).worker_settings("cheap").gate is None
    config = load(tmp_path, GOOD + "[pools.cheap.gate]\nbacklog_jobs = 20\noldest_s = 1.5\n")
    gate = config.worker_settings("cheap").gate
    assert gate is not None
    assert (gate.backlog_jobs, gate.oldest_s) == (20, 1.5)
    with pytest.raises(ConfigError, match=r"pools\.cheap\.batch_reserve"):
        load(tmp_path, GOOD.replace("usd_per_hour = 0.4", "batch_reserve = 1.0"))


def test_what_callers_pay_and_what_a_pool_charges_us_are_prices_of_their_own(tmp_path: Path) -> None:
    hosted = "[pools.cheap.prices.small]\nprompt = 0.1\ncompletion = 0.4\n"
    config = load(tmp_path, GOOD + "[models.small.price]\nprompt = 0.15\ncached = 0.05\n" + hosted)
    prices = {(entry.model, entry.pool): entry.price for entry in config.ledger_settings().prices}
    assert prices == {
        ("small", ""): Price(150_000_000, 50_000_000, 0),
        ("small", "cheap"): Price(100_000_000, None, 400_000_000),
        ("", "cheap"): Price(machine_nano_usd=400_000_000),
    }
    assert config.worker_settings("cheap").pool == "cheap"
    by_environment = load(tmp_path, GOOD, {"SPILLWAY_POOLS__CHEAP__PRICES__SMALL__PROMPT": "0.2"}).pools["cheap"].prices
    assert by_environment["small"].prompt == 0.2


def test_what_a_gateway_knows_of_a_hosted_pool(tmp_path: Path) -> None:
    hosted = GOOD.replace('tier = "spot"', 'tier = "hosted"\nusd_per_day = 2.5')
    env = {"SPILLWAY_NATS__URLS": '["tls://q:4222"]'}
    config = load(tmp_path, hosted + "[pools.cheap.prices.small]\nprompt = 0.1\n", env)
    settings = config.gateway_settings(SecretStr("p"))
    (pool,) = settings.hosted.values()
    assert (pool.provider, pool.models, pool.caps, pool.prices["small"].prompt) == (
        "runpod",
        ("small",),
        {"day": 2.5},
        0.1,
    )
    assert settings.only_hosted == {"small"}
    assert config.worker_settings("cheap").lanes == ("hosted-cheap",)
    assert load(tmp_path, GOOD, env).gateway_settings(SecretStr("p")).hosted == {}
    for text, words in (
        (hosted, r"usd_per_day: requires prices\.small"),
        (hosted.replace('"hosted"', '"spot"'), "usd_per_day: only for pools of tier"),
        (GOOD.replace('"spot"', '"hosted"') + "[pools.cheap.gate]\nbacklog_jobs = 1\n", "gate: not for hosted pools"),
        (GOOD + '[tenants.a]\nallow_hosted = ["openai/"]\n', r"tenants\.a\.allow_hosted\.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(tmp_path, text)


def test_what_is_known_of_a_trusted_pool(tmp_path: Path) -> None:
    env = {"SPILLWAY_NATS__URLS": '["tls://q:4222"]'}
    text = GOOD.replace('tier = "spot"', 'tier = "spot"\ntrusted = true')
    api = '[pools.api]\nmodels = ["small"]\ntier = "hosted"\n[pools.api.engine]\nkind = "scripted"\n'
    other = api.replace("pools.api", "pools.other").replace("hosted", "reserved")

    def told(text: str) -> tuple[bool, ...]:
        gateway = load(tmp_path, text, env).gateway_settings(SecretStr("p"))
        return tuple("small" in models for models in (gateway.trusted, gateway.only_trusted, gateway.only_hosted))

    assert told(GOOD) == (False, False, False)
    assert told(text) == (True, True, False)
    assert told(text + other) == (True, False, False)
    assert told(text + api) == (True, False, True)
    assert told(text + other + api) == (True, False, False)
    config = load(tmp_path, text, env)
    assert config.worker_settings("cheap").trusted
    assert config.gateway_settings(SecretStr("p")).queues[-1] == "small@trusted"
    path = tmp_path / "spillway.toml"
    for credentials, notes in (("", 1), ('credentials = "creds"\n', 0)):
        path.write_text(text.replace("[nats]\n", "[nats]\n" + credentials))
        checked = CliRunner().invoke(app, ["config", "check", str(path)], env=env)
        assert checked.exit_code == 0
        assert checked.output.count("note: pools.cheap is trusted") == notes
    for wrong, words in (
        (text.replace('"spot"', '"hosted"'), "trusted: not for hosted pools"),
        (GOOD + '[models."small@trusted"]\n', "a model's name must not end with @trusted"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(tmp_path, wrong)


CHAT_POOL = """
[pools.api]
models = ["small"]
[pools.api.engine]
kind = "openai_chat"
profile = "openai"
url = "https://api.example.com"
model = "gpt"
max_model_len = 9000
"""


def test_what_a_gateway_knows_of_pools_that_take_messages(tmp_path: Path) -> None:
    def told(text: str) -> tuple[frozenset[str], frozenset[str], int | None]:
        gateway = load(tmp_path, text).gateway_settings(SecretStr("pepper"))
        return gateway.by_messages, gateway.only_by_messages, gateway.models["small"].context_length

    without_length = GOOD.replace("context_length = 2048\n", "")
    none, small = frozenset[str](), frozenset({"small"})
    assert told(GOOD) == (none, none, 2048)
    assert told(without_length + CHAT_POOL) == (small, none, None)
    only = without_length[: without_length.index("[pools")].replace("[models.small]", "[models.small]\ntokenizer = 't'")
    assert told(only + CHAT_POOL) == (small, small, 9000)
    assert told(only.replace("tokenizer", "context_length = 5\ntokenizer") + CHAT_POOL) == (small, small, 5)
    with pytest.raises(ConfigError, match=r"models\.small\.tokenizer: required to count tokens"):
        load(tmp_path, only.replace("tokenizer = 't'", "") + CHAT_POOL)


def test_adapters_are_models_of_their_own(tmp_path: Path) -> None:
    text = GOOD.replace('models = ["small"]', 'models = ["small", "support-bot"]') + "[models.support-bot]\n"
    adapters = '[pools.cheap.engine.adapters]\n"support-bot" = "org/support"\n'
    worker = load(tmp_path, text.replace("[models.support-bot]", adapters + "[models.support-bot]")).worker_settings(
        "cheap"
    )
    assert worker.models == ("small", "support-bot")
    assert worker.adapters == {"support-bot"}
    assert load(tmp_path, GOOD).worker_settings("cheap").adapters == frozenset()
    with pytest.raises(ConfigError, match=r"pools\.cheap\.models: 'support-bot' is not defined in \[models\]\."):
        load(tmp_path, text.replace("[models.support-bot]", adapters))


def test_tenants_reach_the_gateway(tmp_path: Path) -> None:
    tenants = "[tenants.shop]\nweight = 3\nmax_in_flight = 100\n[tenants.other]\nmax_queued = 10\n"
    settings = load(tmp_path, GOOD + tenants).gateway_settings(SecretStr("pepper"))
    shop, other = settings.tenants["shop"], settings.tenants["other"]
    assert (shop.weight, shop.max_in_flight, shop.max_queued) == (3.0, 100, None)
    assert (other.weight, other.max_in_flight, other.max_queued) == (1.0, None, 10)


def test_two_processes_have_two_ids(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.worker_settings("cheap").worker_id != config.worker_settings("cheap").worker_id


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    env = {
        "SPILLWAY_NATS__URLS": '["tls://other:4222"]',
        "SPILLWAY_GATEWAY__PORT": "9000",
        "SPILLWAY_DATABASE__URL": "postgresql://db/spillway",
        "SPILLWAY_GATEWAY__LIMITS__MAX_CHOICES": "3",
    }
    config = load(tmp_path, GOOD, env)
    gateway = config.gateway_settings(SecretStr("pepper"))
    assert (gateway.port, gateway.nats_urls, gateway.database_url) == (
        9000,
        ("tls://other:4222",),
        env["SPILLWAY_DATABASE__URL"],
    )
    assert gateway.limits.max_choices == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('tier = "spot"', 'tier = "cheapest"'),
            "pools.cheap.tier: invalid value 'cheapest'. Choose from: spot, reserved",
        ),
        (
            ("[nats]", '[gateway]\ncors_origins = ["https://a.example/"]\n[nats]'),
            "gateway.cors_origins.0: String should match",
        ),
        (
            ("[nats]", "[gateway.connections]\nhead_s = 0\n[nats]"),
            "gateway.connections.head_s: Input should be greater",
        ),
        (
            ('path = "org/small"', 'pathh = "x"'),
            "pools.cheap.engine.pathh: unknown key; valid keys: kind, path, task,",
        ),
        (
            ('path = "org/small"', 'path = "org/small"\nadapters = { support-bot = "org/support" }'),
            "pools.cheap.engine.adapters: 'support-bot' is not in pools.cheap.models",
        ),
        (
            ('path = "org/small"', 'path = "org/small"\nadapters = { small = 3 }'),
            "pools.cheap.engine.adapters.small: Input should be a valid string",
        ),
        (
            ("usd_per_hour = 0.4", "prices = { large = { prompt = 1 } }"),
            "pools.cheap.prices.large: is not in pools.cheap.models: small",
        ),
        (
            ("usd_per_hour = 0.4", "prices = { small = { input = 1 } }"),
            "pools.cheap.prices.small.input: unknown key; valid keys: prompt, cached, completion",
        ),
        (
            ("usd_per_hour = 0.4", "prices = { small = { prompt = -1 } }"),
            "pools.cheap.prices.small.prompt: Input should be greater than or equal to 0",
        ),
        (('kind = "spillway"', ""), "pools.cheap.engine: 'kind' is required. Choose from: spillway, scripted"),
        (
            ("usd_per_hour = 0.4", "gate = { backlog = 3 }"),
            "pools.cheap.gate.backlog: unknown key; valid keys: backlog_jobs, oldest_s",
        ),
        (
            ("[nats]", "[tenants.shop]\nwieght = 1\n[nats]"),
            "tenants.shop.wieght: unknown key; valid keys: weight, max_in_flight, max_queued",
        ),
        (('kind = "spillway"', 'kind = "magic"'), "pools.cheap.engine"),
        (
            ('models = ["small"]', 'models = ["large"]'),
            "pools.cheap.models: 'large' is not defined in [models]. Defined models: small",
        ),
        (('aliases = ["gpt-4o-mini"]', 'aliases = ["small"]'), "models: small is defined twice"),
        (
            ("context_length = 2048", "context_length = -1"),
            "models.small.context_length: Input should be greater than 0",
        ),
        (
            ("context_length = 2048", "context_lenght = 1"),
            "models.small.context_lenght: unknown key; valid keys: context_length, ",
        ),
        (
            ("context_length = 2048", 'tool_parser = "hermits"'),
            "models.small.tool_parser: 'hermits' is unknown; known names: hermes, llama3_json, ",
        ),
        (
            ("context_length = 2048", 'reasoning_parser = "hermes"'),
            "models.small.reasoning_parser: 'hermes' is unknown; known names: think, ",
        ),
        (("[nats]", "[tenants.shop]\nweight = 0\n[nats]"), "tenants.shop.weight: Input should be greater than 0"),
        (
            ("[nats]", "[gateway.limits]\nmax_queued_requests = 0\n[nats]"),
            "gateway.limits.max_queued_requests: Input should be greater than 0",
        ),
        (
            ("[nats]", "[gateway.timeouts]\nqueue_wait_s = inf\n[nats]"),
            "gateway.timeouts.queue_wait_s: Input should be a finite number",
        ),
        (
            ("usd_per_hour = 0.4", "drain_s = inf"),
            "pools.cheap.drain_s: Input should be a finite number",
        ),
        (("[nats]", "[natz]"), "natz: unknown key; valid keys: data_dir, gateway, nats, "),
        (("data_dir =", "data_dir"), "spillway.toml"),
    ],
)
def test_each_error_names_its_key(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(*change))
    assert message in str(caught.value)


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace('tier = "spot"', 'tier = "x"').replace("2048", '"many"'))
    assert "pools.cheap.tier" in str(caught.value)
    assert "models.small.context_length" in str(caught.value)


def test_a_misspelt_variable_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SPILLWAY_GATEWAYS__PORT"):
        load(tmp_path, GOOD, {"SPILLWAY_GATEWAYS__PORT": "1"})
    with pytest.raises(ConfigError, match="environment: SPILLWAY_GATEWAY__PROT: gateway.prot"):
        load(tmp_path, GOOD, {"SPILLWAY_GATEWAY__PROT": "1"})


def test_an_error_says_whether_the_file_or_the_environment_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^environment: SPILLWAY_GATEWAY__PORT: gateway.port: Input should be"):
        load(tmp_path, GOOD, {"SPILLWAY_GATEWAY__PORT": "many"})


def test_a_pool_may_be_named_like_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pools\.spillway\.tier"):
        load(tmp_path, GOOD.replace("pools.cheap", "pools.spillway").replace('tier = "spot"', 'tier = "x"'))


def test_missing_file_and_missing_pool_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml", env={})
    with pytest.raises(ConfigError, match="pools.dear: no such pool; defined pools: cheap"):
        load(tmp_path, GOOD).worker_settings("dear")


def test_without_a_queue_server_only_up_can_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nats.urls: required"):
        load(tmp_path, GOOD.replace('urls = ["tls://queue:4222"]', "")).ledger_settings()


def test_the_default_serves_the_demo_model() -> None:
    config = default_config(env={})
    assert list(config.models) == ["spillway-demo"]
    engine = config.pools["local"].engine
    assert isinstance(engine, LocalEngineSettings)
    assert engine.path == str(DEMO_MODEL_PATH)


def test_secrets_do_not_show() -> None:
    config = default_config(env={"SPILLWAY_AUTH__PEPPER": "very-secret"})
    assert "very-secret" not in repr(config)
    assert "very-secret" not in config.model_dump_json()


OIDC = """
[auth]
session_s = 3600
public_url = "https://llm.example.com"
[auth.oidc]
issuer = "https://id.example.com"
client_id = "spillway"
client_secret = "of the client"
allowed_groups = ["ops"]
"""


def test_how_people_log_in_reaches_the_gateway_and_the_children_of_up(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD + OIDC)
    login = config.login_settings()
    assert login.oidc is not None
    assert (login.session_s, login.public_url) == (3600.0, "https://llm.example.com")
    assert (login.oidc.issuer, login.oidc.allowed_groups) == ("https://id.example.com", ("ops",))
    assert config.gateway_settings(SecretStr("unused")).public_url == "https://llm.example.com"
    config = config.model_copy(update={"data_dir": tmp_path, "gateway": GatewaySection(port=0)})
    run_dir_of(tmp_path).mkdir()
    _resolve(config, ("nats://127.0.0.1:4222",))
    written = resolved_config_path(tmp_path)
    assert written.stat().st_mode & 0o777 == 0o600
    assert load_config(written, {}).auth == config.auth


def test_the_key_of_payloads_comes_from_the_environment_or_a_file_only(tmp_path: Path) -> None:
    key = "6e" * 32
    config = default_config({"SPILLWAY_PAYLOADS__KEY": key})
    assert config.payload_settings().key == SecretStr(key)
    key_file = tmp_path / "key"
    key_file.write_text(f"{key}\n")
    config = default_config({"SPILLWAY_PAYLOADS__KEY_FILE": str(key_file)})
    assert config.payload_settings().key == SecretStr(f"{key}\n")
    for text in ("", "short"):
        key_file.write_text(text)
        with pytest.raises(ConfigError, match="payloads.key_file"):
            config.payload_settings()
    with pytest.raises(ConfigError, match=r"payloads\.key"):
        default_config({"SPILLWAY_PAYLOADS__KEY": "short"})
    path = tmp_path / "spillway.toml"
    path.write_text(f'[payloads]\nkey = "{key}"\n[models.m]\n')
    with pytest.raises(ConfigError, match="payloads.key: not allowed in this file") as caught:
        load_config(path)
    assert key not in str(caught.value)
