"""Mutations that keep a payload's structure: bytes that are changed blindly are rarely a message any more."""

import json
import random
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

Form = Literal["msgpack", "json", "events", "bytes"]  # events: lines of JSON after "data:"
MutateBytes = Callable[[bytes], bytes]

VALUES: Final[list[Any]] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308, float("nan"),
    float("inf"), -float("inf"), "", "\0", "a", "\x7f", "é\U0001f600", b"", b"\xff", [], {}, [[]], [{}], {"": None},
]  # fmt: skip
# Texts that JSON's libraries read in different ways, or not at all.
RAW: Final = [
    "NaN", "-Infinity", "1e400", "-0", "1E5", "0.10e-7", "9" * 40, '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"',
    '{"a":1,"a":2}', "[" * 250 + "]" * 250, "[" * 1500 + "]" * 1500, '{"a":' * 250 + "1" + "}" * 250,
]  # fmt: skip
_MARK: Final = "\ue000raw"  # stands for one of RAW until all is encoded
MAX_STEPS: Final = 12  # down into a value


def mutated(payload: bytes, form: Form, mutate: MutateBytes, chance: random.Random) -> bytes:
    """Return a payload with one part of its structure changed, or some of its bytes."""
    if form == "bytes" or chance.random() < 0.25:
        return mutate(payload)
    try:
        if form == "msgpack":
            return msgspec.msgpack.encode(_changed(msgspec.msgpack.decode(payload), mutate, chance))
        if form == "json":
            return _json(payload, mutate, chance)
        lines = payload.split(b"\n")
        places = [place for place, line in enumerate(lines) if b"{" in line]
        place = chance.choice(places)
        head, brace, rest = lines[place].partition(b"{")
        line = head + _json(brace + rest, mutate, chance)
        lines[place : place + 1] = [line, line] if chance.random() < 0.1 else [line]
        return b"\n".join(lines)
    except (ValueError, RecursionError, IndexError, TypeError, OverflowError, msgspec.MsgspecError):
        return mutate(payload)


def _json(payload: bytes, mutate: MutateBytes, chance: random.Random) -> bytes:
    value = _changed(json.loads(payload), mutate, chance, raw=True)
    text = json.dumps(value, default=lambda data: data.decode("latin-1"))
    return text.replace(json.dumps(_MARK), chance.choice(RAW)).encode()


def _changed(value: Any, mutate: MutateBytes, chance: random.Random, *, raw: bool = False) -> Any:
    """Change something in a value, in place where it is a list or an object."""
    inner = value
    for _ in range(MAX_STEPS):
        if not isinstance(inner, (list, dict)) or not inner:
            break
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if isinstance(inner[key], (list, dict)) and inner[key] and chance.random() < 0.8:
            inner = inner[key]
            continue
        _change_item(inner, key, mutate, chance, raw=raw)
        return value
    return _other(value, mutate, chance, raw=raw)


def _change_item(inner: Any, key: Any, mutate: MutateBytes, chance: random.Random, *, raw: bool) -> None:
    dice = chance.random()
    if dice < 0.1:
        del inner[key]
    elif dice < 0.2 and isinstance(inner, list):
        inner.insert(key, inner[key])
    elif dice < 0.25 and isinstance(inner, dict):
        inner[_other(key, mutate, chance, raw=False)] = inner.pop(key)
    elif dice < 0.35:
        other = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner[key], inner[other] = inner[other], inner[key]
    else:
        inner[key] = _other(inner[key], mutate, chance, raw=raw)


def _other(value: Any, mutate: MutateBytes, chance: random.Random, *, raw: bool) -> Any:
    """Return another value: changed a little, or another altogether."""
    if chance.random() < 0.6:
        if isinstance(value, str):
            return mutate(value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        if isinstance(value, bytes):
            return mutate(value)
        if isinstance(value, int):
            return value + chance.choice([-1, 1, 2 ** chance.randrange(70)])
        if isinstance(value, float):
            return value * chance.choice([-1, 0, 2, 1e300])
    if raw and chance.random() < 0.4:
        return _MARK
    return chance.choice(VALUES)
