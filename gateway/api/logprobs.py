"""Log-probabilities in the shapes of the public API."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.api.schema import CompletionRequest, GenerationRequest
from protocol.generation import PromptLogprob, TokenLogprob

# --- answer options ---------------------------------------------------------------------------------------------------
#
# Options of an answer: what the client may request beside its text.


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


# --- logprobs ---------------------------------------------------------------------------------------------------------

_Row = tuple[str, float | None, dict[str, float] | None, int]  # token, its logprob, the likeliest, where it begins

TOKENS_AT_ONCE: Final = 16  # are described before others' requests get their turn: some 1 ms
LOWEST: Final = -9999.0  # vLLM's word for minus infinity, which JSON has no number for


_encode_json = msgspec.json.Encoder().encode


def chat_pieces(tokens: Iterable[TokenLogprob], *, as_ids: bool) -> Iterator[bytes]:
    """The ``logprobs`` of a chat choice, piece by piece."""
    yield b'{"content":['
    entries = ([entry] for token in tokens for entry in chat_logprobs((token,), as_ids=as_ids))
    yield from _joined_lists(entries)
    yield b'],"refusal":null}'


def _joined_lists(lists: Iterator[list[Any]]) -> Iterator[bytes]:
    """The inside of one JSON list of all the lists' members, some lists at a time."""
    separator = b""
    while some := list(chain.from_iterable(islice(lists, TOKENS_AT_ONCE))):
        yield separator + _encode_json(some)[1:-1]
        separator = b","


def chat_logprobs(tokens: Iterable[TokenLogprob], *, as_ids: bool = False) -> list[dict[str, Any]]:
    """The ``content`` list of a chat choice's ``logprobs``; ``as_ids``: tokens are called by their ids."""
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
    """VLLM's ``prompt_logprobs``: of each token by its id, and of the ``count`` likeliest in its place."""
    return [None if token.logprob is None else _candidates(token, token.logprob, count) for token in tokens]


def _candidates(token: PromptLogprob, logprob: float, count: int) -> dict[str, Any]:
    own = (token.token_id, token.text, logprob)
    ranked = [(token.rank, own), *enumerate(token.top[:count], start=1)]
    return {
        str(token_id): {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": text}
        for rank, (token_id, text, logprob) in ranked
    }


class CompletionLogprobs:
    """The parallel lists of a plain completion's ``logprobs``; remembers where in the text the next token begins."""

    def __init__(self, *, as_ids: bool = False) -> None:
        """``as_ids``: tokens are called by their ids."""
        self._offset = 0
        self._as_ids = as_ids

    def of(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next tokens."""
        rows: list[_Row] = []
        for token in tokens:
            name = self._name(token.token_id, token.text)
            # The chosen token is among them even where it is none of the likeliest.
            top = {self._name(id_, text): logprob for id_, text, logprob, _ in token.top} | {name: token.logprob}
            rows.append((name, token.logprob, top, self._offset))
            self._offset += len(token.text)
        return _lists(rows)

    def pieces(self, fields: dict[str, Any] | None, tokens: Iterable[TokenLogprob]) -> Iterator[bytes]:
        """The lists for all tokens, piece by piece; ``fields``: those of the prompt, which come before."""
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
        """The lists for the prompt's tokens, whose whole text comes first; with ``count`` candidates for each."""
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
