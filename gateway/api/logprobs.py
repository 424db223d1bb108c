"""Log-probabilities in the two shapes of the public API."""

from collections.abc import Iterable
from typing import Any

from protocol.messages import TokenLogprob


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The ``content`` list of a chat choice's ``logprobs``."""
    return [
        {
            **_chat_entry(token.text, token.logprob, token.utf8),
            "top_logprobs": [_chat_entry(text, logprob, utf8) for _, text, logprob, utf8 in token.top],
        }
        for token in tokens
    ]


def _chat_entry(text: str, logprob: float, utf8: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(utf8)}


class CompletionLogprobs:
    """The parallel lists of a plain completion's ``logprobs``; remembers where in the text the next token begins."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next tokens."""
        texts: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token in tokens:
            texts.append(token.text)
            logprobs.append(token.logprob)
            # The chosen token is among them even where it is none of the likeliest.
            tops.append({**{text: logprob for _, text, logprob, _ in token.top}, token.text: token.logprob})
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
