"""Servers that stream what hosted APIs publish, around the model of ``chat_replay``: what all of them have in common.

One file a format beside this one says what it is asked and how it tells an answer, and which document says so.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from protocol.job import Part
from tests.conformance.chat_replay import ARGUMENTS, REASONING, ChatReplay, answer_words

PROMPT_TOKENS: Final = 11  # of each message
CACHED_TOKENS: Final = 4
WRITTEN_TOKENS: Final = 2  # to the prompt cache, where an API tells of it

End = Literal["stop", "length", "calls", "filter"]


@dataclass(frozen=True)
class Asked:
    """A request, whatever its API."""

    messages: list[dict[str, Any]]  # role and text
    tools: list[str] = field(default_factory=list)  # their names
    limit: int | None = None
    prefix: str = ""  # what is gone on with


@dataclass(frozen=True)
class Script:
    """An answer, whatever the API."""

    parts: list[Part]
    end: End
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        return len(self.parts)

    @property
    def reasoning_tokens(self) -> int:
        return sum(part.kind == "reasoning" for part in self.parts)


@dataclass
class ProviderReplay(ChatReplay):
    """One API."""

    failure: ClassVar[str]  # what ``failed`` says of why

    @abstractmethod
    def asked(self, body: Mapping[str, Any]) -> Asked:
        """Read a body, which is as the API's own types have it."""

    @abstractmethod
    def told(self, script: Script, end: str | None = None) -> Sequence[str | bytes]:
        """The events that tell an answer, which are as the API's own types have them. ``end``: by another reason."""

    @abstractmethod
    def failed(self) -> str | bytes:
        """The event that says that the answer has failed."""

    @abstractmethod
    def garbage(self) -> str | bytes:
        """An event that is none."""

    def events(self, body: Mapping[str, Any]) -> Sequence[str | bytes]:
        return self.told(script_of(self.asked(body)))


def script_of(asked: Asked) -> Script:
    """Return the model's answer."""
    last = asked.messages[-1]["content"] or ""
    parts: list[Part] = []
    if "think" in last and not asked.prefix:
        parts += [Part("reasoning", REASONING[:7]), Part("reasoning", REASONING[7:])]
    if asked.tools and "call" in last:
        for number, name in enumerate(asked.tools):
            parts.append(Part("call", name, f"call_{number}"))
            parts += [Part("arguments", piece) for piece in (ARGUMENTS[:9], ARGUMENTS[9:17], ARGUMENTS[17:])]
        return Script(parts, "calls", PROMPT_TOKENS * len(asked.messages))
    whole = "".join(answer_words(asked.messages))
    assert whole.startswith(asked.prefix), "a prefix of another answer"
    words = [f" {word}" for word in whole.removeprefix(asked.prefix).split(" ")]
    words[0] = words[0][1:]
    parts += [Part("text", word) for word in words if word]
    limit = asked.limit if asked.limit is not None else len(parts)
    end: End = "length" if limit < len(parts) else "filter" if "filter" in last else "stop"
    return Script(parts[:limit], end, PROMPT_TOKENS * len(asked.messages))


def exhausted(value: Any) -> Any:
    """A value whose parts have all been looked at: pydantic validates an ``Iterable`` only while it is iterated."""
    if isinstance(value, Mapping):
        return {key: exhausted(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [exhausted(one) for one in value]
    return value
