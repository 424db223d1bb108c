"""Options of an answer: what the client may request beside its text."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from gateway.api.schema import CompletionRequest, GenerationRequest


class AnswerOptions(Struct, frozen=True):
    """Options of one request; each is off by default."""

    service_tier: str | None = None  # the one it is served in, where the caller has named one
    tokens_as_ids: bool = False  # in logprobs, tokens are called "token_id:5" instead of by their text
    prompt_logprobs: int | None = None
    prompt_ids: Sequence[int] | None = None  # the token ids of prompt and answers are told too
    echo: str = ""  # the prompt's text, which comes before every choice's own
    echo_logprobs: int | None = None  # with the logprobs of so many candidates for each token of it
    prompt_tokens: int = 0
    first_index: int = 0  # of this prompt's choices, in the answer: another prompt's may come before


DEFAULT_OPTIONS: Final = AnswerOptions()


def details_of(
    request: GenerationRequest, prompt_ids: Sequence[int], echo: str = "", *, first_index: int = 0
) -> AnswerOptions:
    """Return the options that a request's fields ask for."""
    echo_logprobs = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    return AnswerOptions(
        service_tier=None if request.service_tier is None else "flex" if request.is_batch else "default",
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        prompt_ids=prompt_ids if request.return_token_ids else None,
        echo=echo,
        echo_logprobs=echo_logprobs,
        prompt_tokens=len(prompt_ids),
        first_index=first_index,
    )
