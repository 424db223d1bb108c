"""Objects too large for a message, in object buckets (NATS ADR-20), read and written message by message.

nats-py reads an object through a consumer. A client that may create consumers can make the server send messages to any
subject, so workers lack this permission and read the stored messages one by one.
"""

import base64
import hashlib
import json
import logging
import os
import uuid
from asyncio import timeout
from datetime import UTC, datetime
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.job import ModelCard, Revision, decode_model_card, encode
from protocol.nats.bus import Bus

log = logging.getLogger(__name__)


CHUNK_BYTES: Final = 128 * 1024
GET_LIMIT_S: Final = 10.0
REPLACES: Final = {"Nats-Rollup": "sub"}  # replaces all earlier messages on the same subject
DIGEST: Final = "SHA-256="


def stream_of(bucket: str) -> str:
    """Return the stream behind an object bucket."""
    return f"OBJ_{bucket}"


def chunks_subject(bucket: str, chunks_id: str) -> str:
    """Return the subject of an object's chunks."""
    return f"$O.{bucket}.C.{chunks_id}"


def info_subject(bucket: str, name: str) -> str:
    """Return the subject of an object's metadata: its size, its digest, the id of its chunks."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def put_object(bus: Bus, bucket: str, name: str, data: bytes, *, may_purge: bool = True) -> None:
    """Store an object, replacing one with the same name. Raises BusError.

    The chunks of the replaced or failed object are purged, unless this connection has no permission for it.
    """
    chunks_id = uuid.uuid4().hex
    parts = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    info = {
        "name": name,
        "bucket": bucket,
        "nuid": chunks_id,
        "size": len(data),
        "chunks": len(parts),
        "mtime": datetime.now(UTC).isoformat(),
        "digest": _digest(data),
        "options": {"max_chunk_size": CHUNK_BYTES},
    }
    try:
        replaced = await _info(bus, bucket, name) if may_purge else None
        for number, part in enumerate(parts):
            await bus.publish_durable(chunks_subject(bucket, chunks_id), part, message_id=f"{chunks_id}.{number}")
        await _put_info(bus, info)
    except BusError as error:
        if may_purge:
            await _forget_chunks(bus, bucket, chunks_id)
        raise BusError(f"cannot store object {bucket}/{name}: {error}") from error
    if replaced is not None:
        await _forget_chunks(bus, bucket, replaced["nuid"])


async def has_object(bus: Bus, bucket: str, name: str) -> bool:
    """Return whether the bucket has an object with this name. Raises BusError."""
    try:
        return await _info(bus, bucket, name) is not None
    except BusError as error:
        raise BusError(f"cannot look up object {bucket}/{name}: {error}") from error


async def get_object(bus: Bus, bucket: str, name: str, *, limit_s: float = GET_LIMIT_S) -> bytes:
    """Fetch an object. Raises BusError if it is missing, incomplete or altered, or after ``limit_s``."""
    try:
        async with timeout(limit_s):
            return await _get(bus, bucket, name)
    except (BusError, TimeoutError) as error:
        raise BusError(f"cannot fetch object {bucket}/{name}: {str(error) or 'too slow'}") from error


async def delete_object(bus: Bus, bucket: str, name: str) -> None:
    """Delete an object if it exists. Raises BusError."""
    try:
        info = await _info(bus, bucket, name)
        if info is None:
            return
        await _put_info(bus, {**info, "deleted": True, "size": 0, "chunks": 0, "digest": ""})
        await _purge_chunks(bus, bucket, info["nuid"])
    except BusError as error:
        raise BusError(f"cannot delete object {bucket}/{name}: {error}") from error


async def _get(bus: Bus, bucket: str, name: str) -> bytes:
    info = await _info(bus, bucket, name)
    if info is None:
        raise BusError("not found")
    parts: list[bytes] = []
    sequence, subject = 0, chunks_subject(bucket, info["nuid"])
    for _ in range(info["chunks"]):
        message = await bus.get_message(stream_of(bucket), seq=sequence + 1, next_by_subj=subject)
        if message is None:
            raise BusError("its chunks are missing")
        sequence = int(message["seq"])
        parts.append(base64.b64decode(message.get("data", "")))
    data = b"".join(parts)
    if _digest(data) != info["digest"]:
        raise BusError("its content does not match its digest")
    return data


async def _info(bus: Bus, bucket: str, name: str) -> dict[str, Any] | None:
    """Return an object's metadata, or None."""
    message = await bus.get_message(stream_of(bucket), last_by_subj=info_subject(bucket, name))
    if message is None:
        return None
    try:
        info = json.loads(base64.b64decode(message["data"]))
        known = {key: kind(info[key]) for key, kind in {"nuid": str, "chunks": int, "digest": str}.items()}
    except (ValueError, KeyError, TypeError) as error:  # from a faulty worker
        raise BusError("its metadata cannot be read") from error
    return None if info.get("deleted") else {**info, **known}


