"""The plug point for engines: what a worker asks of anything that turns prompts into tokens.

One file per engine in this folder, one registry in ``__init__``, and one conformance suite
(``tests/conformance/test_engines.py``) that every engine must pass.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.pooling_types import PoolingRequest
from engine.types import EngineStats, GenerationRequest, SequenceOutput
from pool_worker.engines.chat import ChatRequest
from protocol.chat import CountedBy, Input
from protocol.messages import ModelCard


class EngineDiedError(Exception):
    """The engine can make no more tokens; the worker must exit so that its jobs go elsewhere."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold at once."""

    max_sequences: int  # or pooling jobs
    max_kv_tokens: int
    max_model_len: int  # prompt + output tokens of one sequence
    # What the engine itself says that it can hold, whatever the settings say; None: it does not say.
    told_sequences: int | None = None
    told_kv_tokens: int | None = None


class Engine(Protocol):
    """An engine as its worker sees it. Every method is called on the worker's event loop.

    The order of life is ``start`` → (``submit`` | ``cancel`` | iterate ``steps``)* → ``stop``; what may be submitted
    is what parts the two kinds below.
    """

    name: str
    takes: Input
    continues: bool  # it goes on with what another engine has begun

    async def start(self) -> Capacity:
        """Load whatever there is to load. Raises EngineDiedError with a reason an operator can act on."""
        ...

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """The card under which ``model`` is served, and its tokenizer.json.

        One without a tokenizer is not published: it only says whose answers the engine can go on with.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request; each live choice or input ends in ``steps`` as "cancelled". Unknown ids are ignored."""
        ...

    def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """Yield what each engine step made, until ``stop``. Raises EngineDiedError when the engine is lost.

        Once only, and by one caller. A choice that ``resume`` brings in complete ends again without a token.
        """
        ...

    def stats(self) -> EngineStats:
        """How it does, for the worker's heartbeats; every number counted since ``start``."""
        ...

    async def stop(self) -> None:
        """Free everything. Running requests are dropped without further output."""
        ...


class TokenEngine(Engine, Protocol):
    """An engine that is given the prompt's token ids; from these it may make the text that its server takes."""

    takes: Literal["ids", "text"]
    counted_by: CountedBy

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Take a request. Never blocks; a request the engine must refuse ends in ``steps`` with a Refusal."""
        ...


class ChatEngine(Engine, Protocol):
    """An engine that is given conversations. What ``steps`` yields that is no end by a fault is a ``ChatOutput``."""

    takes: Literal["messages"]

    def submit(self, request: ChatRequest) -> None:
        """Take a request likewise."""
        ...


AnyEngine = TokenEngine | ChatEngine
