"""Choices of a request as the gateway holds them, over all its attempts."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.generation import PromptLogprob
from protocol.job import Accepted, ChatUsage, CountedBy, Deltas, Failed, ResumePoint, Tokens, Vector, pack_token_ids


@dataclass(slots=True)
class Choice:
    """One of a request's ``n`` answers, or the state of one input's vector."""

    token_ids: list[int]
    text_chars: int = 0
    finish_reason: str | None = None


class Choices:
    """All answers of one request."""

    def __init__(self, n: int, max_tokens: int, tokens_to_score: int = 0) -> None:
        """``max_tokens``: of each answer; ``tokens_to_score``: how many prompt tokens' logprobs are wanted."""
        self.scored_tokens = 0  # of these: how many are here
        self.revision = ""  # Revision.weights of whoever has made what is held; empty: not told
        self.is_estimated = False  # some of it was counted by us, for want of the engine's own counts
        self._max_tokens = max_tokens
        self._tokens_to_score = tokens_to_score
        self._choices = [Choice([]) for _ in range(n)]

    def clear(self) -> None:
        """Forget everything held."""
        self.scored_tokens = 0
        self.is_estimated = False
        self._choices = [Choice([]) for _ in self._choices]

    @property
    def has_output(self) -> bool:
        """True if a part of any answer exists."""
        return self.scored_tokens > 0 or any(one.token_ids or one.finish_reason for one in self._choices)

    def generated_by(self, accepted: Accepted) -> None:
        """Note which worker generates from now on. The revision of the first one counts."""
        if not self.has_output:
            self.revision = accepted.revision
        self.is_estimated = self.is_estimated or accepted.counted_by == "estimate"

    # --- what only pools that take messages bring: gateway.dispatch.chat_choices --------------------------------------

    @property
    def packed_chat(self) -> bytes | None:
        """The conversation for the next attempt; None: only workers that take token ids may run it."""
        return None

    @property
    def is_encoded(self) -> bool:
        """True if the next attempt's token ids were encoded from text."""
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
    def may_go_on(self) -> bool:
        """True if any worker can continue what is held."""
        return True

    @property
    def counted_by(self) -> CountedBy:
        """Source of the token counts."""
        return "estimate" if self.is_estimated else "engine"

    @property
    def usage(self) -> ChatUsage | None:
        """The provider's counts over all choices; None: they are counted here."""
        return None

    def is_final(self, frame: Failed) -> bool:
        """Note a failure; return whether it is the request's own, so that there is no retry."""
        return not frame.retryable

    def add_deltas(self, frame: Deltas) -> str | None:
        """Add parts of one choice; return why not, where they were never asked for."""
        return f"parts of answer {frame.index} came that was to be made of tokens"

    async def prepare(self) -> None:
        """Prepare what the next attempt begins with."""

    # --- what all have ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._choices)

    def __getitem__(self, index: int) -> Choice:
        return self._choices[index]

    def add(self, frame: Tokens) -> str | None:
        """Add what one engine step yielded for one choice; return why not, where it was never asked for."""
        index, choices = frame.index, self._choices
        if not 0 <= index < len(choices) or (choice := choices[index]).finish_reason is not None:
            return f"answer {index} was never asked for, or had ended"
        if frame.prompt_logprobs is not None:
            return self._add_prompt_logprobs(frame.prompt_logprobs)
        if len(choice.token_ids) + len(frame.token_ids) > self._max_tokens:
            return f"answer {index} has more tokens than were asked for"
        choice.token_ids.extend(frame.token_ids)
        choice.text_chars += len(frame.text)
        choice.finish_reason = frame.finish_reason
        return None

    def take(self, frame: Tokens | Deltas) -> str | None:
        """Add tokens or parts."""
        return self.add(frame) if isinstance(frame, Tokens) else self.add_deltas(frame)

    def add_vector(self, frame: Vector) -> str | None:
        """Add the answer to one input; return why not, where it was never asked for."""
        index, choices = frame.index, self._choices
        if not 0 <= index < len(choices) or choices[index].finish_reason is not None:
            return f"answer {index} was never asked for, or had ended"
        choices[index].finish_reason = "stop"
        return None

    def _add_prompt_logprobs(self, logprobs: Sequence[PromptLogprob]) -> str | None:
        """Add the logprobs of the prompt's next tokens."""
        if self.scored_tokens + len(logprobs) > self._tokens_to_score:
            return "more prompt tokens have a logprob than were asked for"
        self.scored_tokens += len(logprobs)
        return None

    def max_remaining_tokens(self, of_each: int) -> int:
        """Return how many more tokens the unfinished choices may have: ``of_each`` or what was asked for."""
        left = [self._max_tokens - len(one.token_ids) for one in self._choices if one.finish_reason is None]
        return sum(min(of_each, tokens) for tokens in left)

    def held_tokens(self) -> int:
        """Return the output tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def longest_tokens(self) -> int:
        """Return the output tokens of the longest choice."""
        return max(len(choice.token_ids) for choice in self._choices)

    def are_complete(self) -> bool:
        """Return whether every choice has its finish reason and every prompt token its requested logprob."""
        is_scored = self.scored_tokens >= self._tokens_to_score
        return is_scored and all(choice.finish_reason is not None for choice in self._choices)

    def resume_points(self) -> tuple[ResumePoint, ...]:
        """Return the resume point of each choice for the next attempt; those without output start afresh."""
        return tuple(
            ResumePoint(index, pack_token_ids(choice.token_ids), choice.text_chars, choice.finish_reason)
            for index, choice in enumerate(self._choices)
            if choice.token_ids or choice.finish_reason
        )
