"""Objects too large for a message: tokenizers (published by workers, read by gateways) and very long prompts.

A tokenizer's object name holds its digest, so an object never changes and both sides may keep it for ever.
"""

import asyncio
import hashlib
import logging
from typing import Final

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError, ObjectNotFoundError

from protocol import subjects
from protocol.bus import Bus
from protocol.errors import BusError
from protocol.messages import ModelCard, Revision, decode_model_card, encode

MAX_INLINE_PROMPT_BYTES: Final = 256 * 1024  # packed token ids; beyond it the prompt travels by reference
GET_LIMIT_S: Final = 10.0
TOKENIZER_NAME_CHARS: Final = 16  # of its digest

log = logging.getLogger(__name__)


async def put_object(bus: Bus, bucket: str, name: str, data: bytes) -> None:
    """Store an object. Raises BusError."""
    try:
        store = await bus.jetstream.object_store(bucket)
        await store.put(name, data)
    except (NatsError, TimeoutError) as error:
        raise BusError(f"cannot store object {bucket}/{name}: {str(error) or type(error).__name__}") from error


async def get_object(bus: Bus, bucket: str, name: str, *, limit_s: float = GET_LIMIT_S) -> bytes:
    """Fetch an object. Raises BusError, also when it is not there, or its parts do not come within ``limit_s``.

    They never come if the object is stored again just then: its old parts are gone, and still awaited.
    """
    try:
        async with asyncio.timeout(limit_s):
            store = await bus.jetstream.object_store(bucket)
            result = await store.get(name)
    except (NatsError, TimeoutError) as error:
        raise BusError(f"cannot fetch object {bucket}/{name}: {str(error) or type(error).__name__}") from error
    if result.data is None:
        raise BusError(f"object {bucket}/{name} is empty")
    return result.data


async def delete_object(bus: Bus, bucket: str, name: str) -> None:
    """Delete an object; nothing happens if it is not there. Raises BusError."""
    try:
        store = await bus.jetstream.object_store(bucket)
        await store.delete(name)
    except (NotFoundError, ObjectNotFoundError):
        return
    except (NatsError, TimeoutError) as error:
        raise BusError(f"cannot delete object {bucket}/{name}: {str(error) or type(error).__name__}") from error


def tokenizer_object_name(tokenizer_json: bytes) -> str:
    """Return the name under which a tokenizer.json is stored: its SHA-256."""
    return f"tokenizer-{hashlib.sha256(tokenizer_json).hexdigest()}"


def revision_of(card: ModelCard) -> Revision:
    """Return the names of a model's weights and tokenizer in jobs, heartbeats and cards."""
    return Revision(card.revision, tokenizer_name(card.tokenizer_object))


def tokenizer_name(object_name: str) -> str:
    """Return a short name for a tokenizer, from that of its object."""
    return object_name.removeprefix("tokenizer-")[:TOKENIZER_NAME_CHARS]


async def publish_model_card(bus: Bus, card: ModelCard, tokenizer_json: bytes) -> None:
    """Store the tokenizer (once per content), then the card that points to it. Raises BusError."""
    try:
        store = await bus.jetstream.object_store(subjects.ARTIFACTS_BUCKET)
        await store.get_info(card.tokenizer_object)
    except (NotFoundError, ObjectNotFoundError):
        await put_object(bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object, tokenizer_json)
    except (NatsError, TimeoutError) as error:
        raise BusError(f"cannot look up {card.tokenizer_object}: {str(error) or type(error).__name__}") from error
    reply = await bus.request(subjects.model_card_subject(card.model), encode(card), timeout_s=2.0)
    if b'"error"' in reply.data:
        raise BusError(f"cannot store the card of {card.model}: {reply.data.decode()}")


async def read_model_card(bus: Bus, model: str) -> ModelCard | None:
    """Read a model's card; None if no worker has ever published one. Raises BusError or ProtocolError."""
    try:
        bucket = await bus.jetstream.key_value(subjects.MODELS_BUCKET)
        entry = await bucket.get(subjects.escape(model), validate_keys=False)
    except NotFoundError:
        return None
    except (NatsError, TimeoutError) as error:
        raise BusError(f"cannot read the card of {model}: {str(error) or type(error).__name__}") from error
    return decode_model_card(entry.value) if entry.value else None
