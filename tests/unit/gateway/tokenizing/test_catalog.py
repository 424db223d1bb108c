import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db.accounts.principal import DEFAULT_TEAM_ID, Principal
from gateway.errors import ModelNotFound, ModelNotReady
from gateway.settings import ModelSettings
from gateway.tokenizing.cards import usable_template
from gateway.tokenizing.catalog import ModelCatalog
from gateway.tokenizing.encoders import TokenizerError
from gateway.tokenizing.model_tokens import AnyTemplate
from protocol import subjects
from protocol.job import PROTOCOL_VERSION, ModelCard, encode
from protocol.nats import objects, topology
from protocol.nats.bus import Bus
from protocol.nats.objects import delete_object
from tests.nats_server import NatsServer
from tests.small_tokenizer import CHATML, byte_tokenizer_json
from tests.waiting import HANGS_S, until

MODEL = "org/model.v1"
MODELS = {MODEL: ModelSettings(aliases=("nick",))}


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
    yield bus
    await bus.close()


@contextlib.asynccontextmanager
async def running(
    bus: Bus, data_dir: Path, models: dict[str, ModelSettings] | None = None, **options: Any
) -> AsyncIterator[ModelCatalog]:
    catalog = ModelCatalog(bus, models or MODELS, data_dir, **options)
    await catalog.start()
    task = asyncio.create_task(catalog.run())
    yield catalog
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await catalog.close()


async def publish(bus: Bus, **changes: Any) -> None:
    data = byte_tokenizer_json()
    fields = {"context_length": 64, "chat_template": CHATML, **changes}
    card = ModelCard(v=PROTOCOL_VERSION, model=MODEL, tokenizer_object=objects.tokenizer_object_name(data), **fields)
    await objects.publish_model_card(bus, card, data)


ANYBODY = Principal("key_1", "k", DEFAULT_TEAM_ID, "default", "org_default")


async def test_cards_come_and_change(bus: Bus, tmp_path: Path) -> None:
    async with running(bus, tmp_path) as catalog:
        assert catalog.canonical_name("nick", ANYBODY) == catalog.canonical_name(MODEL, ANYBODY) == MODEL
        with pytest.raises(ModelNotFound, match=f"This API key may use: {MODEL}."):
            catalog.canonical_name("model.v1", ANYBODY)
        with pytest.raises(ModelNotFound, match="This API key cannot use any model."):
            catalog.canonical_name(MODEL, replace(ANYBODY, models=frozenset({"another"})))
        with pytest.raises(ModelNotReady):
            catalog.tokens_of(MODEL)
        assert catalog.not_ready() == [MODEL]
        await publish(bus)
        await until(lambda: not catalog.not_ready())
        assert await catalog.tokens_of(MODEL).encode_text("ab", add_special_tokens=False) == [64, 65]
        await publish(bus, context_length=128, add_special_tokens=False)
        await until(lambda: catalog.context_length(MODEL) == 128)
        assert await catalog.tokens_of(MODEL).encode_text("ab") == [64, 65]


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, "its tokenizer and context length. Start"),
        ({"context_length": 64}, "its tokenizer. Start"),
    ],
)
async def test_a_model_that_is_not_ready_says_what_is_missing(
    bus: Bus, tmp_path: Path, settings: dict[str, Any], missing: str
) -> None:
    async with running(bus, tmp_path, {MODEL: ModelSettings(**settings)}, pools={MODEL: ("gpu", "spot")}) as catalog:
        wanted = rf"no worker has published {missing} a worker of a pool whose `models` name it \(gpu, spot\), or set "
        with pytest.raises(ModelNotReady, match=wanted):
            catalog.tokens_of(MODEL)
        name = objects.tokenizer_object_name(byte_tokenizer_json())  # which does not exist
        card = ModelCard(PROTOCOL_VERSION, MODEL, 64, name, CHATML)
        await bus.request(subjects.model_card_subject(MODEL), encode(card), timeout_s=HANGS_S)

        async def is_said() -> bool:
            with pytest.raises(ModelNotReady) as refused:
                catalog.tokens_of(MODEL)
            return "its tokenizer could not be loaded from the queue server" in str(refused.value)

        await until(is_said)


