"""The choices of a request that the gateway holds, over all its attempts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.request.request import Admission, Conversation
from protocol.errors import ErrorCode
from protocol.generation import PromptLogprob
from protocol.job import (
    Accepted,
    ChatUsage,
    CountedBy,
    Deltas,
    Failed,
    Finished,
    ResumePoint,
    Timings,
    Tokens,
    Vector,
    pack_token_ids,
)


@dataclass(slots=True)
class Choice:
    """One of a request's ``n`` answers, or the state of one input of a pooling request."""

    token_ids: list[int]
    text_chars: int = 0
    finish_reason: str | None = None


class Choices:
    """All choices of one request."""

    def __init__(self, n: int, max_tokens: int, tokens_to_score: int = 0) -> None:
        """``max_tokens``: of each choice; ``tokens_to_score``: number of prompt tokens whose logprobs are requested."""
        self.scored_tokens = 0  # of these, received
        self.revision = ""  # Revision.weights that generated the held output; empty: unknown
        self.is_estimated = False  # the gateway counted some tokens, because the engine reported none
        self._max_tokens = max_tokens
        self._tokens_to_score = tokens_to_score
        self._choices = [Choice([]) for _ in range(n)]

    def clear(self) -> None:
        """Drop all held output."""
        self.scored_tokens = 0
        self.is_estimated = False
        self._choices = [Choice([]) for _ in self._choices]

    @property
    def has_output(self) -> bool:
        """True if any output is held."""
        return self.scored_tokens > 0 or any(one.token_ids or one.finish_reason for one in self._choices)

    def generated_by(self, accepted: Accepted) -> None:
        """Note the worker that generates from now on; the first one's revision counts."""
        if not self.has_output:
            self.revision = accepted.revision
        self.is_estimated = self.is_estimated or accepted.counted_by == "estimate"

    # --- overridden for pools that take messages ----------------------------------------------------------------------

    @property
    def packed_chat(self) -> bytes | None:
        """The packed conversation for the next attempt; None: only workers that take token ids may run it."""
        return None

    @property
    def is_encoded(self) -> bool:
        """True if the next attempt resumes from token ids encoded from text."""
        return False

    @property
    def takes_ids(self) -> bool:
        """True if a worker that takes token ids can continue what is held."""
        return True

    @property
    def takes_messages(self) -> bool:
        """True if a pool that takes messages can continue what is held."""
        return False

    @property
    def can_resume(self) -> bool:
        """True if any worker can continue what is held."""
        return True

    @property
    def counted_by(self) -> CountedBy:
        """Source of the token counts."""
        return "estimate" if self.is_estimated else "engine"

    @property
    def usage(self) -> ChatUsage | None:
        """The provider's counts over all choices; None: the gateway counts."""
        return None

    def is_final(self, frame: Failed) -> bool:
        """Note a failure; return whether it is the request's fault, so that there is no retry."""
        return not frame.retryable

    def add_deltas(self, frame: Deltas) -> str | None:
        """Add parts of one choice; return the reason if they are not valid."""
        return f"the worker sent parts of answer {frame.index} instead of tokens"

    async def prepare(self) -> None:
        """Prepare the resume points of the next attempt."""

    # --- common to all requests ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._choices)

    def __getitem__(self, index: int) -> Choice:
        return self._choices[index]

    def add(self, frame: Tokens) -> str | None:
        """Add one engine step's output for one choice; return the reason if it is not valid."""
        index, choices = frame.index, self._choices
        if not 0 <= index < len(choices) or (choice := choices[index]).finish_reason is not None:
            return f"answer {index} was not requested, or is already complete"
        if frame.prompt_logprobs is not None:
            return self._add_prompt_logprobs(frame.prompt_logprobs)
        if len(choice.token_ids) + len(frame.token_ids) > self._max_tokens:
            return f"answer {index} has more tokens than requested"
        choice.token_ids.extend(frame.token_ids)
        choice.text_chars += len(frame.text)
        choice.finish_reason = frame.finish_reason
        return None

    def take(self, frame: Tokens | Deltas) -> str | None:
        """Add tokens or parts; return the reason if they are not valid."""
        return self.add(frame) if isinstance(frame, Tokens) else self.add_deltas(frame)

    def add_vector(self, frame: Vector) -> str | None:
        """Add the answer to one input; return the reason if it is not valid."""
        index, choices = frame.index, self._choices
        if not 0 <= index < len(choices) or choices[index].finish_reason is not None:
            return f"answer {index} was not requested, or is already complete"
        choices[index].finish_reason = "stop"
        return None

    def _add_prompt_logprobs(self, logprobs: Sequence[PromptLogprob]) -> str | None:
        """Add the logprobs of the prompt's next tokens."""
        if self.scored_tokens + len(logprobs) > self._tokens_to_score:
            return "more prompt tokens have a logprob than requested"
        self.scored_tokens += len(logprobs)
        return None

    def max_remaining_tokens(self, of_each: int) -> int:
        """Return how many more tokens the unfinished choices may have, at most ``of_each`` per choice."""
        left = [self._max_tokens - len(one.token_ids) for one in self._choices if one.finish_reason is None]
        return sum(min(of_each, tokens) for tokens in left)

    def held_tokens(self) -> int:
        """Return the output tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def longest_tokens(self) -> int:
        """Return the output tokens of the longest choice."""
        return max(len(choice.token_ids) for choice in self._choices)

    def are_complete(self) -> bool:
        """Return whether every choice has its finish reason, and every prompt token its requested logprob."""
        is_scored = self.scored_tokens >= self._tokens_to_score
        return is_scored and all(choice.finish_reason is not None for choice in self._choices)

    def resume_points(self) -> tuple[ResumePoint, ...]:
        """Return the resume point of each choice that has output."""
        return tuple(
            ResumePoint(index, pack_token_ids(choice.token_ids), choice.text_chars, choice.finish_reason)
            for index, choice in enumerate(self._choices)
            if choice.token_ids or choice.finish_reason
        )


# --- chat choices -----------------------------------------------------------------------------------------------------
#
# Choices of a request that may run on pools that take messages and answer in parts.
#
# A worker with the same weights continues a partial answer
#
#     by ids         if engines reported all of its token ids
#     by text        from ids encoded from its text, if an API sent some of it
#     by message     as a prefix of the assistant's message, if an API supports that
#
# provided that it is plain text so far. Tool calls, reasoning, refusals and answers to a schema cannot be continued
# from text: once begun, they continue only from their original token ids, or not at all (``can_resume``).


@dataclass(slots=True)
class Parts:
    """Content of one choice in addition to its token ids."""

    texts: list[str] = field(default_factory=list)  # all text, from tokens and parts
    has_come: bool = False  # some of it arrived in parts
    is_text: bool = True  # all parts were text
    tokens: int = 0  # in the parts: estimated, or reported by the API once it has
    attempt: int = 0  # that sent the last parts
    tokens_before: int = 0  # in parts of earlier attempts
    usage: ChatUsage | None = None  # reported by the API that ended the choice
    encoded: list[int] | None = None  # the token ids of the text
    encoded_chars: int = 0

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(self.texts)


class ChatChoices(Choices):
    """Choices that may arrive as token ids or in parts; see the comment above."""

    def __init__(self, n: int, max_tokens: int, conversation: Conversation) -> None:
        super().__init__(n, max_tokens)
        self._conversation = conversation
        self._parts = [Parts() for _ in range(n)]
        self._is_refused = False  # by a pool that takes messages; others may accept it
        self._is_chat = False  # the current attempt runs on a pool that takes messages

    def clear(self) -> None:
        """See ``Choices``."""
        super().clear()
        self._parts = [Parts() for _ in self._parts]

    # --- receiving ----------------------------------------------------------------------------------------------------

    def generated_by(self, accepted: Accepted) -> None:
        """See ``Choices``."""
        super().generated_by(accepted)
        self._is_chat = accepted.counted_by == "provider"

    def add(self, frame: Tokens) -> str | None:
        """See ``Choices``."""
        reason = super().add(frame)
        if reason is None and frame.text:
            self._parts[frame.index].texts.append(frame.text)
        return reason

    def add_deltas(self, frame: Deltas) -> str | None:
        """See ``Choices``."""
        index = frame.index
        if not 0 <= index < len(self) or (choice := self[index]).finish_reason is not None:
            return f"answer {index} was not requested, or is already complete"
        parts = self._parts[index]
        if frame.attempt != parts.attempt:
            parts.attempt, parts.tokens_before = frame.attempt, parts.tokens
        tokens, most = parts.tokens + frame.tokens, max_plausible(self._max_tokens)
        if not 0 <= frame.tokens <= tokens <= most:
            return f"answer {index} cannot have {tokens} tokens"
        usage = frame.usage
        if usage is not None and usage.counted_by == "provider":
            reported = parts.tokens_before + usage.completion_tokens
            if parts.tokens_before <= reported <= most:  # implausible counts are ignored; the answer is kept
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
        """Return whether the failure is final. The model's own workers may accept what an API refused.

        Pools that take messages are not retried: they would refuse it again, even if the worker calls it retryable.
        """
        if not (self._is_chat and frame.code == ErrorCode.INVALID_REQUEST):
            return super().is_final(frame)
        self._is_refused = self._conversation.has_ids
        return not self._is_refused

    # --- held output --------------------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """See ``Choices``."""
        return super().has_output or any(parts.has_come for parts in self._parts)

    def max_remaining_tokens(self, of_each: int) -> int:
        """See ``Choices``."""
        left = [
            max(0, self._max_tokens - len(one.token_ids) - parts.tokens)
            for one, parts in self._rows()
            if one.finish_reason is None
        ]
        return sum(min(of_each, tokens) for tokens in left)

    def held_tokens(self) -> int:
        """See ``Choices``."""
        return super().held_tokens() + sum(parts.tokens for parts in self._parts)

    def longest_tokens(self) -> int:
        """See ``Choices``."""
        return max(len(one.token_ids) + parts.tokens for one, parts in self._rows())

    @property
    def counted_by(self) -> CountedBy:
        """See ``Choices``."""
        if not any(parts.has_come for parts in self._parts):
            return super().counted_by
        return "estimate" if self.usage is None else "provider"

    @property
    def usage(self) -> ChatUsage | None:
        """Return the provider's counts. Each choice was a separate call, which counted the prompt."""
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

    # --- resuming -----------------------------------------------------------------------------------------------------

    @property
    def packed_chat(self) -> bytes | None:
        """See ``Choices``."""
        return None if self._is_refused else self._conversation.packed

    @property
    def is_encoded(self) -> bool:
        """See ``Choices``."""
        return any(parts.has_come for parts in self._parts)

    @property
    def takes_ids(self) -> bool:
        """True if a worker that takes token ids can continue: it needs all of them to detect the end of a choice."""
        return all(
            not parts.has_come or (one.finish_reason is None and self._is_encoded(parts)) for one, parts in self._rows()
        )

    @property
    def takes_messages(self) -> bool:
        """See ``Choices``."""
        return not self._is_refused and self._all_resume_as_text()

    @property
    def can_resume(self) -> bool:
        """See ``Choices``."""
        can_read = self._conversation.encode is not None or not self._is_refused
        return not self.is_encoded or (can_read and self._all_resume_as_text())

    async def prepare(self) -> None:
        """Encode the text that arrived in parts."""
        encode = self._conversation.encode
        if encode is None or not self.is_encoded:
            return
        for one, parts in self._rows():
            text = parts.text
            if _is_begun(one, parts) and self._resumes_as_text(one, parts) and len(text) != parts.encoded_chars:
                parts.encoded, parts.encoded_chars = await encode(text), len(text)

    def resume_points(self) -> tuple[ResumePoint, ...]:
        """See ``Choices``."""
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
            text=parts.text if self._resumes_as_text(one, parts) else None,
            is_encoded=parts.has_come,
            tokens=len(one.token_ids) + parts.tokens if parts.has_come else None,
        )

    def _all_resume_as_text(self) -> bool:
        return all(self._resumes_as_text(one, parts) for one, parts in self._rows() if _is_begun(one, parts))

    def _resumes_as_text(self, one: Choice, parts: Parts) -> bool:
        # The text of token ids includes reasoning, which clients received separately.
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
    """Return the object that holds a request's choices."""
    most = admission.prompt.sampling.max_tokens
    if admission.prompt.conversation is None:
        return Choices(admission.answers, most, admission.tokens_to_score)
    return ChatChoices(admission.answers, most, admission.prompt.conversation)


