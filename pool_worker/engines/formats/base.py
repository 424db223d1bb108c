"""The interface of wire formats: requests to an inference server to continue one choice, and their answers.

One file per format in this folder, one registry in ``__init__``, and one conformance suite that all must pass
(``tests/conformance/test_engines.py``). A format is pure: it builds bodies and reads events.
``pool_worker.engines.server_connection`` handles the connection, its limits and its faults.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import msgspec

from engine.errors import RequestRejected
from engine.types import GenerationRequest
from pool_worker.engines.framing import Framing, MalformedEvent
from protocol.generation import SamplingParams

MAX_COUNT: Final = 2**50  # maximum that a server may report: sums of a few stay within the range of messages
MAX_REVISION_CHARS: Final = 64
MAX_VERSION_CHARS: Final = 12  # of a digest: enough to be unique
MAX_TOKEN_ID: Final = 2**32 - 1  # as ``protocol.job.TokenId``
_UNSET: Final = SamplingParams()

# Handled by the worker for every server; the second set only for answers in token ids.
DONE_HERE: Final = frozenset({"n", "stop", "max_tokens", "include_stop_str_in_output"})
DONE_WITH_IDS: Final = frozenset({"stop_token_ids", "skip_special_tokens"})

# Supported by most servers of exact pools.
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
    """Facts that a server reports about itself; None: unknown."""

    model: str  # as the server calls it
    max_model_len: int | None = None  # prompt and output tokens of one sequence
    max_sequences: int | None = None  # that run at once
    max_kv_tokens: int | None = None  # that may be promised to jobs
    # That its memory holds. More may be promised: jobs rarely reach their maximum length.
    memory_tokens: int | None = None
    inputs: frozenset[str] = frozenset()  # names of the request's inputs
    honoured: frozenset[str] | None = None  # supported fields of SamplingParams; None: as the format says
    # If one of these differs after a restart, the server has another model under the same name: see ``server_facts``.
    weights: str | None = None  # where the server loaded them from
    weights_version: str | None = None  # or their digest; part of the default revision
    tokenizer: str | None = None  # where it was loaded from
    tokenizer_sample: str | None = None  # of a sample text: token ids
    template: str | None = None  # digest of the chat template


class NotServed(MalformedEvent):
    """The server serves other models than the requested one."""

    def __init__(self, model: str | None, served: Sequence[str]) -> None:
        self.served = ", ".join(served)  # "": none
        super().__init__(f"the server does not serve {model!r}; it serves: {self.served or 'none'}")


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probability of one output token, and of the likeliest candidates: (token id, logprob)."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of one event."""

    token_ids: Sequence[int] = ()
    text: str = ""  # new text, from a server that answers in text
    scored: Sequence[Scored] | None = None  # one for each token, if requested
    ended_by: str | None = None  # "eos": an end token that is not among the ids; "stop" | "length": nothing follows
    cached_tokens: int = 0  # prompt tokens found in the server's prefix cache


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A request to continue one choice."""

    facts: ServerFacts
    token_ids: Sequence[int]  # the prompt and the output so far
    text: str  # the same as text, for a server that takes text; otherwise empty
    params: SamplingParams
    max_tokens: int  # still allowed
    min_tokens: int  # still required
    seed: int | None  # of this choice
    max_model_len: int
    cache_salt: str = ""  # of the tenant, for servers that take one; empty: none


Medium = Literal["ids", "text"]


class Abilities(Protocol):
    """What a server can do, however it is reached."""

    asked_in: Medium  # form of the prompt
    answers_in: Medium  # form of the answer
    keeps_blanks: bool  # it is known not to strip text answers
    honoured: frozenset[str]  # supported fields of SamplingParams besides those handled by the worker
    grammars: frozenset[str]  # supported kinds of grammar
    takes_cache_salt: bool  # its prefix cache separates requests by salt


class WireFormat(Abilities, Protocol):
    """The HTTP wire format of one server."""

    health_path: str
    facts_path: str  # GET; see ``facts``. Here and below, {model} is replaced by the model's name
    generate_path: str  # POST; answers with a stream of events
    framing: Framing

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the answer of ``facts_path``; ``model``: the requested one, if any. Raises MalformedEvent."""
        ...

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        ...

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event, after ``seen_tokens`` earlier tokens. Raises MalformedEvent or ServerFailure."""
        ...


def facts_again(wire_format: type[WireFormat], answer: Mapping[str, Any], model: str | None) -> ServerFacts:
    """Read the answer of ``facts_path`` again; report other models if those are served now. Raises MalformedEvent."""
    try:
        return wire_format.facts(answer, model)
    except NotServed as error:
        if not error.served:  # it may still be loading one
            raise
        return ServerFacts(error.served)


def done_here(answers_in: Medium) -> frozenset[str]:
    """Return the fields of SamplingParams that the worker handles without the server."""
    return DONE_HERE | DONE_WITH_IDS if answers_in == "ids" else DONE_HERE


def refuse_unknown(params: SamplingParams, known: Iterable[str], grammars: Iterable[str], server: str) -> None:
    """Raise RequestRejected for the first unsupported field: nothing is dropped silently."""
    for name in SamplingParams.__struct_fields__:
        if name not in known and name != "grammar" and getattr(params, name) != getattr(_UNSET, name):
            raise RequestRejected(name, f"this pool's server ({server}) does not support it")
    if params.grammar is not None and params.grammar.kind not in grammars:
        raise RequestRejected(
            params.grammar.field, f"this pool's server ({server}) does not support {params.grammar.kind} grammars"
        )


def without_optional_grammar(request: GenerationRequest, grammars: Container[str]) -> GenerationRequest:
    """Return a request without its optional grammar, if the server cannot follow it.

    It never can for a resumed answer: it would restart the grammar in the middle.
    """
    grammar = request.sampling.grammar
    if grammar is None or not grammar.is_optional:
        return request
    if grammar.kind in grammars and not any(point.token_ids for point in request.resume):
        return request
    return replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=None))


def count(value: object) -> int | None:
    """Return a reported count; None if it is implausible."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def limit(value: object) -> int | None:
    """Return a reported limit; None if it is implausible."""
    return count(value) or None


def text(value: object) -> str | None:
    """Return a reported text; None if it is missing or empty."""
    return value if isinstance(value, str) and value else None


def default_revision(kind: str, model: str, facts: ServerFacts | None) -> str:
    """Return the default revision: the name of a server's weights, by which workers resume each other's answers."""
    version = None if facts is None else facts.weights_version
    parts = [kind, model] if version is None else [kind, version[:MAX_VERSION_CHARS], model]
    return ":".join(parts)[:MAX_REVISION_CHARS]


def only_model(model: str | None, *names: object) -> str | None:
    """Return the name of a server's only model: ``model``, or else the first of ``names`` that is reported.

    Raises NotServed if ``model`` is none of them, nor the last part of a path among them.
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
        raise MalformedEvent(f"{name} is not a list of token ids")
    return tuple(value)
