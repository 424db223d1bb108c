"""The catalog of configured models, with their tokenizers and chat templates.

A model exists because it is configured. Its tokenizer comes from the configuration or, usually, from the card that its
workers publish; until the first card arrives the model is "not ready". Cards live in a KV bucket, tokenizers in an
object bucket under their digest and in a cache on disk.
"""

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from nats.aio.msg import Msg

from db.accounts.principal import Principal
from gateway.errors import ModelNotFound, ModelNotReady, Overloaded
from gateway.tokenizing.cards import UnusableCard, check_context_length, check_tokenizer_size, usable_template
from gateway.tokenizing.encoder_pool import EncoderPool
from gateway.tokenizing.encoders import (
    TIKTOKEN_PREFIX,
    Encoder,
    HuggingFaceEncoder,
    TiktokenEncoder,
    TokenizerError,
    read_tokenizer_file,
)
from gateway.tokenizing.model_tokens import AnyTemplate, ModelTokens
from gateway.tokenizing.settings import ModelTokenSettings, canonical_names
from gateway.tokenizing.templates import COUNTING_SOURCE
from protocol import subjects
from protocol.dialects.dialect import Dialect
from protocol.errors import BusError, ProtocolError
from protocol.generation import GENERATION_CONFIG, sampling_defaults
from protocol.job import NO_TOKENIZER, ModelCard, encode
from protocol.nats.bus import Bus
from protocol.nats.objects import get_object, read_model_card, tokenizer_name, tokenizer_object_name

RETRY_S: Final = 2.0
MAX_NAMED_MODELS: Final = 10  # in the error for an unknown one
FETCH_LIMIT_S: Final = 60.0  # for a configured tokenizer, which tiktoken may have to download
TEMPLATE_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

log = logging.getLogger(__name__)


