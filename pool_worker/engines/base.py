"""The interface between a worker and its engine, which turns prompts into tokens.

One file per engine in this folder, one registry in ``__init__``, and one conformance suite
(``tests/conformance/test_engines.py``) that every engine must pass.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.pooling.pooling_types import PoolingRequest
from engine.types import EngineStats, GenerationRequest, SequenceOutput
from pool_worker.engines.chat import ChatRequest
from pool_worker.engines.server_facts import FactsWatch
from protocol.errors import ExpectedError
from protocol.job import CountedBy, Input, ModelCard


class EngineDiedError(ExpectedError):
    """The engine is lost; the worker must exit so that its jobs resume elsewhere."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of an engine."""

    max_sequences: int  # or pooling jobs
    max_kv_tokens: int
    max_model_len: int  # prompt and output tokens of one sequence
    # Reported by the engine; overrides the settings. None: unknown.
    server_max_sequences: int | None = None
    server_max_kv_tokens: int | None = None


class Engine(Protocol):
    """An engine's interface. Every method is called on the worker's event loop.

    The life cycle is ``start`` → (``submit`` | ``cancel`` | iterate ``steps``)* → ``stop``. The two kinds below differ
    in what they accept.
    """

    name: str
    takes: Input
    continues: bool  # it can resume an answer that another engine began
    honoured: frozenset[str]  # fields of SamplingParams that it supports; others are left out of a model's own defaults

    @property
    def facts_watch(self) -> FactsWatch | None:
        """Watches whether the server stays the same, once started; None: the engine cannot change."""
        ...

    async def start(self) -> Capacity:
        """Load the model or connect. Raises EngineDiedError with a reason an operator can act on."""
        ...

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return the card under which ``model`` is served, and its tokenizer.json.

        A card without a tokenizer is not published: it only says which workers' answers the engine can continue.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request; each live choice or input ends in ``steps`` as "cancelled". Unknown ids are ignored."""
        ...

    def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """Yield the outputs of each engine step until ``stop``. Raises EngineDiedError when the engine is lost.

        Called once. A choice that ``resume`` brings in complete ends again without a token.
        """
        ...

    def stats(self) -> EngineStats:
        """Return statistics for the worker's heartbeats; every number counted since ``start``."""
        ...

    async def stop(self) -> None:
        """Free all resources. Drops running requests without further output."""
        ...


class TokenEngine(Engine, Protocol):
    """An engine that receives the prompt's token ids, and may convert them to text for its server."""

    takes: Literal["ids", "text"]
    counted_by: CountedBy

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Accept a request. Never blocks; a request that the engine refuses ends in ``steps`` with a Refusal."""
        ...


class ChatEngine(Engine, Protocol):
    """An engine that receives conversations. ``steps`` yields ``ChatOutput``, except for failures."""

    takes: Literal["messages"]

    def fitted(self, request: ChatRequest) -> tuple[ChatRequest, tuple[str, ...]]:
        """Return a request without the fields that are dropped because the API lacks them, and their names."""
        ...

    def submit(self, request: ChatRequest) -> None:
        """Accept a request. Never blocks; refusals end in ``steps`` as for TokenEngine."""
        ...


AnyEngine = TokenEngine | ChatEngine
