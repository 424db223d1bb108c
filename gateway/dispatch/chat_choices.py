"""Choices of a request that pools which take messages may answer or continue, in parts.

What is made already continues, by whoever has the same weights,

    by ids         where engines have told all of its token ids
    by text        from ids made of its text again, where an API has told some of it
    by message     as the beginning of an assistant's message, where an API takes that

if it is mere text so far. A call of a tool, reasoning, a refusal and an answer to a schema are whole or nothing: where
one was begun, only who has its very token ids continues with it, and else nobody (``may_go_on``).
"""

from dataclasses import dataclass, field

from gateway.dispatch.choices import Choice, Choices
from gateway.dispatch.plausible import max_plausible
from gateway.request.request import Admission, Conversation
from protocol.errors import ErrorCode
from protocol.job import Accepted, ChatUsage, CountedBy, Deltas, Failed, ResumePoint, Tokens, pack_token_ids


@dataclass(slots=True)
class Parts:
    """Content of one choice beside its token ids."""

    texts: list[str] = field(default_factory=list)  # of all, whoever has made it
    has_come: bool = False  # some of it came in parts
    is_text: bool = True  # and these were text
    tokens: int = 0  # that they have: as estimated, and once an API has said it, as it says
    attempt: int = 0  # that has made the last ones
    tokens_before: int = 0  # this attempt
    usage: ChatUsage | None = None  # as the API says whose attempt has ended the choice
    encoded: list[int] | None = None  # the token ids of the text
    encoded_chars: int = 0

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(self.texts)


