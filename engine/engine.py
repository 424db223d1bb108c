"""The continuous-batching engine: requests in, tokens out, one step at a time.

    add_request → schedule → forward → sample → text → SequenceOutput
                  scheduler  runner    sampler  choice

Synchronous and not thread-safe: one thread creates the engine and makes all calls. Only grammars and their masks are
computed in other threads; a request waits for its grammar before it is scheduled. (Creating the engine in another
thread works, but leaves a second set of OpenMP threads, which slowed a single small sequence by a third.)
"""

import logging
import os
import time
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import islice
from typing import Final

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.admission import check_request
from engine.attention.attention import KVPool
from engine.attention.decode_graphs import CudaGraphRecorder
from engine.attention.kv_memory import make_kv_memory
from engine.block_pool import BlockPool
from engine.choice import Choice
from engine.config import EngineConfig
from engine.deferred_rows import DeferredRows
from engine.device import choose_device
from engine.errors import EngineCorrupted, EngineError, GrammarTooComplex, RequestRejected
from engine.model.model_loader import load_model
from engine.model_runner import ModelRunner
from engine.sampler import NOT_FINITE, LogitsNotFinite, Sample, prompt_logprobs, sample
from engine.scheduler import Chunk, Scheduler, Sequence
from engine.serving_model import make_serving_model
from engine.step_stats import StepStats
from engine.text.grammar import CompiledGrammar, Compiling, MaskBuilder, Matcher
from engine.types import EngineCounters, EngineInfo, EngineLoad, EngineStats, GenerationRequest, Refusal, SequenceOutput
from protocol.generation import SamplingParams

log = logging.getLogger(__name__)

WARM_UP_PROMPT_TOKENS: Final = 8
WARM_UP_TOKENS: Final = 3  # of each answer
COMPILING_WAIT_S: Final = 0.005  # wait of a step whose only work is a pending grammar


