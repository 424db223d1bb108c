"""The interface of wire formats: requests to an inference server to continue one choice, and their answers.

One file a format in this folder, one registry in ``__init__``, and one conformance suite that all must pass
(``tests/conformance/test_engines.py``). A format is pure: it makes bodies and reads events. The connection, the
limits and the faults are ``pool_worker.engines.server_connection``'s.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import msgspec

from engine.errors import RequestRejected
from engine.types import GenerationRequest
from pool_worker.engines.framing import Framing, MalformedEvent
from protocol.generation import SamplingParams

MAX_COUNT: Final = 2**50  # of tokens, as a server tells it: the sum of a few is a number that messages may have
MAX_REVISION_CHARS: Final = 64
MAX_VERSION_CHARS: Final = 12  # enough of a digest
MAX_TOKEN_ID: Final = 2**32 - 1  # as ``protocol.job.TokenId``
_UNSET: Final = SamplingParams()

# What is done on this side of the wire, whatever the server can do; the second only where it answers in token ids.
DONE_HERE: Final = frozenset({"n", "stop", "max_tokens", "include_stop_str_in_output"})
DONE_WITH_IDS: Final = frozenset({"stop_token_ids", "skip_special_tokens"})

# What most servers of exact pools honour.
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
    """Facts that a server reports about itself; None where unknown."""

    model: str  # as the server calls it
    max_model_len: int | None = None  # prompt and output tokens of one sequence
    max_sequences: int | None = None  # that it runs at once
    max_kv_tokens: int | None = None  # that may be promised to jobs
    # That its memory holds. More may be promised: jobs rarely become as long as they may.
    memory_tokens: int | None = None
    inputs: frozenset[str] = frozenset()  # what a request may have, by name
    honoured: frozenset[str] | None = None  # of the fields of SamplingParams; None: what the format says
    # Whose other value, after a restart, is another model under the same name: see ``server_facts``.
    weights: str | None = None  # where the server has them from
    weights_version: str | None = None  # or their digest; a part of the revision, where no other is set
    tokenizer: str | None = None  # where from
    tokenizer_sample: str | None = None  # how it reads a text: token ids
    template: str | None = None  # the chat template's digest


class NotServed(MalformedEvent):
    """The server serves other models than the one asked for."""

    def __init__(self, model: str | None, served: Sequence[str]) -> None:
        self.served = ", ".join(served)  # "": none
        super().__init__(f"the server does not serve {model!r}; it serves: {self.served or 'none'}")


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probability of one output token, and the likeliest candidates: (token id, logprob)."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of one event."""

    token_ids: Sequence[int] = ()
    text: str = ""  # of a server that answers in text: what is new
    scored: Sequence[Scored] | None = None  # one for each token, where asked for
    ended_by: str | None = None  # "eos": an end token that is not among the ids; "stop" | "length": nothing follows
    cached_tokens: int = 0  # of the prompt, found in the server's prefix cache


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A request to continue one choice."""

    facts: ServerFacts
    token_ids: Sequence[int]  # the prompt, and what the choice has already
    text: str  # the same, for a server that is asked in text; empty for others
    params: SamplingParams
    max_tokens: int  # still to come
    min_tokens: int  # likewise
    seed: int | None  # of this choice
    max_model_len: int
    cache_salt: str = ""  # of the tenant, for a server that takes one; empty: none


Medium = Literal["ids", "text"]


class Abilities(Protocol):
    """The abilities of a server, however it is reached."""

    asked_in: Medium  # what the prompt is sent as
    answers_in: Medium  # what the answer comes as
    keeps_blanks: bool  # it is known to strip nothing from an answer in text
    honoured: frozenset[str]  # the fields of SamplingParams that the server honours, beside what is done here
    grammars: frozenset[str]  # the kinds of grammar that it can follow
    takes_cache_salt: bool  # its prefix cache keeps requests of different salts apart


class WireFormat(Abilities, Protocol):
    """One server's way to be asked by HTTP."""

    health_path: str
    facts_path: str  # GET; see ``facts``. Here and below, {model} stands for the model's name
    generate_path: str  # POST; answers with a stream of events
    framing: Framing

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read what ``facts_path`` answers; ``model``: the one asked for, if any. Raises MalformedEvent."""
        ...

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Make the body of a request for a stream."""
        ...

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event, of which ``seen_tokens`` came before. Raises MalformedEvent or ServerFailure."""
        ...


def facts_again(wire_format: type[WireFormat], answer: Mapping[str, Any], model: str | None) -> ServerFacts:
    """Read what ``facts_path`` answers; where other models are served now, these. Raises MalformedEvent."""
    try:
        return wire_format.facts(answer, model)
    except NotServed as error:
        if not error.served:  # it loads one, perhaps
            raise
        return ServerFacts(error.served)


def done_here(answers_in: Medium) -> frozenset[str]:
    """Return the fields of SamplingParams that need nothing of the server."""
    return DONE_HERE | DONE_WITH_IDS if answers_in == "ids" else DONE_HERE


def refuse_unknown(params: SamplingParams, known: Iterable[str], grammars: Iterable[str], server: str) -> None:
    """Raise RequestRejected for the first field that would not be honoured: nothing is silently dropped."""
    for name in SamplingParams.__struct_fields__:
        if name not in known and name != "grammar" and getattr(params, name) != getattr(_UNSET, name):
            raise RequestRejected(name, f"this pool's server ({server}) does not support it")
    if params.grammar is not None and params.grammar.kind not in grammars:
        raise RequestRejected(
            params.grammar.field, f"this pool's server ({server}) cannot follow a {params.grammar.kind}"
        )


def without_optional_grammar(request: GenerationRequest, grammars: Container[str]) -> GenerationRequest:
    """Return a request without a grammar that nobody asked for, where the server cannot follow it.

    It cannot where a half-made answer is resumed, either: it would begin the grammar again in its middle.
    """
    grammar = request.sampling.grammar
    if grammar is None or not grammar.is_optional:
        return request
    if grammar.kind in grammars and not any(point.token_ids for point in request.resume):
        return request
    return replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=None))


def count(value: object) -> int | None:
    """Return a count that a server reports; None where it cannot be one."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def limit(value: object) -> int | None:
    """Return a limit that a server reports; None where it cannot be one."""
    return count(value) or None


def text(value: object) -> str | None:
    """Return a text that a server reports; None where there is none."""
    return value if isinstance(value, str) and value else None


def default_revision(kind: str, model: str, facts: ServerFacts | None) -> str:
    """Return what the weights of a server are called, by which workers continue each other's answers."""
    version = None if facts is None else facts.weights_version
    parts = [kind, model] if version is None else [kind, version[:MAX_VERSION_CHARS], model]
    return ":".join(parts)[:MAX_REVISION_CHARS]


def only_model(model: str | None, *names: object) -> str | None:
    """Return how a server's only model is called: ``model``, or else the first of the ``names`` that it reports.

    Raises NotServed where ``model`` is none of them, nor the last part of a path among them.
    """
    known = [name for name in map(text, names) if name is not None]
    if model is None or not known:
        return model or next(iter(known), None)
    if model not in {*known, *(name.rstrip("/").rpartition("/")[2] for name in known)}:
        raise NotServed(model, known[:1])
    return model


def ids(value: object, name: str) -> tuple[int, ...]:
    """Return a list of token ids from an event. Raises MalformedEvent."""
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in value):
        raise MalformedEvent(f"{name} is no list of token ids")
    return tuple(value)