async def test_a_card_announced_before_it_is_stored(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscribers get the announcement immediately; a cluster stores the card a little later."""
    looks: list[str] = []

    async def read(bus: Bus, model: str) -> ModelCard | None:
        looks.append(model)
        return None if len(looks) <= 2 else await objects.read_model_card(bus, model)

    monkeypatch.setattr("gateway.tokenizing.catalog.read_model_card", read)
    async with running(bus, tmp_path, retry_s=0.05) as catalog:
        await publish(bus)
        await until(lambda: not catalog.not_ready())


@pytest.mark.parametrize("before", [{}, {"chat_template": "{% if %}"}], ids=["usable", "unusable"])
async def test_a_card_announced_while_its_predecessor_is_read(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any]
) -> None:
    """The gateway once kept or refused the older one until the next announcement."""
    older: list[ModelCard | None] = []

    async def read(bus: Bus, model: str) -> ModelCard | None:
        return older.pop() if older else await objects.read_model_card(bus, model)

    await publish(bus, **before)
    async with running(bus, tmp_path, retry_s=0.05) as catalog:
        older.append(await objects.read_model_card(bus, MODEL))
        monkeypatch.setattr("gateway.tokenizing.catalog.read_model_card", read)
        await publish(bus, context_length=128)
        await until(lambda: catalog.context_length(MODEL) == 128)


async def test_a_card_that_arrives_during_a_check(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was once missed: the gateway served the older one until the next announcement."""
    judged = 0

    async def judge(model: str, source: str, special_tokens: Mapping[str, str]) -> AnyTemplate:
        nonlocal judged
        judged += 1
        if judged == 1:
            await publish(bus, context_length=128)
            await until(catalog._wake.is_set)  # the announcement has arrived
        return await usable_template(model, source, special_tokens)

    monkeypatch.setattr("gateway.tokenizing.catalog.usable_template", judge)
    async with running(bus, tmp_path) as catalog:
        await publish(bus)
        await until(lambda: catalog.context_length(MODEL) == 128)


async def test_a_restart_counts_without_workers(bus: Bus, tmp_path: Path) -> None:
    await publish(bus)
    async with running(bus, tmp_path) as catalog:
        assert catalog.not_ready() == []
    await delete_object(bus, subjects.ARTIFACTS_BUCKET, objects.tokenizer_object_name(byte_tokenizer_json()))
    async with running(bus, tmp_path) as catalog:
        assert catalog.not_ready() == []


async def test_a_corrupt_cache_is_ignored(bus: Bus, tmp_path: Path) -> None:
    await publish(bus)
    async with running(bus, tmp_path):
        pass
    [cached] = (tmp_path / "tokenizers").iterdir()
    cached.write_bytes(b"{}")
    async with running(bus, tmp_path) as catalog:
        assert catalog.not_ready() == []


async def test_the_cache_is_optional(bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk once stopped the gateway at the next card."""
    async with running(bus, tmp_path) as catalog:
        folder = tmp_path / "tokenizers"
        folder.rmdir()
        folder.write_text("in its place")
        await publish(bus)
        await until(lambda: not catalog.not_ready())
    assert "cannot be written" in caplog.text


async def test_an_unusable_card_is_logged_and_the_next_one_helps(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(bus, tmp_path) as catalog:
        await publish(bus, chat_template="{% if %}")
        await until(lambda: "cannot be served" in caplog.text)
        await publish(bus)
        await until(lambda: not catalog.not_ready())


async def test_cards_missed_while_the_server_was_away(bus: Bus, tmp_path: Path, nats_server: NatsServer) -> None:
    other = await Bus.connect(nats_server.url, name="other")
    async with running(bus, tmp_path) as catalog:
        reconnects = other.client.stats["reconnects"]
        nats_server.kill()
        nats_server.start()
        await until(lambda: other.client.stats["reconnects"] > reconnects and other.connected)
        await publish(other)
        await until(lambda: not catalog.not_ready())
    await other.close()


async def test_a_configured_folder_needs_no_worker(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_tokenizer_json())
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    models = {MODEL: ModelSettings(tokenizer=str(folder), context_length=50)}
    async with running(bus, tmp_path, models) as catalog:
        assert catalog.context_length(MODEL) == 50
        ids = await catalog.tokens_of(MODEL).encode_chat([{"role": "user", "content": "ab"}])
        assert ids[1:] == [64, 65]
        assert len(ids) == 3


GENERATION = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}
OWN = {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("settings", "card", "expected"),
    [
        ({}, {"sampling": OWN}, OWN),
        ({}, {}, {}),  # of an older worker
        ({}, {"sampling": {"temperature": 9.0, "top_p": 0.9, "beams": 4.0}}, {"top_p": 0.9}),
        ({"generation_config": "ignore"}, {"sampling": OWN}, {}),
        ({"tokenizer": "model"}, None, OWN),
        ({"tokenizer": "model/tokenizer.json"}, None, OWN),
        ({"tokenizer": "model", "generation_config": "ignore"}, None, {}),
        ({"tokenizer": "model"}, {}, OWN),  # of an older worker
        ({"tokenizer": "model"}, {"sampling": {"top_p": 0.9}}, {"top_p": 0.9}),
    ],
)
async def test_a_model_has_default_sampling_parameters(
    bus: Bus, tmp_path: Path, settings: dict[str, Any], card: dict[str, Any] | None, expected: dict[str, float]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_tokenizer_json())
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    if "tokenizer" in settings:
        settings = {**settings, "tokenizer": str(tmp_path / settings["tokenizer"]), "context_length": 50}
    if card is not None:
        await publish(bus, **card)
    async with running(bus, tmp_path, {MODEL: ModelSettings(**settings)}) as catalog:
        assert catalog.tokens_of(MODEL).sampling == catalog.sampling(MODEL) == expected


async def test_a_broken_generation_config_is_named(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer_json())
    (tmp_path / "generation_config.json").write_text("{")
    async with running(bus, tmp_path, {MODEL: ModelSettings(tokenizer=str(tmp_path), context_length=50)}) as catalog:
        assert "generation_config.json" in catalog.unusable[MODEL]


async def test_an_invalid_path_aborts_the_start(bus: Bus, tmp_path: Path) -> None:
    models = {MODEL: ModelSettings(tokenizer=str(tmp_path / "nothing"), context_length=50)}
    with pytest.raises(TokenizerError, match="nothing"):
        await ModelCatalog(bus, models, tmp_path).start()


async def _too_late(*_: object) -> bytes:
    raise TimeoutError


async def test_a_card_on_a_busy_machine_is_retried(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The card is not at fault, so the check is retried."""
    async with running(bus, tmp_path, retry_s=0.01) as catalog:
        with monkeypatch.context() as busy:
            busy.setattr("gateway.tokenizing.renderer._answer_of", _too_late)
            await publish(bus, chat_template="{{ 'a' * 3 }}{{ 2 ** 3 }}")
            await until(lambda: "was not rendered within" in caplog.text)
            assert not catalog.unusable
        await until(lambda: not catalog.not_ready())