class LLMEngine:
    """One model, one KV pool, one running batch."""

    info: EngineInfo
    tokenizers: dict[str | None, PreTrainedTokenizerBase]  # of the model (None), and of adapters that have their own

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig, *, name: str = ""
    ) -> None:
        """Take over `model`: its attention and linear layers are replaced in place.

        Raises UnsupportedModel or ConfigError.
        """
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) - 1))
        self._device = choose_device(config)
        serving = make_serving_model(model, tokenizer, config, self._device, name)
        self.info = serving.info
        self.tokenizers = serving.tokenizers
        self._vocabularies = serving.vocabularies
        self._block_pool = BlockPool(self.info.kv_tokens // config.block_size, config.block_size)
        self._scheduler = Scheduler(
            self._block_pool,
            max_sequences=config.max_sequences,
            max_batched_tokens=config.max_batched_tokens,
            lookahead_tokens=config.lookahead_tokens,
            max_scored_tokens=max(1, config.prompt_logits_bytes // (4 * self.info.vocab_size)),
            prefix_cache=config.prefix_cache,
        )
        self._max_waiting = config.max_waiting
        self._draft_tokens = config.draft_tokens
        self._kv_memory = make_kv_memory(
            serving.layer_shapes, self.info.kv_tokens, config.block_size, model.dtype, self._device
        )
        self._runner = ModelRunner(model, self._kv_memory, config.block_size, serving.adapter_rows)
        if self._device.type == "cuda" and config.cuda_graphs:
            self._runner.record_decoding(
                CudaGraphRecorder(),
                max_sequences=config.max_sequences,
                max_model_len=self.info.max_model_len,
                vocab_size=self.info.vocab_size,
            )
        self._mask_maker = MaskBuilder()
        self._late_rows = DeferredRows()
        self._compiling: dict[str, Compiling] = {}  # by request; oldest first
        self._choices: dict[str, list[Choice]] = {}  # each request's unfinished choices
        self._choice_of: dict[Sequence, Choice] = {}
        self._ready: list[SequenceOutput] = []  # outputs of the next step that need no computation
        self._step_stats = StepStats()

    @classmethod
    def from_pretrained(cls, model: str, config: EngineConfig) -> "LLMEngine":
        """Load a model by hub name or local path.

        Raises UnsupportedModel, ConfigError, or transformers' OSError where the files cannot be found.
        """
        loaded, tokenizer = load_model(model, config)
        return cls(loaded, tokenizer, config, name=model)

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request; its choices start once its grammar, if it has one, is compiled and blocks are free.

        Raises RequestRejected, naming the field, for a request that can never be served. Errors that only the grammar's
        compiler or parser finds are outputs of a step instead, however soon they are found.
        """
        check_request(request, self.info)
        if request.request_id in self._choices or request.request_id in self._compiling:
            raise RequestRejected("request_id", f"{request.request_id!r} is already running")
        if self._waiting_choices + request.sampling.n > self._max_waiting:
            raise RequestRejected("n", f"too many choices are waiting (limit {self._max_waiting})")
        self.wake_up()
        grammar, grammars = request.sampling.grammar, self._vocabularies[request.adapter].grammars
        if grammar is None or (grammar.is_optional and not grammars.can_compile):
            self._start(request, None)
        elif (compiled := grammars.compile(grammar)).is_usable:
            self._start_bound(request, compiled)
        else:
            self._compiling[request.request_id] = Compiling(request, compiled, time.monotonic())

    @property
    def _waiting_choices(self) -> int:
        return len(self._scheduler.waiting) + sum([one.request.sampling.n for one in list(self._compiling.values())])

    def _start(self, request: GenerationRequest, grammar: CompiledGrammar | None) -> None:
        vocabulary = self._vocabularies[request.adapter]
        choices = [
            Choice.start(
                request,
                index,
                frozenset(vocabulary.eos_token_ids),
                vocabulary.tokens,
                vocab_size=self.info.vocab_size,
                matcher=None if grammar is None else grammar.matcher(),
                draft_tokens=self._draft_tokens,
                device=self._device,
            )
            for index in range(request.sampling.n)
        ]
        self._ready += [output for choice in choices if (output := choice.replay()) is not None]
        live = [choice for choice in choices if choice.text.finish_reason is None]
        if live:
            self._choices[request.request_id] = live
        for choice in live:
            self._choice_of[choice.sequence] = choice
            self._scheduler.add(choice.sequence)

    def _start_bound(self, request: GenerationRequest, grammar: CompiledGrammar) -> None:
        """Start a request with a compiled grammar. An error ends this request in the next step."""
        try:
            self._start(request, grammar)
        except RequestRejected as error:
            self._ready.append(Refusal.of(request.request_id, error))
        except Exception as error:  # noqa: BLE001 - one request's grammar or resumed text must not end the others
            self._ready.append(SequenceOutput.failure(request.request_id, repr(error)))

    def _start_compiled(self) -> None:
        """Start the requests whose grammar is compiled; wait a little for one if there is nothing else to do."""
        if not (self._choices or self._ready):
            wait([one.grammar.outcome for one in self._compiling.values()], COMPILING_WAIT_S, FIRST_COMPLETED)
        for id_, one in [(id_, one) for id_, one in self._compiling.items() if one.grammar.is_ready]:
            del self._compiling[id_]
            self._start_bound(one.request, one.grammar)
            for choice in self._choices.get(id_, []):
                choice.sequence.clock.added_s = one.added_s

    def warm_up(self) -> None:
        """Answer a few internal requests, so that the first real one does not wait for torch's first-use setup.

        Leaves the prefix cache and the counters unchanged.
        """
        prompt_tokens = min(WARM_UP_PROMPT_TOKENS, min(self.info.max_model_len, self.info.kv_tokens) - WARM_UP_TOKENS)
        if prompt_tokens < 1:
            return
        prompt = [token_id % self.info.vocab_size for token_id in range(prompt_tokens)]
        usual = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for params in (usual, msgspec.structs.replace(usual, temperature=1.0, top_p=0.9, logprobs=1)):
            self.add_request(GenerationRequest("warm-up", prompt, params))
            while self.has_unfinished():
                self.step()
        self._block_pool.forget_cached()
        self._scheduler.counters = EngineCounters()
        self._step_stats = StepStats()

    @property
    def is_sleeping(self) -> bool:
        """True while the KV memory is released."""
        return isinstance(self._kv_memory, KVPool) and self._kv_memory.is_released

    def sleep(self) -> None:
        """Release the KV memory and the prefix cache to the system; the next request wakes the engine up.

        Raises EngineError while there are unfinished requests, or on a GPU, whose recorded steps hold the memory.
        """
        if self.has_unfinished() or not isinstance(self._kv_memory, KVPool):
            raise EngineError("only an idle engine on a CPU can sleep")
        self._block_pool.forget_cached()
        self._kv_memory.release()

    def wake_up(self) -> None:
        """Allocate the KV memory again."""
        if isinstance(self._kv_memory, KVPool) and self._kv_memory.is_released:
            self._kv_memory.allocate()
            log.info("the KV memory is allocated again")

    def abort(self, request_id: str) -> None:
        """Cancel a request; the next step yields "cancelled" for each of its live choices. Idempotent."""
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            self._give_up(compiling)
        for choice in self._choices.pop(request_id, []):
            self._forget(choice)
            self._ready.append(choice.end("cancelled"))

    def _give_up(self, compiling: Compiling) -> None:
        if not any(other.grammar is compiling.grammar for other in self._compiling.values()):
            self._vocabularies[compiling.request.adapter].grammars.give_up(compiling.grammar)
        id_, choices = compiling.request.request_id, compiling.request.sampling.n
        self._ready += [SequenceOutput(id_, index, [], "", finish_reason="cancelled") for index in range(choices)]

    def has_unfinished(self) -> bool:
        """Report whether a step would yield or compute anything."""
        return bool(self._choices or self._ready or self._compiling)

    @property
    def counters(self) -> EngineCounters:
        """Counters of the work done so far."""
        return self._scheduler.counters

    def load(self) -> EngineLoad:
        """Return how full the engine is."""
        running, waiting = len(self._scheduler.running), self._waiting_choices
        lengths = [sequence.max_total_tokens for sequence in self._choice_of]
        for request in (one.request for one in self._compiling.values()):
            lengths += [len(request.prompt_ids) + request.sampling.max_tokens] * request.sampling.n
        free_blocks = self._block_pool.total_blocks - sum(map(self._block_pool.blocks_for, lengths))
        return EngineLoad(
            running=running,
            waiting=waiting,
            free_sequences=max(0, self._scheduler.max_sequences - running - waiting),
            free_kv_tokens=max(0, free_blocks) * self._block_pool.block_size,
        )

    def stats(self) -> EngineStats:
        """Return current statistics. The only method that another thread may call, even during a step."""
        running, waiting = len(self._scheduler.running), self._waiting_choices
        kv_usage = self._block_pool.used_blocks / self._block_pool.total_blocks
        return self._step_stats.snapshot(running=running, waiting=waiting, kv_usage=kv_usage, counters=self.counters)

    @torch.inference_mode()
    def step(self) -> list[SequenceOutput]:
        """Compute one batch: at most one new token for every running choice."""
        if self._compiling:
            self._start_compiled()
        outputs, self._ready = self._ready, []
        if self._draft_tokens:
            for sequence in self._scheduler.running:
                self._choice_of[sequence].guess()
        chunks = self._scheduler.schedule()
        if chunks:
            sampling = [chunk for chunk in chunks if chunk.samples]
            matchers = [matcher for chunk in sampling if (matcher := self._choice_of[chunk.sequence].matcher)]
            self._mask_maker.begin(matchers)
            logits = self._runner.forward(chunks)
            sampled_rows = sum(1 + chunk.draft_tokens for chunk in sampling)
            scoring = [(chunk, chunk.unscored) for chunk in chunks if chunk.sequence.is_unscored]
            self._step_stats.step_tokens.observe(sum([chunk.tokens + chunk.draft_tokens for chunk in chunks]))
            for chunk in chunks:
                self._scheduler.computed(chunk)
            if scoring:
                outputs += self._score(scoring, logits[sampled_rows:])
            logits = logits[:sampled_rows]
            if matchers or self._late_rows:
                sampling, logits = self._late_rows.exchange(sampling, logits, self._matcher_of)
            outputs += self._sample(sampling, logits)
        elif self._late_rows:
            outputs += self._sample(*self._late_rows.exchange([], None, self._matcher_of))
        if not self._choices:
            self._check_idle()
        return outputs

    def _matcher_of(self, sequence: Sequence) -> Matcher | None:
        return self._choice_of[sequence].matcher

    def _score(self, scoring: list[tuple[Chunk, range]], logits: Tensor) -> list[SequenceOutput]:
        """Return the logprobs of the prompt tokens after the chunks' positions, whose rows `logits` [R, V] holds."""
        rows = iter(torch.split(logits, [len(positions) for _, positions in scoring]))
        outputs = []
        for chunk, positions in scoring:
            choice = self._choice_of[chunk.sequence]
            token_ids = chunk.sequence.token_ids[positions.start + 1 : positions.stop + 1]
            try:
                output = choice.score(prompt_logprobs(next(rows), token_ids, choice.params.prompt_logprobs or 0))
            except LogitsNotFinite as error:  # it ends at the time of its first token
                choice.prompt_error, choice.sequence.scored_tokens = str(error), None
            else:
                outputs += [output] if output.prompt_logprobs else []
        return outputs

    def _sample(self, chunks: list[Chunk], logits: Tensor) -> list[SequenceOutput]:
        """Sample each chunk's next token from `logits` [R, V], and further ones while its draft is right."""
        ahead = [number for chunk in chunks for number in range(1 + chunk.draft_tokens)]
        rows = [self._choice_of[chunk.sequence].sampling_row for chunk in chunks for _ in range(1 + chunk.draft_tokens)]
        samples = iter(sample(logits, rows, ahead) if rows else [])
        self._step_stats.record_tokens([chunk.sequence.clock for chunk in chunks], time.monotonic())
        outputs = []
        for chunk in chunks:
            sampled = list(islice(samples, 1 + chunk.draft_tokens))
            outputs.append(
                self._advance_through_draft(chunk, sampled)
                if chunk.draft_tokens
                else self._advance(self._choice_of[chunk.sequence], sampled[0])
            )
        self.counters.generated_tokens += sum([len(output.token_ids) for output in outputs])
        return outputs

    def _advance_through_draft(self, chunk: Chunk, samples: list[Sample]) -> SequenceOutput:
        choice, sequence = self._choice_of[chunk.sequence], chunk.sequence
        draft, sequence.draft = sequence.draft[: chunk.draft_tokens], []
        output = self._advance(choice, samples[0])
        right = 0
        while choice.text.finish_reason is None and right < len(draft) and sequence.token_ids[-1] == draft[right]:
            right += 1
            self._scheduler.computed(Chunk(sequence, 1))
            output.append(self._advance(choice, samples[right]))
        self.counters.computed_tokens += len(draft) - right
        self.counters.drafts += 1
        self.counters.guessed_tokens += len(draft)
        self.counters.right_tokens += right
        if choice.drafts is not None:
            choice.drafts.record_result(len(draft), right)
        return output

    def _advance(self, choice: Choice, sampled: Sample) -> SequenceOutput:
        """Pass the sampled token to the text stage; an error there ends this choice, not the loop."""
        reason = choice.prompt_error or sampled.error
        if sampled.token_id is None or reason:
            too_complex = choice.matcher.too_complex if choice.matcher else None
            output = _refused(choice, too_complex) if too_complex else choice.end("error", reason)
            self._retire(choice, forget=reason == NOT_FINITE)
            return output
        if choice.params.max_tokens == 0:
            output = choice.end("length")
            self._retire(choice)
            return output
        try:
            output = choice.advance(sampled.token_id, sampled.logprobs)
        except GrammarTooComplex as error:
            output = _refused(choice, error)
        except Exception as error:  # noqa: BLE001 - a failure in one request's text must not stop the others
            output = choice.end("error", f"{type(error).__name__}: {error}")
        if choice.text.finish_reason is not None:
            self._retire(choice)
        return output

    def _retire(self, choice: Choice, *, forget: bool = False) -> None:
        self._forget(choice, forget=forget)
        live = self._choices[choice.request_id]
        live.remove(choice)
        if not live:
            del self._choices[choice.request_id]

    def _forget(self, choice: Choice, *, forget: bool = False) -> None:
        self._late_rows.forget(choice.sequence)
        self._scheduler.remove(choice.sequence, forget=forget)
        del self._choice_of[choice.sequence]

    def _check_idle(self) -> None:
        if self._block_pool.used_blocks:
            raise EngineCorrupted(f"{self._block_pool.used_blocks} KV blocks are in use, but there are no sequences")


def _refused(choice: Choice, error: GrammarTooComplex) -> Refusal:
    choice.end("error")
    return Refusal.of(choice.request_id, error)
