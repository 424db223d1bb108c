"""What the gateway holds of a request's choices, over all its attempts."""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.logprobs import PromptLogprob
from protocol.messages import ResumePoint, Tokens, Vector, pack_token_ids


@dataclass(slots=True)
class Choice:
    """One of a request's ``n`` answers, or what is known of one input's vector."""

    token_ids: list[int]
    text_chars: int = 0
    finish_reason: str | None = None


class Choices:
    """All answers of one request."""

    def __init__(self, n: int, tokens_to_score: int = 0) -> None:
        """``tokens_to_score``: how many prompt tokens' logprobs are wanted beside the answers."""
        self.scored_tokens = 0  # of these: how many are here
        self._tokens_to_score = tokens_to_score
        self._choices = [Choice([]) for _ in range(n)]

    def __len__(self) -> int:
        return len(self._choices)

    def __getitem__(self, index: int) -> Choice:
        return self._choices[index]

    def add(self, frame: Tokens) -> None:
        """Take what one engine step yielded for one choice."""
        choice = self._choices[frame.index]
        choice.token_ids.extend(frame.token_ids)
        choice.text_chars += len(frame.text)
        choice.finish_reason = frame.finish_reason

    def add_prompt_logprobs(self, logprobs: Sequence[PromptLogprob]) -> None:
        """Take the logprobs of the prompt's next tokens."""
        self.scored_tokens += len(logprobs)

    def add_vector(self, frame: Vector) -> None:
        """Take the answer to one input."""
        self._choices[frame.index].finish_reason = "stop"

    def held_tokens(self) -> int:
        """Output tokens over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def longest_tokens(self) -> int:
        """Output tokens of the longest choice."""
        return max(len(choice.token_ids) for choice in self._choices)

    def are_complete(self) -> bool:
        """Whether every choice has its finish reason, and every prompt token the logprob that is wanted."""
        is_scored = self.scored_tokens >= self._tokens_to_score
        return is_scored and all(choice.finish_reason is not None for choice in self._choices)

    def resume_points(self) -> tuple[ResumePoint, ...]:
        """Where each choice stands, for the next attempt; those without any output start afresh."""
        return tuple(
            ResumePoint(index, pack_token_ids(choice.token_ids), choice.text_chars, choice.finish_reason)
            for index, choice in enumerate(self._choices)
            if choice.token_ids or choice.finish_reason
        )