# --- plausible --------------------------------------------------------------------------------------------------------
#
# Bounds on what a worker may report, so that a stolen or broken one cannot falsify a record.
#
# Workers may run on third-party machines. Token counts are bounded by what was requested and received (above, and in
# ``attempt``), other values here.

MAX_NAME_CHARS: Final = 255
SLACK_S: Final = 1.0  # of timings: two clocks differ in speed
MAX_PREEMPTIONS: Final = 1_000_000
# Other tokenizers split text differently, and APIs add text to prompts.
COUNT_FACTOR: Final = 4
COUNT_SLACK: Final = 4096


def why_implausible(frame: Accepted) -> str | None:
    """Return why an Accepted frame is implausible, or None."""
    names = (frame.worker_id, frame.pool, frame.provider, frame.region, frame.tier or "", frame.revision)
    if not all(len(name) <= MAX_NAME_CHARS and name.isprintable() for name in names):
        return "the worker's names are too long or not printable"
    if not 0 <= frame.queue_ms < float("inf"):
        return f"a job cannot have waited {frame.queue_ms} ms"
    return None


def plausible_timings(timings: Timings | None, since_queued_s: float) -> Timings | None:
    """Return the engine's timings if they fit into the time since the attempt was queued, else None."""
    if timings is None:
        return None
    phases = (timings.engine_queue_ms, timings.prefill_ms, timings.decode_ms)
    is_plausible = all(phase >= 0 for phase in phases) and sum(phases) <= (since_queued_s + SLACK_S) * 1000
    return timings if is_plausible and 0 <= timings.preemptions <= MAX_PREEMPTIONS else None


def plausible_prompt(frame: Finished, choices: Choices, prompt_tokens: int) -> tuple[int, int]:
    """Return the provider's counts of prompt tokens and cached tokens, within bounds."""
    usage = choices.usage
    if usage is not None:
        prompt_tokens = max(0, min(usage.prompt_tokens, len(choices) * max_plausible(prompt_tokens)))
    return prompt_tokens, max(0, min(frame.cached_tokens, prompt_tokens))


def max_plausible(tokens: int) -> int:
    """Return the highest plausible count of another tokenizer for ``tokens`` of the gateway's."""
    return tokens * COUNT_FACTOR + COUNT_SLACK
