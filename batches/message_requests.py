"""The body of POST /v1/messages/batches, read as it comes: each of its requests becomes a line for /v1/messages."""

import codecs
import hashlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn

from batches.settings import BatchSettings
from web.body import MAX_BODY_VALUES, check_values
from web.errors import BodyTooLarge, InvalidParameter, MalformedJson

ENDPOINT: Final = "/v1/messages"
MAX_MODEL_CHARS: Final = 512
ID_BYTES: Final = 16  # of a custom_id's hash
AGAIN_FROM: Final = 1.5  # a value that was not whole is read again once there is so many times as much of it
_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE: Final = re.compile(r"[ \t\r\n]*")


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedJson(f"We could not parse the JSON body of your request: {name} is no JSON.")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


class _Text:
    """JSON that comes in chunks, value by value. All of it raises MalformedJson, and what the chunks raise."""

    def __init__(self, chunks: AsyncIterator[bytes], max_value_chars: int) -> None:
        self._chunks = chunks
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._max_chars = max_value_chars
        self._text = ""
        self._at = 0
        self._ended = False

    async def next(self) -> str:
        """Return the next character that is no space, without taking it; "" at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = self._at if match is None else match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            await self._more()

    async def take(self, characters: str) -> str:
        """Take the next character, one of these."""
        found = await self.next()
        if not found or found not in characters:
            expected = " or ".join(repr(one) for one in characters)
            self._refuse(f"{expected} is missing {f'before {found!r}' if found else 'at the end'}.")
        self._at += 1
        return found

    async def value(self, what: str) -> Any:  # noqa: ANN401  # any JSON
        """Take a value; ``what`` names it. Raises InvalidParameter, too, where it is too large."""
        await self.next()
        wanted = 0.0
        while True:
            size = len(self._text) - self._at
            if size >= wanted or self._ended:
                try:
                    value, end = self._decoded(what, size)
                except json.JSONDecodeError as error:
                    if self._ended:
                        self._refuse(f"{what}: {error.msg}.")
                else:
                    if end < len(self._text) or self._ended:  # else a number might go on
                        self._at = end
                        return value
                wanted = size * AGAIN_FROM
            if size > self._max_chars:
                message = f"'{what}' is too large, or no JSON: it may have at most {self._max_chars} bytes."
                raise InvalidParameter(message, param=what, code="too_large")
            await self._more()

    def _decoded(self, what: str, size: int) -> tuple[Any, int]:
        if size > MAX_BODY_VALUES:
            check_values(self._text[self._at :].encode(errors="replace"), param=what)
        try:
            return _DECODER.raw_decode(self._text, self._at)
        except RecursionError:
            self._refuse(f"{what} is nested too deeply.")
        except json.JSONDecodeError:
            raise
        except ValueError:  # Python reads no integer of more than 4,300 digits
            self._refuse(f"{what} has a number that is too long.")

    async def _more(self) -> None:
        chunk = await anext(self._chunks, None)
        self._ended = chunk is None
        try:
            self._text = self._text[self._at :] + self._decode(chunk or b"", self._ended)
        except UnicodeDecodeError:
            self._refuse("it is not UTF-8.")
        self._at = 0

    def _refuse(self, message: str) -> NoReturn:
        raise MalformedJson(f"We could not parse the JSON body of your request: {message}")


async def lines_of(chunks: AsyncIterator[bytes], settings: BatchSettings) -> AsyncIterator[bytes]:
    """Iterate over the requests of a body as lines.

    Raises MalformedJson, InvalidParameter, which names the request by its place, BodyTooLarge, and what ``chunks``
    raises.
    """
    text = _Text(_bounded(chunks, settings.max_message_batch_bytes), settings.max_line_bytes)
    identities: set[bytes] = set()
    async for request in _requests(text):
        name = f"requests.{len(identities)}"
        if len(identities) >= settings.max_message_batch_requests:
            message = f"A batch may have at most {settings.max_message_batch_requests} requests."
            raise InvalidParameter(message, param="requests", code="too_large")
        line = _line(request, name)
        if len(line) > settings.max_line_bytes:
            message = f"'{name}' may have at most {settings.max_line_bytes} bytes."
            raise InvalidParameter(message, param=name, code="too_large")
        identity = hashlib.blake2b(request["custom_id"].encode(), digest_size=ID_BYTES).digest()
        if identity in identities:
            message = f"'{name}.custom_id' has come before: '{request['custom_id']}'."
            raise InvalidParameter(message, param=f"{name}.custom_id")
        identities.add(identity)
        yield line
    if not identities:
        raise InvalidParameter("'requests' is missing, or empty.", param="requests", code="missing_required_parameter")


async def _requests(text: _Text) -> AsyncIterator[Any]:
    """Iterate over the elements of ``requests``; other fields are ignored."""
    number = 0
    await text.take("{")
    while await text.next() != "}":
        key = await text.value("a field's name")
        await text.take(":")
        if key != "requests":
            await text.value(str(key)[:100])
        elif await text.next() != "[":
            raise InvalidParameter("'requests' must be a list.", param="requests", code="invalid_type")
        else:
            await text.take("[")
            while await text.next() != "]":
                yield await text.value(f"requests.{number}")
                number += 1
                if await text.next() != "]":
                    await text.take(",]")
            await text.take("]")
        if await text.next() != "}":
            await text.take(",}")
    await text.take("}")
    if await text.next():
        raise MalformedJson("We could not parse the JSON body of your request: something follows its end.")


def _line(request: Any, name: str) -> bytes:  # noqa: ANN401  # any JSON
    """Check what must be right before there is a batch; all else its request says itself. Raises InvalidParameter."""
    if not isinstance(request, dict):
        raise InvalidParameter(f"'{name}' must be an object.", param=name, code="invalid_type")
    custom_id, params = request.get("custom_id"), request.get("params")
    if not isinstance(custom_id, str) or not _CUSTOM_ID.fullmatch(custom_id):
        message = f"'{name}.custom_id' must be 1 to 64 characters of a-z, A-Z, 0-9, _ and -."
        raise InvalidParameter(message, param=f"{name}.custom_id")
    if not isinstance(params, dict):
        raise InvalidParameter(f"'{name}.params' must be an object.", param=f"{name}.params", code="invalid_type")
    model = params.get("model")
    if not isinstance(model, str) or not 1 <= len(model) <= MAX_MODEL_CHARS:
        raise InvalidParameter(f"'{name}.params.model' must be a model's name.", param=f"{name}.params.model")
    if params.get("stream"):
        message = f"'{name}.params.stream': a request of a batch cannot be streamed."
        raise InvalidParameter(message, param=f"{name}.params.stream")
    line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": params}
    try:
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise InvalidParameter(f"'{name}.params' holds half a character.", param=f"{name}.params") from error


async def _bounded(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"The body of a batch may have at most {max_bytes} bytes.")
        yield chunk
