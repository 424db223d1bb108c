"""Cards of models and their tokenizers, published by workers and read by gateways.

A tokenizer's object name holds its digest, so an object never changes and both sides may keep it for ever.
"""

import base64
import hashlib
from typing import Final

from protocol import subjects
from protocol.errors import BusError
from protocol.messages import ModelCard, Revision, decode_model_card, encode
from protocol.nats.bus import Bus
from protocol.nats.objects import has_object, put_object

TOKENIZER_NAME_CHARS: Final = 16  # of its digest


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
    if not await has_object(bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object):
        await put_object(bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object, tokenizer_json)
    reply = await bus.request(subjects.model_card_subject(card.model), encode(card), timeout_s=2.0)
    if b'"error"' in reply.data:
        raise BusError(f"cannot store the card of {card.model}: {reply.data.decode()}")


async def read_model_card(bus: Bus, model: str) -> ModelCard | None:
    """Read a model's card; None if no worker has ever published one. Raises BusError or ProtocolError."""
    message = await bus.get_message(f"KV_{subjects.MODELS_BUCKET}", last_by_subj=subjects.model_card_subject(model))
    data = b"" if message is None else base64.b64decode(message.get("data", ""))
    return decode_model_card(data) if data else None
