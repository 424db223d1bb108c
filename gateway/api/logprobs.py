"""Log-probabilities in the formats of the public API."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final, Self

import msgspec
from msgspec import Struct

from gateway.api.schema import CompletionRequest, GenerationRequest
from protocol.generation import PromptLogprob, TokenLogprob

# --- answer options ---------------------------------------------------------------------------------------------------
#
# Options of an answer besides its text.


class AnswerOptions(Struct, frozen=True):
    """Options of one request; each is off by default."""

    service_tier: str | None = None  # the effective tier, if the request names one
    tokens_as_ids: bool = False  # logprobs name tokens as "token_id:5" instead of by text
    prompt_logprobs: int | None = None
    prompt_ids: Sequence[int] | None = None  # return the token ids of prompt and answers
    echo: str = ""  # text of the prompt, which precedes the text of every choice
    echo_logprobs: int | None = None  # number of candidates per prompt token with logprobs
    prompt_tokens: int = 0
    first_index: int = 0  # index of this prompt's first choice in the answer

    @classmethod
    def of(cls, request: GenerationRequest, prompt_ids: Sequence[int], echo: str = "", *, first_index: int = 0) -> Self:
        """Return the options that a request sets."""
        echo_logprobs = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
        return cls(
            service_tier=None if request.service_tier is None else "flex" if request.is_batch else "default",
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            prompt_logprobs=request.prompt_logprobs,
            prompt_ids=prompt_ids if request.return_token_ids else None,
            echo=echo,
            echo_logprobs=echo_logprobs,
            prompt_tokens=len(prompt_ids),
            first_index=first_index,
        )


DEFAULT_OPTIONS: Final = AnswerOptions()


# --- logprobs ---------------------------------------------------------------------------------------------------------

_Row = tuple[str, float | None, dict[str, float] | None, int]  # token, its logprob, the top tokens, its text offset

TOKENS_AT_ONCE: Final = 16  # encoded before other tasks run: about 1 ms
LOWEST: Final = -9999.0  # vLLM's value for minus infinity, which JSON cannot express


_encode_json = msgspec.json.Encoder().encode


def chat_pieces(tokens: Iterable[TokenLogprob], *, as_ids: bool) -> Iterator[bytes]:
    """Iterate over the JSON of a chat choice's ``logprobs``."""
    yield b'{"content":['
    entries = ([entry] for token in tokens for entry in chat_logprobs((token,), as_ids=as_ids))
    yield from _joined_lists(entries)
    yield b'],"refusal":null}'


def _joined_lists(lists: Iterator[list[Any]]) -> Iterator[bytes]:
    """Iterate over the JSON of the elements of all lists, without brackets."""
    separator = b""
    while some := list(chain.from_iterable(islice(lists, TOKENS_AT_ONCE))):
        yield separator + _encode_json(some)[1:-1]
        separator = b","


def chat_logprobs(tokens: Iterable[TokenLogprob], *, as_ids: bool = False) -> list[dict[str, Any]]:
    """Return the ``content`` list of a chat choice's ``logprobs``. ``as_ids``: name tokens by their ids."""
    return [
        {
            **_chat_entry(token.token_id, token.text, token.logprob, token.utf8, as_ids=as_ids),
            "top_logprobs": [_chat_entry(*candidate, as_ids=as_ids) for candidate in token.top],
        }
        for token in tokens
    ]


def _chat_entry(token_id: int, text: str, logprob: float, utf8: bytes, *, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(token_id, text, as_ids=as_ids), "logprob": logprob, "bytes": list(utf8)}


def _name(token_id: int, text: str, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def prompt_logprobs(tokens: Iterable[PromptLogprob], count: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: of each token by id, and of the ``count`` most likely alternatives."""
    return [None if token.logprob is None else _candidates(token, token.logprob, count) for token in tokens]


def _candidates(token: PromptLogprob, logprob: float, count: int) -> dict[str, Any]:
    own = (token.token_id, token.text, logprob)
    ranked = [(token.rank, own), *enumerate(token.top[:count], start=1)]
    return {
        str(token_id): {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}
        for rank, (token_id, text, logprob) in ranked
    }


class CompletionLogprobs:
    """The parallel lists of a completion's ``logprobs``. Tracks the text offset of the next token."""

    def __init__(self, *, as_ids: bool = False) -> None:
        """``as_ids``: name tokens by their ids."""
        self._offset = 0
        self._as_ids = as_ids

    def of(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the lists for the next tokens."""
        rows: list[_Row] = []
        for token in tokens:
            name = self._name(token.token_id, token.text)
            # Includes the chosen token even if it is not among the most likely ones.
            top = {self._name(id_, text): logprob for id_, text, logprob, _ in token.top} | {name: token.logprob}
            rows.append((name, token.logprob, top, self._offset))
            self._offset += len(token.text)
        return _lists(rows)

    def pieces(self, fields: dict[str, Any] | None, tokens: Iterable[TokenLogprob]) -> Iterator[bytes]:
        """Iterate over the JSON of the lists for all tokens. ``fields``: the prompt's lists, which come first."""
        lists = fields or _lists([])
        columns = {name: list(values) for name, values in lists.items()}
        largest = columns.pop("top_logprobs")

        def tops() -> Iterator[list[Any]]:
            for top in largest:
                yield [top]
            for token in tokens:
                row = self.of((token,))
                for name in columns:
                    columns[name] += row[name]
                yield list(row["top_logprobs"])

        yield b'{"top_logprobs":['
        yield from _joined_lists(tops())
        yield b"]," + _encode_json(columns)[1:]

    def of_prompt(self, tokens: Sequence[PromptLogprob], count: int, prompt: str) -> dict[str, Any]:
        """Return the lists for the tokens of the echoed prompt, with ``count`` candidates each."""
        rows: list[_Row] = []
        for token in tokens:
            name = self._name(token.token_id, token.text)
            if token.logprob is None:
                rows.append((name, None, None, self._offset))
            else:
                own = max(token.logprob, LOWEST)
                top = {self._name(id_, text): max(logprob, LOWEST) for id_, text, logprob in token.top[:count]}
                rows.append((name, own, top | {name: own}, self._offset))
            self._offset = min(self._offset + len(token.text), len(prompt))
        self._offset = len(prompt)
        return _lists(rows)

    def _name(self, token_id: int, text: str) -> str:
        return _name(token_id, text, as_ids=self._as_ids)


def _lists(rows: list[_Row]) -> dict[str, Any]:
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return dict(zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), columns, strict=True))