class ModelCatalog:
    """Maps names to models and models to their tokens. Call ``start``, then run ``run`` as a supervised task."""

    def __init__(
        self,
        bus: Bus,
        models: Mapping[str, ModelTokenSettings],
        data_dir: Path,
        *,
        by_messages: Collection[str] = (),
        only_by_messages: Collection[str] = (),
        pools: Mapping[str, Collection[str]] = MappingProxyType({}),
        retry_s: float = RETRY_S,
    ) -> None:
        """Create a catalog, not yet started.

        ``pools``: by model the names of those that serve it, as far as they are configured here.
        ``by_messages``: models with a pool that takes messages; ``only_by_messages``: models that have only such pools;
        ``retry_s``: from one try of a card that cannot be read to the next.
        """
        self._retry_s = retry_s
        self._pools = pools
        self._by_messages = frozenset(by_messages)
        self._only_by_messages = frozenset(only_by_messages)
        self._bus = bus
        self._models = dict(models)
        self._names = canonical_names(models)
        self._cache_dir = data_dir / "tokenizers"
        self._tokens: dict[str, ModelTokens] = {}
        self._cards: dict[str, ModelCard] = {}
        self._unusable: dict[str, str] = {}
        self._missing: dict[str, str] = {}  # what models that are not ready lack
        self._stale = set(models)  # models whose card must be (re)read
        self._announced: dict[str, bytes] = {}  # the newest card that was heard of, until it is read
        self._wake = asyncio.Event()
        self._pool = EncoderPool()

    # --- lookups ------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Mapping[str, ModelTokenSettings]:
        """The configured models by their canonical names."""
        return self._models

    @property
    def pool(self) -> EncoderPool:
        """The thread pool for long prompts."""
        return self._pool

    def known_name(self, name: str) -> str | None:
        """Return the model behind a name or alias; None: there is none."""
        return self._names.get(name)

    def canonical_name(self, name: str, principal: Principal) -> str:
        """Return the model behind a name or alias that ``principal`` may use. Raises ModelNotFound."""
        model = self._names.get(name)
        if model is None or not principal.may_use(model):
            raise ModelNotFound(
                f"The model `{name}` does not exist or you do not have access to it. {self._usable_by(principal)}",
                param="model",
            )
        return model

    def _usable_by(self, principal: Principal) -> str:
        names = [name for name in self._models if principal.may_use(name)]
        if not names:
            return "This API key cannot use any model."
        more = f" and {len(names) - MAX_NAMED_MODELS} more (GET /v1/models)" if len(names) > MAX_NAMED_MODELS else ""
        return f"This API key may use: {', '.join(names[:MAX_NAMED_MODELS])}{more}."

    def tokens_of(self, model: str) -> ModelTokens:
        """Return a model's tokenizer, template and limits. Raises ModelNotReady."""
        tokens = self._tokens.get(model)
        if tokens is None and model in self._unusable:
            raise ModelNotReady(f"The model `{model}` cannot be served: {self._unusable[model]}.")
        if tokens is None:
            missing = self._missing.get(model, "this gateway has just started and is loading its tokenizer")
            raise ModelNotReady(f"The model `{model}` is not ready: {missing}.")
        return tokens

    def context_length(self, model: str) -> int | None:
        """Return the context length in prompt + output tokens; None while unknown."""
        tokens = self._tokens.get(model)
        return tokens.context_length if tokens else self._models[model].context_length

    def sampling(self, model: str) -> Mapping[str, float]:
        """Return the model's own sampling parameters; none while unknown."""
        tokens = self._tokens.get(model)
        return tokens.sampling if tokens else {}

    def not_ready(self) -> list[str]:
        """Return the configured models whose tokens cannot be counted yet."""
        return [model for model in self._models if model not in self._tokens]

    @property
    def unusable(self) -> Mapping[str, str]:
        """Models whose last card cannot be used, with the reason."""
        return self._unusable

    # --- life cycle ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe to cards and load existing ones. Raises BusError, and TokenizerError for configured tokenizers."""
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        await self._bus.subscribe(subjects.kv_subject(subjects.MODELS_BUCKET, "*"), self._on_card)
        self._bus.on_reconnect(self._on_reconnected)
        for settings in self._models.values():
            if settings.tokenizer is not None:
                await _encoder(settings.tokenizer)  # a configuration error aborts the start
        await self._load_stale()

    async def run(self) -> None:
        """Load cards as they arrive; never return."""
        while True:
            await self._wait(self._retry_s if self._stale else None)
            self._wake.clear()
            await self._load_stale()

    async def close(self) -> None:
        """Stop the encoder threads and the renderer processes."""
        for tokens in self._tokens.values():
            await tokens.close()
        self._pool.close()

    async def _wait(self, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _on_card(self, message: Msg) -> None:
        key = message.subject.rpartition(".")[2]
        for model in self._models:
            if subjects.escape(model) == key:
                self._announced[model] = message.data
                self._stale.add(model)
        self._wake.set()

    async def _on_reconnected(self) -> None:
        self._stale.update(self._models)  # a card may have been missed
        self._wake.set()

    # --- loading ------------------------------------------------------------------------------------------------------

    async def _load_stale(self) -> None:
        # Concurrently: a card that is slow to check delays no other.
        await asyncio.gather(*map(self._try_load, sorted(self._stale)))

    async def _try_load(self, model: str) -> None:
        self._stale.discard(model)  # first: a card that arrives during the load makes the model stale again
        try:
            await self._load(model)
        except (BusError, Overloaded) as error:  # to be retried
            self._stale.add(model)
            self._missing[model] = f"its tokenizer could not be loaded from the queue server ({error})"
            log.warning("model %s: %s", model, error)
        except (ProtocolError, TokenizerError, UnusableCard) as error:
            log.error("model %s cannot be served: %s", model, error)  # noqa: TRY400  # an operator's mistake
            await self._refuse(model, str(error))
        except Exception as error:  # an unforeseen fault of a card must not stop the gateway
            log.exception("model %s cannot be served", model)
            await self._refuse(model, f"{type(error).__name__}: {error}")
        else:
            if model not in self._tokens:  # to be retried: the notification may arrive before the card is stored
                self._stale.add(model)

    async def _refuse(self, model: str, reason: str) -> None:
        """Stop serving a model until its next card."""
        self._cards.pop(model, None)
        self._unusable[model] = reason
        await self._forget(self._tokens.pop(model, None))

    async def _forget(self, tokens: ModelTokens | None) -> None:
        if tokens is not None:
            await tokens.close()

    async def _load(self, model: str) -> None:
        settings = self._models[model]
        has_card = model not in self._only_by_messages
        announced = self._announced.pop(model, None)
        card = await read_model_card(self._bus, model) if has_card else None
        if announced is not None and announced != (encode(card) if card else b""):
            self._stale.add(model)  # perhaps it is not stored yet, and this is the card before it: read once more
        if model in self._tokens and card == self._cards.get(model):
            return
        context_length = _smaller(settings.context_length, card.context_length if card else None)
        encoder, template_source, special_tokens = await self._parts(settings, card)
        if encoder is None or context_length is None:  # unknown until the first card arrives
            unknown = {"tokenizer": encoder, "context_length": context_length}
            keys = [name for name, value in unknown.items() if value is None]
            things = " and ".join(keys).replace("_", " ")
            settings_keys = " and ".join(f"models.{model}.{key}" for key in keys)
            pools = f" ({', '.join(self._pools[model])})" if self._pools.get(model) else ""
            self._missing[model] = (
                f"no worker has published its {things}. Start a worker of a pool whose `models` name it{pools}, or set "
                f"{settings_keys}. `spillway status` says what a starting worker waits for"
            )
            return
        check_context_length(context_length)
        counts_chats = not has_card or (template_source is None and model in self._by_messages)
        if counts_chats:
            template_source, special_tokens = COUNTING_SOURCE, {}
        template = await usable_template(model, template_source, special_tokens) if template_source else None
        tool_source = card.tool_template if card else None
        tool_template = await usable_template(model, tool_source, special_tokens) if tool_source else None
        replaced = self._tokens.get(model)
        self._unusable.pop(model, None)
        self._missing.pop(model, None)
        self._tokens[model] = ModelTokens(
            model,
            encoder,
            template,
            context_length,
            self._pool,
            add_special_tokens=card.add_special_tokens if card else True,
            pooling=card.pooling if card else None,
            tool_template=tool_template,
            control_tokens_in_content=settings.control_tokens_in_content,
            lenient_schemas=settings.lenient_schemas,
            tokenizer=_tokenizer(settings, card) if has_card else NO_TOKENIZER,
            takes_messages=model in self._by_messages,
            counts_chats=counts_chats,
            sampling=await _sampling(settings, card),
            dialect=None
            if counts_chats
            else Dialect.of(
                tool_source or template_source or "",
                encoder.added_tokens(),
                knows_tools=_knows_tools(tool_template or template),
                tool_parser=settings.tool_parser,
                reasoning_parser=settings.reasoning_parser,
            ),
        )
        if card is not None:
            self._cards[model] = card
        revision = card.revision if card else ""
        log.info("model %s is ready: context length %d, revision %s", model, context_length, revision or "unknown")
        await self._forget(replaced)

    async def _parts(
        self, settings: ModelTokenSettings, card: ModelCard | None
    ) -> tuple[Encoder | None, str | None, Mapping[str, str]]:
        source = card.chat_template if card else None
        special_tokens: Mapping[str, str] = card.special_tokens if card else {}
        if settings.tokenizer is not None:
            encoder = await _encoder(settings.tokenizer)
            if source is None:
                source, special_tokens = await asyncio.to_thread(_configured_template, settings.tokenizer)
            return encoder, source, special_tokens
        if card is None:
            return None, None, {}
        data = await self._tokenizer_json(card.tokenizer_object)
        check_tokenizer_size(len(data))
        return await asyncio.to_thread(HuggingFaceEncoder, data), source, special_tokens

    async def _tokenizer_json(self, name: str) -> bytes:
        """Load a tokenizer from the cache or the object bucket. Raises BusError or TokenizerError."""
        cached = self._cache_dir / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
        try:
            data = await asyncio.to_thread(cached.read_bytes)
            if tokenizer_object_name(data) == name:
                return data
            log.warning("%s does not match the digest in its name; fetching it again", cached)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be read; fetching it again: %s", cached, error)
        data = await get_object(self._bus, subjects.ARTIFACTS_BUCKET, name)
        if tokenizer_object_name(data) != name:
            raise TokenizerError(f"object {name} does not match the digest in its name")
        try:
            await asyncio.to_thread(_write_atomically, cached, data)
        except OSError as error:  # the cache is optional
            log.warning("%s cannot be written: %s", cached, error)
        return data


def _knows_tools(template: AnyTemplate | None) -> bool:
    return template is not None and template.rules.tools and "tools" in template.variables


def _tokenizer(settings: ModelTokenSettings, card: ModelCard | None) -> str:
    return tokenizer_name(card.tokenizer_object) if card and settings.tokenizer is None else ""


async def _sampling(settings: ModelTokenSettings, card: ModelCard | None) -> dict[str, float]:
    """Return the model's own sampling parameters: its card's, or else its folder's. Raises TokenizerError."""
    if settings.generation_config == "ignore":
        return {}
    if (card is not None and card.sampling) or settings.tokenizer is None:
        return sampling_defaults(card.sampling if card else {})
    return await asyncio.to_thread(_configured_sampling, settings.tokenizer)


def _configured_sampling(tokenizer: str) -> dict[str, float]:
    path = Path(tokenizer)
    file = (path if path.is_dir() else path.parent) / GENERATION_CONFIG
    if tokenizer.startswith(TIKTOKEN_PREFIX) or not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {file}: {error}") from error
    return sampling_defaults(config) if isinstance(config, dict) else {}


def _smaller(configured: int | None, published: int | None) -> int | None:
    known = [length for length in (configured, published) if length is not None]
    return min(known, default=None)


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")  # another process may write it concurrently
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


async def _encoder(tokenizer: str) -> Encoder:
    """Load a configured tokenizer. Raises TokenizerError, also if tiktoken's download exceeds FETCH_LIMIT_S."""
    try:
        async with asyncio.timeout(FETCH_LIMIT_S):
            return await asyncio.to_thread(_configured_encoder, tokenizer)
    except TimeoutError as error:
        text = f"{tokenizer!r} could not be loaded within {FETCH_LIMIT_S:g} s. Put its file into TIKTOKEN_CACHE_DIR"
        raise TokenizerError(text) from error


def _configured_encoder(tokenizer: str) -> Encoder:
    if tokenizer.startswith(TIKTOKEN_PREFIX):
        return TiktokenEncoder(tokenizer.removeprefix(TIKTOKEN_PREFIX))
    return HuggingFaceEncoder(read_tokenizer_file(Path(tokenizer)))


def _configured_template(tokenizer: str) -> tuple[str | None, dict[str, str]]:
    """Return chat template and special tokens of a model folder; nothing for a tokenizer.json or a tiktoken encoding.

    Raises TokenizerError.
    """
    folder = Path(tokenizer)
    if tokenizer.startswith(TIKTOKEN_PREFIX) or not (folder / "tokenizer_config.json").is_file():
        return None, {}
    template_file = folder / "chat_template.jinja"
    try:
        config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
        source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read the chat template of {folder}: {error}") from error
    special = {name: _token_text(config[name]) for name in TEMPLATE_TOKENS if config.get(name)}
    return source if isinstance(source, str) else None, special


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
