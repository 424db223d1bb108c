"""Objects too large for a message, in object buckets as NATS ADR-20 lays them out, read and written message by message.

nats-py's own layer reads an object by a consumer of its own. Whoever may create consumers may have the server send
messages to any subject, in anybody's name, so workers may not; they read one stored message after the other.
"""

import base64
import hashlib
import json
import logging
import uuid
from asyncio import timeout
from datetime import UTC, datetime
from typing import Any, Final

from protocol.errors import BusError
from protocol.nats.bus import Bus

CHUNK_BYTES: Final = 128 * 1024
GET_LIMIT_S: Final = 10.0
REPLACES: Final = {"Nats-Rollup": "sub"}  # of what the stream has on the same subject, only this one stays
DIGEST: Final = "SHA-256="

log = logging.getLogger(__name__)


def stream_of(bucket: str) -> str:
    """Return the stream behind an object bucket."""
    return f"OBJ_{bucket}"


def chunks_subject(bucket: str, chunks_id: str) -> str:
    """Return the subject of an object's parts."""
    return f"$O.{bucket}.C.{chunks_id}"


def info_subject(bucket: str, name: str) -> str:
    """Return the subject of what is known of an object: its size, its digest, where its parts are."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


async def put_object(bus: Bus, bucket: str, name: str, data: bytes) -> None:
    """Store an object, in place of one of the same name. Raises BusError."""
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
        replaced = await _info(bus, bucket, name)
        for number, part in enumerate(parts):
            await bus.publish_durable(chunks_subject(bucket, chunks_id), part, message_id=f"{chunks_id}.{number}")
        await _put_info(bus, info)
    except BusError as error:
        await _forget_chunks(bus, bucket, chunks_id)
        raise BusError(f"cannot store object {bucket}/{name}: {error}") from error
    if replaced is not None:
        await _forget_chunks(bus, bucket, replaced["nuid"])


async def has_object(bus: Bus, bucket: str, name: str) -> bool:
    """Report whether there is an object of this name. Raises BusError."""
    try:
        return await _info(bus, bucket, name) is not None
    except BusError as error:
        raise BusError(f"cannot look up object {bucket}/{name}: {error}") from error


async def get_object(bus: Bus, bucket: str, name: str, *, limit_s: float = GET_LIMIT_S) -> bytes:
    """Fetch an object. Raises BusError, also when it is not there, whole and as it was stored, within ``limit_s``."""
    try:
        async with timeout(limit_s):
            return await _get(bus, bucket, name)
    except (BusError, TimeoutError) as error:
        raise BusError(f"cannot fetch object {bucket}/{name}: {str(error) or 'too slow'}") from error


async def delete_object(bus: Bus, bucket: str, name: str) -> None:
    """Delete an object; nothing happens if it is not there. Raises BusError."""
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
        raise BusError("it is not there")
    parts: list[bytes] = []
    sequence, subject = 0, chunks_subject(bucket, info["nuid"])
    for _ in range(info["chunks"]):
        message = await bus.get_message(stream_of(bucket), seq=sequence + 1, next_by_subj=subject)
        if message is None:
            raise BusError("its parts are gone")
        sequence = int(message["seq"])
        parts.append(base64.b64decode(message.get("data", "")))
    data = b"".join(parts)
    if _digest(data) != info["digest"]:
        raise BusError("it is not what was stored")
    return data


async def _info(bus: Bus, bucket: str, name: str) -> dict[str, Any] | None:
    """Return what is known of an object; None if it is not there."""
    message = await bus.get_message(stream_of(bucket), last_by_subj=info_subject(bucket, name))
    if message is None:
        return None
    try:
        info = json.loads(base64.b64decode(message["data"]))
        known = {key: kind(info[key]) for key, kind in {"nuid": str, "chunks": int, "digest": str}.items()}
    except (ValueError, KeyError, TypeError) as error:  # of a broken worker
        raise BusError("nobody can read where its parts are") from error
    return None if info.get("deleted") else {**info, **known}


async def _put_info(bus: Bus, info: dict[str, Any]) -> None:
    subject = info_subject(info["bucket"], info["name"])
    await bus.publish_durable(subject, json.dumps(info).encode(), message_id=uuid.uuid4().hex, headers=REPLACES)


async def _forget_chunks(bus: Bus, bucket: str, chunks_id: str) -> None:
    try:
        await _purge_chunks(bus, bucket, chunks_id)
    except BusError as error:  # the bucket's maximum age ends them, where it has one
        log.debug("parts of an object in %s stay: %s", bucket, error)


async def _purge_chunks(bus: Bus, bucket: str, chunks_id: str) -> None:
    await bus.api(f"STREAM.PURGE.{stream_of(bucket)}", {"filter": chunks_subject(bucket, chunks_id)})


def _digest(data: bytes) -> str:
    return DIGEST + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
