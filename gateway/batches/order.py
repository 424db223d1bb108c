"""The order in which lines are fed: those that begin alike run together, so an engine computes a beginning once."""

import hashlib
from typing import Any, Final

import msgspec

BLOCK_CHARS: Final = 256
MAX_BLOCKS: Final = 128  # 32,768 characters; what is alike for longer counts as alike
BLOCK_BYTES: Final = 6  # of each block's hash
# What a prompt is made of, in the order in which it stands in front of the model.
FIELDS: Final = ("tools", "system", "instructions", "messages", "prompt", "input", "query")

_encode: Final = msgspec.json.Encoder().encode


def prompt_text(body: dict[str, Any]) -> str:
    """Return a text that begins as a body's prompt does, wherever two prompts begin alike."""
    return "".join(_encode(body[name]).decode() for name in FIELDS if body.get(name) is not None)


def sort_key(model: str, text: str) -> bytes:
    """Return what to sort by: a short hash of each block. Prompts whose first blocks are the same lie side by side."""
    starts = range(0, min(len(text), BLOCK_CHARS * MAX_BLOCKS), BLOCK_CHARS)
    blocks = [model, *(text[start : start + BLOCK_CHARS] for start in starts)]
    return b"".join(hashlib.blake2b(block.encode(), digest_size=BLOCK_BYTES).digest() for block in blocks)
