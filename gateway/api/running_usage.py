"""Usage in every event of a stream, as far as it has come (vLLM's ``continuous_usage_stats``)."""

from typing import Final

from gateway.api.answer_options import AnswerOptions
from gateway.api.fields import encode_json
from gateway.api.schema import GenerationRequest
from gateway.api.sse import NO_USAGE_YET, usage_fields
from gateway.request.mailbox import Chunks
from protocol.job import Deltas, Tokens

_NO_CACHE_KNOWN: Final = 0  # how much of the prompt was cached is told when the request has ended


def with_running_usage(chunks: Chunks, request: GenerationRequest, details: AnswerOptions) -> Chunks:
    """The same chunks, with the usage so far in them where that is wanted."""
    options = request.stream_options
    is_wanted = request.include_usage and options is not None and options.continuous_usage_stats
    return WithRunningUsage(chunks, details.prompt_tokens) if is_wanted else chunks


class WithRunningUsage:
    """``Chunks`` that tell usage instead of null."""

    def __init__(self, inner: Chunks, prompt_tokens: int) -> None:
        self.usage = inner.usage
        self._inner = inner
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        self._completion_tokens += len(frame.token_ids) if isinstance(frame, Tokens) else frame.tokens
        usage = usage_fields(self._prompt_tokens, _NO_CACHE_KNOWN, self._completion_tokens)
        # In texts, these characters are escaped.
        return self._inner.of(frame).replace(NO_USAGE_YET, b',"usage":' + encode_json(usage) + b"}\n\n")