class ChatChoices(Choices):
    """Choices that may come as token ids or in parts; see the module."""

    def __init__(self, n: int, max_tokens: int, conversation: Conversation) -> None:
        super().__init__(n, max_tokens)
        self._conversation = conversation
        self._parts = [Parts() for _ in range(n)]
        self._is_refused = False  # by a pool that takes messages: others may do better
        self._is_chat = False  # the current attempt is such a pool's

    def clear(self) -> None:
        """Implement ``Choices`` for answers in parts."""
        super().clear()
        self._parts = [Parts() for _ in self._parts]

    # --- what comes ---------------------------------------------------------------------------------------------------

    def generated_by(self, accepted: Accepted) -> None:
        """Implement ``Choices`` for answers in parts."""
        super().generated_by(accepted)
        self._is_chat = accepted.counted_by == "provider"

    def add(self, frame: Tokens) -> str | None:
        """Implement ``Choices`` for answers in parts."""
        reason = super().add(frame)
        if reason is None and frame.text:
            self._parts[frame.index].texts.append(frame.text)
        return reason

    def add_deltas(self, frame: Deltas) -> str | None:
        """Implement ``Choices`` for answers in parts."""
        index = frame.index
        if not 0 <= index < len(self) or (choice := self[index]).finish_reason is not None:
            return f"answer {index} was never asked for, or had ended"
        parts = self._parts[index]
        if frame.attempt != parts.attempt:
            parts.attempt, parts.tokens_before = frame.attempt, parts.tokens
        tokens, most = parts.tokens + frame.tokens, max_plausible(self._max_tokens)
        if not 0 <= frame.tokens <= tokens <= most:
            return f"answer {index} cannot have {tokens} tokens"
        usage = frame.usage
        if usage is not None and usage.counted_by == "provider":
            reported = parts.tokens_before + usage.completion_tokens
            if parts.tokens_before <= reported <= most:  # else its counts are no reason to lose the answer
                parts.usage, tokens = usage, reported
        parts.tokens, parts.has_come = tokens, True
        parts.is_text = parts.is_text and all(part.kind == "text" for part in frame.parts)
        text = frame.text
        if text:
            parts.texts.append(text)
            choice.text_chars += len(text)
        choice.finish_reason = frame.finish_reason
        return None

    def is_final(self, frame: Failed) -> bool:
        """Report whether others may still try. The model's own workers may take what an API refuses.

        A retry there would be refused again, also where the worker has it for another's.
        """
        if not (self._is_chat and frame.code == ErrorCode.INVALID_REQUEST):
            return super().is_final(frame)
        self._is_refused = self._conversation.has_ids
        return not self._is_refused

    # --- what is held -------------------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Implement ``Choices`` for answers in parts."""
        return super().has_output or any(parts.has_come for parts in self._parts)

    def max_remaining_tokens(self, of_each: int) -> int:
        """Implement ``Choices`` for answers in parts."""
        left = [
            max(0, self._max_tokens - len(one.token_ids) - parts.tokens)
            for one, parts in self._rows()
            if one.finish_reason is None
        ]
        return sum(min(of_each, tokens) for tokens in left)

    def held_tokens(self) -> int:
        """Implement ``Choices`` for answers in parts."""
        return super().held_tokens() + sum(parts.tokens for parts in self._parts)

    def longest_tokens(self) -> int:
        """Implement ``Choices`` for answers in parts."""
        return max(len(one.token_ids) + parts.tokens for one, parts in self._rows())

    @property
    def counted_by(self) -> CountedBy:
        """Implement ``Choices`` for answers in parts."""
        if not any(parts.has_come for parts in self._parts):
            return super().counted_by
        return "estimate" if self.usage is None else "provider"

    @property
    def usage(self) -> ChatUsage | None:
        """Return the provider's counts. Each choice was a call of its own, with a prompt of its own."""
        reported = [parts.usage for one, parts in self._rows() if not (one.token_ids or parts.tokens_before)]
        whole = [usage for usage in reported if usage is not None]
        if len(whole) < len(self):
            return None
        return ChatUsage(
            "provider",
            sum(usage.prompt_tokens for usage in whole),
            sum(usage.completion_tokens for usage in whole),
            sum(usage.cached_tokens for usage in whole),
            sum(usage.reasoning_tokens for usage in whole),
        )

    # --- how it continues ---------------------------------------------------------------------------------------------

    @property
    def packed_chat(self) -> bytes | None:
        """Implement ``Choices`` for answers in parts."""
        return None if self._is_refused else self._conversation.packed

    @property
    def is_encoded(self) -> bool:
        """Implement ``Choices`` for answers in parts."""
        return any(parts.has_come for parts in self._parts)

    @property
    def takes_ids(self) -> bool:
        """Return resume points. An engine that gets ids must have all of them to see what is complete."""
        return all(
            not parts.has_come or (one.finish_reason is None and self._is_encoded(parts)) for one, parts in self._rows()
        )

    @property
    def takes_messages(self) -> bool:
        """Implement ``Choices`` for answers in parts."""
        return not self._is_refused and self._go_on_as_text()

    @property
    def may_go_on(self) -> bool:
        """Implement ``Choices`` for answers in parts."""
        can_read = self._conversation.encode is not None or not self._is_refused
        return not self.is_encoded or (can_read and self._go_on_as_text())

    async def prepare(self) -> None:
        """Encode the text of what came in parts."""
        encode = self._conversation.encode
        if encode is None or not self.is_encoded:
            return
        for one, parts in self._rows():
            text = parts.text
            if _is_begun(one, parts) and self._goes_on_as_text(one, parts) and len(text) != parts.encoded_chars:
                parts.encoded, parts.encoded_chars = await encode(text), len(text)

    def resume_points(self) -> tuple[ResumePoint, ...]:
        """Implement ``Choices`` for answers in parts."""
        return tuple(
            self._resume_point(index, one, parts)
            for index, (one, parts) in enumerate(self._rows())
            if one.finish_reason is not None or _is_begun(one, parts)
        )

    def _resume_point(self, index: int, one: Choice, parts: Parts) -> ResumePoint:
        token_ids = (parts.encoded or []) if parts.has_come else one.token_ids
        return ResumePoint(
            index,
            pack_token_ids(token_ids),
            one.text_chars,
            one.finish_reason,
            text=parts.text if self._goes_on_as_text(one, parts) else None,
            is_encoded=parts.has_come,
            tokens=len(one.token_ids) + parts.tokens if parts.has_come else None,
        )

    def _go_on_as_text(self) -> bool:
        return all(self._goes_on_as_text(one, parts) for one, parts in self._rows() if _is_begun(one, parts))

    def _goes_on_as_text(self, one: Choice, parts: Parts) -> bool:
        # What engines have made of a model that writes reasoning is not what was told of it.
        is_read = self._conversation.encode is not None or not one.token_ids
        return self._conversation.is_plain and parts.is_text and is_read

    def _is_encoded(self, parts: Parts) -> bool:
        is_whole = parts.encoded is not None and parts.encoded_chars == sum(map(len, parts.texts))
        return is_whole and len(parts.encoded or ()) < self._max_tokens

    def _rows(self) -> list[tuple[Choice, Parts]]:
        return list(zip(self._choices, self._parts, strict=True))


def _is_begun(one: Choice, parts: Parts) -> bool:
    return one.finish_reason is None and bool(one.token_ids or parts.has_come)


def choices_of(admission: Admission) -> Choices:
    """Return the object that holds the answers to a request."""
    most = admission.sampling.max_tokens
    if admission.conversation is None:
        return Choices(admission.answers, most, admission.tokens_to_score)
    return ChatChoices(admission.answers, most, admission.conversation)
