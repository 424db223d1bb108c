"""What a wire format is: how one inference server is asked for the next tokens of one choice, and what it answers.

One file a format in this folder, one registry in ``__init__``, and one conformance suite that all must pass
(``tests/conformance/test_engines.py``). A format is pure: it makes bodies and reads events. The connection, the
limits and the faults are ``pool_worker.engines.server_connection``'s.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from engine.errors import RequestRejected
from engine.types import SamplingParams
from pool_worker.engines.framing import Framing, MalformedEvent

# What is done on this side of the wire, whatever the server can do: it gives tokens, and their text is made here.
DONE_HERE: Final = frozenset(
    {"n", "stop", "stop_token_ids", "max_tokens", "skip_special_tokens", "include_stop_str_in_output"}
)

# What every server here honours.
SAMPLING: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "ignore_eos",
    }
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server tells of itself; None where it does not."""

    model: str  # as the server calls it
    max_model_len: int | None = None  # prompt and output tokens of one sequence
    max_sequences: int | None = None  # that it runs at once


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probability of one output token, and the likeliest candidates: (token id, logprob)."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event says."""

    token_ids: Sequence[int] = ()
    scored: Sequence[Scored] | None = None  # one for each token, where asked for
    ended_by: str | None = None  # "eos": an end token that is not among the ids; "stop" | "length": nothing follows
    cached_tokens: int = 0  # of the prompt, found in the server's prefix cache


@dataclass(frozen=True, slots=True)
class Ask:
    """The next tokens of one choice."""

    model: str  # as the server calls it
    token_ids: Sequence[int]  # the prompt, and what the choice has already
    params: SamplingParams
    max_tokens: int  # still to come
    min_tokens: int  # likewise
    seed: int | None  # of this choice


class WireFormat(Protocol):
    """One server's way to be asked."""

    health_path: str
    facts_path: str  # GET; see ``facts``
    generate_path: str  # POST; answers with a stream of events
    framing: Framing
    honoured: frozenset[str]  # the fields of SamplingParams that the server honours, beside DONE_HERE
    grammars: frozenset[str]  # the kinds of grammar that it can follow

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read what ``facts_path`` answers; ``model``: the one asked for, if any. Raises MalformedEvent."""
        ...

    @staticmethod
    def body(ask: Ask) -> dict[str, Any]:
        """Make the body of a request for a stream."""
        ...

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event, of which ``seen_tokens`` came before. Raises MalformedEvent or ServerFailure."""
        ...


def refuse_unknown(params: SamplingParams, honoured: Iterable[str], grammars: Iterable[str], server: str) -> None:
    """Raise RequestRejected for the first field that the server would not honour: nothing is silently dropped."""
    known = {*DONE_HERE, *honoured}
    for one in fields(params):
        if one.name in known or one.name == "grammar":
            continue
        default = one.default_factory() if callable(one.default_factory) else one.default
        if getattr(params, one.name) != default:
            raise RequestRejected(one.name, f"this pool's server ({server}) does not support it")
    if params.grammar is not None and params.grammar.kind not in grammars:
        raise RequestRejected(
            params.grammar.field, f"this pool's server ({server}) cannot follow a {params.grammar.kind}"
        )


def ids(value: object, name: str) -> tuple[int, ...]:
    """Return a list of token ids from an event. Raises MalformedEvent."""
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise MalformedEvent(f"{name} is no list of token ids")
    return tuple(value)
