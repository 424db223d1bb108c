"""A request's conversation, for pools that take messages: only requests for models that have such a pool hold one."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as the HTTP edge has prepared it."""

    packed: bytes  # protocol.job.Chat
    # Its answer is mere text: neither calls of tools nor a schema, which nobody continues with from the middle.
    is_plain: bool
    has_ids: bool  # its model's own workers can answer it, too
    # The token ids of a part of its answer, None where they cannot be told; None: it has none, or what engines make of
    # it is more than what is told (marks of reasoning).
    encode: Callable[[str], Awaitable[list[int] | None]] | None = None
