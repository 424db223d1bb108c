"""An inference server as an engine: token ids in, token ids out, so that answers can be resumed exactly.

    submit ──> one stream per choice, from a ``TokenSource`` ──token ids──> text, stop conditions ──> steps

The server only makes tokens; ``text_tokens`` adapts servers that take or return text. The tokens' text, stop strings,
counts and finish reasons are produced here, as for Spillway's own engine, so that any other pool of the model can
resume a choice from its exact tokens. ``token_source`` (by URL) and ``vllm_inprocess`` reach the server. A server that
does not answer, or makes no tokens for any stream, is lost (EngineDiedError), and the worker's jobs resume elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from engine.admission import check_request
from engine.errors import RequestRejected
from engine.pooling.pooling_types import PoolingRequest
from engine.text.detokenizer import TokenText
from engine.types import EngineInfo, GenerationRequest
from pool_worker.engines.base import Capacity, EngineDiedError
from pool_worker.engines.formats.base import (
    Delta,
    ServerFacts,
    ServerRequest,
    default_revision,
    done_here,
    refuse_unknown,
    without_optional_grammar,
)
from pool_worker.engines.server_choice import ServerChoice
from pool_worker.engines.server_connection import AttemptFailed
from pool_worker.engines.server_facts import FactsWatch, in_use
from pool_worker.engines.streaming_engine import StreamingEngine
from pool_worker.engines.text_tokens import TextTokens, UnwritableError
from pool_worker.engines.token_source import TokenSource
from pool_worker.engines.tokenizer_folder import TokenizerFolder, TokenizerFolderError
from pool_worker.settings import TokenServerSettings
from protocol.job import PROTOCOL_VERSION, CountedBy, ModelCard
from protocol.nats.objects import tokenizer_object_name

log = logging.getLogger(__name__)


class ServerEngine(StreamingEngine[GenerationRequest | PoolingRequest, ServerChoice]):
    """An inference server as an engine; see ``base.Engine`` for the life cycle."""

    def __init__(
        self, settings: TokenServerSettings, source_of: Callable[[Callable[[str], None]], TokenSource]
    ) -> None:
        """``source_of`` makes the way to the server; its argument is called with the reason when the server is lost."""
        super().__init__()
        self.name: str = settings.kind
        self._settings = settings
        self._source = source = source_of(self._lose)
        self.address = source.address
        self._abilities = source.abilities
        self._tokenizer: TokenizerFolder
        self._tokens: TokenText
        self._info: EngineInfo
        self._facts: ServerFacts
        self._text: TextTokens | None = None  # set for servers that take text
        self.takes: Literal["ids", "text"] = self._abilities.asked_in
        self.continues = True  # answers that another worker began
        self.counted_by: CountedBy = "engine" if self._abilities.answers_in == "ids" else "estimate"
        self.honoured: frozenset[str]  # supported fields of SamplingParams
        self.facts_watch: FactsWatch | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> Capacity:
        """Wait until the server is ready, and read its limits. Raises EngineDiedError."""
        settings = self._settings
        try:
            self._tokenizer = await asyncio.to_thread(TokenizerFolder, Path(settings.tokenizer))
        except TokenizerFolderError as error:
            raise EngineDiedError(f"engine.tokenizer: {error}") from error
        self._tokens = TokenText(self._tokenizer)
        if self._abilities.asked_in == "text":
            self._text = await asyncio.to_thread(self._learn_text)
            self.continues = self._may_continue(self._text)
        self._facts = facts = await self._source.start()
        self.honoured = done_here(self._abilities.answers_in) | (facts.honoured or self._abilities.honoured)
        lengths = [one for one in (settings.max_model_len, facts.max_model_len) if one is not None]
        if not lengths:
            raise EngineDiedError(f"engine.max_model_len: required, because {self.address} does not report it")
        length = min(lengths)  # the server would refuse more
        sequences = settings.max_sequences or facts.max_sequences or 64
        kv_tokens = settings.max_kv_tokens or facts.max_kv_tokens or sequences * length
        self._slots = asyncio.Semaphore(sequences)
        self._info = EngineInfo(
            model=facts.model,
            max_model_len=length,
            max_sequences=sequences,
            kv_tokens=kv_tokens,
            eos_token_ids=tuple(sorted(self._tokenizer.eos_ids)),
            dtype="unknown",
            quantize=None,
            device="remote",
            vocab_size=len(self._tokenizer),
            parameters=0,
        )
        log.info(
            "%s at %s serves %s: %d sequences of %d tokens",
            self.name,
            self.address,
            facts.model,
            sequences,
            length,
        )
        self.facts_watch = self._source.watch_facts(in_use(facts, length, sequences))
        self._watching = asyncio.create_task(self._source.watch(), name="server health")
        memory_tokens = facts.memory_tokens or facts.max_kv_tokens
        return Capacity(sequences, kv_tokens, length, facts.max_sequences, memory_tokens)

    def _learn_text(self) -> TextTokens:
        text = TextTokens(self._tokenizer, self._tokens, adds_bos=self._source.adds_bos)
        if self._abilities.answers_in == "text" and not text.can_write():
            raise EngineDiedError(f"engine.tokenizer: {self._settings.tokenizer} cannot encode every text")
        return text

    def _may_continue(self, text: TextTokens) -> bool:
        if self._source.continues is not None:
            return self._source.continues
        return self._abilities.answers_in == "ids" or self._abilities.keeps_blanks or text.keeps_blanks()

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return the card of ``model`` and its tokenizer.json."""
        tokenizer_json = self._tokenizer.backend_tokenizer.to_str().encode()
        templates = self._tokenizer.chat_templates
        card = ModelCard(
            v=PROTOCOL_VERSION,
            model=model,
            context_length=self._info.max_model_len,
            tokenizer_object=tokenizer_object_name(tokenizer_json),
            chat_template=templates.get("default"),
            special_tokens=self._tokenizer.special_tokens,
            tool_template=templates.get("tool_use"),
            revision=self._settings.revision or default_revision(self.name, self._facts.model, self._facts),
            sampling=self._tokenizer.sampling,
        )
        return card, tokenizer_json

    def _kv_usage(self, live: Sequence[ServerChoice]) -> float:
        return min(1.0, sum(choice.total_tokens for choice in live) / self._info.kv_tokens)

    async def _disconnect(self) -> None:
        await self._source.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _choices(self, request: GenerationRequest | PoolingRequest) -> list[ServerChoice]:
        if not isinstance(request, GenerationRequest):
            raise RequestRejected("model", "this pool's server makes text only")
        check_request(request, self._info)
        request = without_optional_grammar(request, self._abilities.grammars)
        params = request.sampling
        refuse_unknown(params, self.honoured, self._abilities.grammars, self.name)
        if params.grammar is not None and any(point.token_ids for point in request.resume):
            # The server would restart the grammar in the middle of the answer.
            raise RequestRejected(params.grammar.field, "this pool's server cannot resume an answer with a grammar")
        choices = [ServerChoice(request, index, self._tokens, self._tokenizer.eos_ids) for index in range(params.n)]
        for choice in choices:
            if (output := choice.replay()) is not None:
                self._put(output)
        return choices

    # --- one choice ---------------------------------------------------------------------------------------------------

    async def _generate(self, choice: ServerChoice) -> None:
        if choice.params.max_tokens == 0:
            self._put(choice.end("length"))
            return
        async with self._slot(choice):
            await self._source.stream(self._ask(choice), lambda delta: self._take(choice, delta))

    def _ask(self, choice: ServerChoice) -> ServerRequest:
        if choice.is_resumed and not self.continues:
            raise AttemptFailed("this pool's server may lose a space when it resumes a text")
        try:
            return choice.ask(self._facts, self._info.max_model_len, self._text, self._abilities.answers_in)
        except UnwritableError as error:
            raise AttemptFailed(str(error)) from error

    def _take(self, choice: ServerChoice, delta: Delta) -> bool:
        """Read a delta; return whether the choice has ended."""
        output = choice.take(delta)
        if output is not None:
            if output.token_ids:
                self._count(choice, len(output.token_ids))
            self._put(output)
        return choice.has_ended