async def _put_info(bus: Bus, info: dict[str, Any]) -> None:
    subject = info_subject(info["bucket"], info["name"])
    await bus.publish_durable(subject, json.dumps(info).encode(), message_id=uuid.uuid4().hex, headers=REPLACES)


async def _forget_chunks(bus: Bus, bucket: str, chunks_id: str) -> None:
    try:
        await _purge_chunks(bus, bucket, chunks_id)
    except BusError as error:  # they expire by the bucket's maximum age, if it has one
        log.debug("cannot delete the chunks of an object in %s: %s", bucket, error)


async def _purge_chunks(bus: Bus, bucket: str, chunks_id: str) -> None:
    await bus.api(f"STREAM.PURGE.{stream_of(bucket)}", {"filter": chunks_subject(bucket, chunks_id)})


def _digest(data: bytes) -> str:
    return DIGEST + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


# --- artifacts --------------------------------------------------------------------------------------------------------
#
# Cards of models and their tokenizers, published by workers and read by gateways.
#
# A tokenizer's object name has its digest, so an object never changes and can be cached without expiry.

TOKENIZER_NAME_CHARS: Final = 16  # of its digest


def tokenizer_object_name(tokenizer_json: bytes) -> str:
    """Return the name under which a tokenizer.json is stored: its SHA-256."""
    return f"tokenizer-{hashlib.sha256(tokenizer_json).hexdigest()}"


def revision_of(card: ModelCard) -> Revision:
    """Return the names of a model's weights and tokenizer in jobs, heartbeats and cards."""
    return Revision(card.revision, tokenizer_name(card.tokenizer_object))


def tokenizer_name(object_name: str) -> str:
    """Return a tokenizer's short name from its object name."""
    return object_name.removeprefix("tokenizer-")[:TOKENIZER_NAME_CHARS]


async def publish_model_card(bus: Bus, card: ModelCard, tokenizer_json: bytes) -> None:
    """Store the tokenizer (once per content), then the card that refers to it. Raises BusError."""
    if not await has_object(bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object):
        # Another worker may store the same tokenizer now. Workers may purge nothing: it could be another's.
        await put_object(bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object, tokenizer_json, may_purge=False)
    reply = await bus.request(subjects.model_card_subject(card.model), encode(card), timeout_s=2.0)
    if b'"error"' in reply.data:
        raise BusError(f"cannot store the card of {card.model}: {reply.data.decode()}")


async def read_model_card(bus: Bus, model: str) -> ModelCard | None:
    """Read a model's card; None if no worker has ever published one. Raises BusError or ProtocolError."""
    message = await bus.get_message(f"KV_{subjects.MODELS_BUCKET}", last_by_subj=subjects.model_card_subject(model))
    data = b"" if message is None else base64.b64decode(message.get("data", ""))
    return decode_model_card(data) if data else None


# --- prompts ----------------------------------------------------------------------------------------------------------
#
# Prompts too large for a message: stored in an object bucket that all workers can read, encrypted with a key in the
# job.
#
# A worker without the job learns nothing from the bucket, not even the request, because an object's name is a digest.

MAX_INLINE_PROMPT_BYTES: Final = 256 * 1024  # packed token ids; larger prompts travel by reference
NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32


def object_name(request_id: str, part: str) -> str:
    """Return the name of a part of a request: ``prompt`` or ``chat``."""
    return hashlib.sha256(f"{request_id} {part}".encode()).hexdigest()


class PromptKeys:
    """Derives the key of each request's objects from a secret of this process."""

    def __init__(self) -> None:
        self._secret = os.urandom(KEY_BYTES)

    def of(self, request_id: str) -> bytes:
        """Return the key of a request's objects."""
        return hashlib.blake2b(request_id.encode(), key=self._secret, digest_size=KEY_BYTES).digest()


def seal(data: bytes, key: bytes, name: str) -> bytes:
    """Encrypt an object: 12 random bytes (the nonce), then AES-256-GCM (NIST SP 800-38D) bound to its name."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data, name.encode())


def unseal(sealed: bytes, key: bytes, name: str) -> bytes:
    """Decrypt an object from ``seal``. Raises ProtocolError."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
    except (InvalidTag, ValueError) as error:
        raise ProtocolError(f"object {name} cannot be opened with the job's key") from error
