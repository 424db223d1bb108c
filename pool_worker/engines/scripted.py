"""The scripted engine: a first-class fake whose answers depend on the prompt alone, with chosen timing and faults.

With ``faults_from_prompt``, directives in the prompt's text request special behavior; the last one of each kind counts.
``k`` is a number of output tokens of one choice. Only a request that resumes nothing fails, so that the next worker
succeeds; with ``after=0`` there is nothing to resume, so every worker fails.

    directive            effect
    ─────────────────    ────────────────────────────────────────────────────────────────────────────────
    [[tokens=k]]         the answer is exactly k tokens long and then ends normally ("stop")
    [[fail after=k]]     after k tokens the choice ends in an error; other requests are unaffected
    [[stall after=k]]    after k tokens the choice makes no more, until it is canceled
    [[crash after=k]]    after k tokens the engine is lost (EngineDiedError)
    [[exit after=k]]     after k tokens the process exits at once, as if killed with SIGKILL

With another task than "generate" it makes vectors, which depend on the input alone (``scripted_vectors``): one per
input and step, and ``k`` counts inputs.

Time passes in steps, as in a real engine: all running choices get their next token in the same step, at most one step
every ``inter_token_s``; a choice joins ``ttft_s`` after its start.
"""

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from engine.admission import check_request
from engine.errors import GrammarTooComplex, RequestRejected
from engine.pooling.pooling_types import PoolingRequest
from engine.step_stats import SequenceClock, StepStats
from engine.text.stop_strings import stop_strings
from engine.types import (
    EngineCounters,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    Refusal,
    ResumePoint,
    SequenceOutput,
)
from pool_worker.engines.base import Capacity, EngineDiedError
from pool_worker.engines.scripted_vectors import ScriptedInput, check_pooling, pooling_card
from pool_worker.engines.scripted_words import CHAT_TEMPLATE, SPECIAL_TOKENS, Script, build_tokenizer
from pool_worker.settings import ScriptedEngineSettings
from protocol.generation import SAMPLING_DEFAULTS, SamplingParams
from protocol.job import PROTOCOL_VERSION, CountedBy, ModelCard
from protocol.nats.objects import tokenizer_object_name

SIGKILL_EXIT_CODE: Final = 137
TOO_COMPLEX: Final = "[[too complex]]"  # the source of a grammar that is refused as too expensive
_DIRECTIVE: Final = re.compile(r"\[\[(?:tokens=(\d+)|(fail|stall|crash|exit) after=(\d+))\]\]")


@dataclass(frozen=True, slots=True)
class Directives:
    """The directives in a prompt."""

    tokens: int | None = None
    fault: str | None = None  # fail, stall, crash or exit
    after: int = 0

    @classmethod
    def of(cls, prompt: str) -> "Directives":
        """Read the directives in a prompt."""
        tokens, fault, after = None, None, 0
        for wanted_tokens, kind, wanted_after in _DIRECTIVE.findall(prompt):
            if kind:
                fault, after = kind, int(wanted_after)
            else:
                tokens = int(wanted_tokens)
        return cls(tokens, fault, after)


class ScriptedChoice:
    """One running choice: the same text state as in a real engine, without a model.

    waiting ──free sequence──> running ──> ended
                                  └─stall──> stalled ──cancel──^
    """

    __slots__ = (
        "answer_tokens", "chars_to_skip", "clock", "fault", "fault_at", "index", "made", "params", "prompt_tokens",
        "ready_s", "request_id", "script", "seed", "stops",
    )  # fmt: skip

    def __init__(self, request: GenerationRequest, index: int, script: Script, directives: Directives) -> None:
        self.request_id = request.request_id
        self.index = index
        self.params: SamplingParams = request.sampling
        self.script = script
        self.seed = script.answer_seed(request.prompt_ids, index)
        self.answer_tokens = directives.tokens or script.answer_tokens(self.seed)
        self.fault = None if request.resume else directives.fault
        self.fault_at = directives.after
        self.made = 0  # output tokens, including resumed ones
        self.stops = stop_strings(request.sampling.stop, request.content_finder)
        self.chars_to_skip = 0  # characters that the client already has
        self.ready_s = 0.0  # monotonic clock: earliest time of its first token
        self.prompt_tokens = len(request.prompt_ids)
        self.clock = SequenceClock(added_s=time.monotonic())

    def resume(self, point: ResumePoint) -> SequenceOutput | None:
        """Take another worker's tokens; return text that was held back, or the end if they contain it."""
        self.chars_to_skip = point.text_chars
        text, reason, stopped_by = "", None, None
        for token_id in point.token_ids:
            shown, reason, stopped_by = self._read(token_id)
            text += shown
            if reason is not None:
                break
        if not text and reason is None:
            return None
        return SequenceOutput(self.request_id, self.index, [], text, None, reason, stopped_by)

    def fault_is_due(self) -> bool:
        """Report whether the scripted fault occurs instead of the next token."""
        return self.fault is not None and self.made >= self.fault_at

    def step(self) -> SequenceOutput:
        """Make one token."""
        place = self.made
        token_id = self.script.token_at(self.seed, place)
        text, reason, stopped_by = self._read(token_id)
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [self.script.logprob_at(self.seed, place, self.params.logprobs)]
        output = SequenceOutput(self.request_id, self.index, [token_id], text, logprobs, reason, stopped_by)
        if reason is not None or self.clock.has_first_token:
            output.timings = self.clock.timings()
        return output

    def end(self, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """End without a token."""
        timings = self.clock.timings()
        return SequenceOutput(self.request_id, self.index, [], "", None, reason, None, error, timings=timings)

    def _read(self, token_id: int) -> tuple[str, FinishReason | None, int | str | None]:
        """Add one token to the text; return the new text, the finish reason and what stopped it, if it ended."""
        self.made += 1
        params = self.params
        may_stop = self.made > params.min_tokens
        if may_stop and token_id in params.stop_token_ids:
            text, stop = self.stops.end()
            if params.include_stop_str_in_output:
                text += self.script.text_of.get(token_id, "") if stop is None else stop
            return self._unseen(text), "stop", token_id if stop is None else stop
        text = self.script.text_of.get(token_id, "")
        text, stop = self.stops.push(text) if may_stop else (self.stops.skip(text), None)
        reason: FinishReason | None = None
        if may_stop and self.made >= self.answer_tokens and not params.ignore_eos:
            reason = "stop"
        elif self.made >= params.max_tokens:
            reason = "length"
        if reason is not None and stop is None:
            rest, stop = self.stops.end()
            text += rest
        if stop is not None:
            return self._unseen(text + stop * params.include_stop_str_in_output), "stop", stop
        return (self._unseen(text) if self.chars_to_skip else text), reason, None

    def _unseen(self, text: str) -> str:
        skipped = min(self.chars_to_skip, len(text))
        self.chars_to_skip -= skipped
        return text[skipped:]


class ScriptedEngine:
    """A deterministic engine without a model; see ``base.Engine`` for the life cycle."""

    name = "scripted"
    takes: Literal["ids", "text"] = "ids"
    continues = True
    counted_by: CountedBy = "engine"
    honoured = SAMPLING_DEFAULTS
    facts_watch = None

    def __init__(self, settings: ScriptedEngineSettings) -> None:
        self._settings = settings
        self._script = Script(build_tokenizer(settings.tokenizer), settings.revision)
        self._info = EngineInfo(
            model="scripted",
            max_model_len=settings.max_model_len,
            max_sequences=settings.max_sequences,
            kv_tokens=settings.max_kv_tokens,
            eos_token_ids=(self._script.end_of_text_id,),
            dtype="none",
            quantize=None,
            device="none",
            vocab_size=self._script.vocabulary_size,
            parameters=0,
        )
        self._waiting: deque[ScriptedChoice | ScriptedInput] = deque()
        self._running: list[ScriptedChoice | ScriptedInput] = []
        self._stalled: list[ScriptedChoice | ScriptedInput] = []
        self._ready: list[SequenceOutput] = []  # outputs of the next step that need no token
        self._wake = asyncio.Event()
        self._last_step_s = 0.0
        self._counters = EngineCounters()
        self._step_stats = StepStats()
        self._is_stopped = False

    async def start(self) -> Capacity:
        """Return the capacity."""
        settings = self._settings
        held = settings.max_sequences, settings.max_kv_tokens
        return Capacity(*held, settings.max_model_len, *held)

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return the card of ``model`` and its tokenizer.json."""
        tokenizer_json = self._script.tokenizer.to_str().encode()
        card = ModelCard(
            v=PROTOCOL_VERSION,
            model=model,
            context_length=self._settings.max_model_len,
            tokenizer_object=tokenizer_object_name(tokenizer_json),
            chat_template=CHAT_TEMPLATE,
            special_tokens={"eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0]},
            pooling=pooling_card(self._settings),
            revision=self._settings.revision,
        )
        return card, tokenizer_json

    def _check(self, request: GenerationRequest | PoolingRequest) -> None:
        if isinstance(request, PoolingRequest):
            check_pooling(request, self._settings)
            return
        if self._settings.task != "generate":
            raise RequestRejected("model", "this model makes vectors only")
        check_request(request, self._info)
        grammar = request.sampling.grammar
        if grammar is not None and not grammar.is_optional:
            if grammar.source == TOO_COMPLEX:
                raise GrammarTooComplex(grammar.field, "the grammar is too complex")
            raise RequestRejected(grammar.field, "the scripted engine cannot follow a grammar")
        for field in ("prompt_logprobs", "allowed_token_ids", "bad_words"):
            if getattr(request.sampling, field) not in (None, ()):
                raise RequestRejected(field, "the scripted engine has no log-probabilities")

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Accept a request without blocking."""
        self._wake.set()
        try:
            self._check(request)
        except RequestRejected as error:
            self._ready.append(Refusal.of(request.request_id, error))
            return
        if isinstance(request, PoolingRequest):
            self._waiting.extend(self._inputs(request))
            return
        directives = self._directives(request.prompt_ids)
        points = {point.index: point for point in request.resume}
        for index in range(request.sampling.n):
            choice = ScriptedChoice(request, index, self._script, directives)
            output = choice.resume(points[index]) if index in points else None
            if request.sampling.max_tokens == 0:
                output = choice.end("length")
            if output is not None:
                self._ready.append(output)
            if output is None or output.finish_reason is None:
                self._waiting.append(choice)

    def _inputs(self, request: PoolingRequest) -> list[ScriptedInput]:
        resumes = bool(request.inputs) and len(request.inputs) <= request.inputs[-1].index  # some are already answered
        directives = self._directives([token for one in request.inputs for token in one.token_ids])
        fault = None if resumes else directives.fault
        return [
            ScriptedInput(
                request, one, self._settings.dimensions, fault=fault if one.index == directives.after else None
            )
            for one in request.inputs
        ]

    def _directives(self, prompt_ids: Sequence[int]) -> Directives:
        if not self._settings.faults_from_prompt:
            return Directives()
        return Directives.of(self._script.tokenizer.decode(list(prompt_ids), skip_special_tokens=False))

    def cancel(self, request_id: str) -> None:
        """Cancel a request; unknown ids are ignored."""
        for choices in (self._running, self._stalled, self._waiting):
            cancelled = [choice for choice in choices if choice.request_id == request_id]
            for choice in cancelled:
                choices.remove(choice)
                self._ready.append(choice.end("cancelled"))
        self._wake.set()

    async def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """Yield the outputs of each engine step."""
        while not self._is_stopped:
            self._admit()
            await self._wait_for_step()
            outputs, self._ready = self._ready, []
            now_s = time.monotonic()
            if self._running and self._due_s() <= now_s:
                self._last_step_s = now_s
                outputs += self._step(now_s)
            if outputs:
                yield outputs

    def stats(self) -> EngineStats:
        """Return statistics for the worker's heartbeats."""
        held = [*self._running, *self._stalled]
        kv_tokens = sum([choice.prompt_tokens + choice.made for choice in held])
        kv_usage = min(1.0, kv_tokens / self._settings.max_kv_tokens)
        waiting = len(self._waiting)
        return self._step_stats.snapshot(running=len(held), waiting=waiting, kv_usage=kv_usage, counters=self._counters)

    async def stop(self) -> None:
        """Stop everything and free its resources."""
        self._is_stopped = True
        self._wake.set()

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._stalled) < self._settings.max_sequences:
            choice = self._waiting.popleft()
            choice.clock.scheduled_s = time.monotonic()
            choice.ready_s = choice.clock.scheduled_s + self._settings.ttft_s
            self._counters.prompt_tokens += choice.prompt_tokens
            self._running.append(choice)

    async def _wait_for_step(self) -> None:
        """Return when the next step is due or another output is ready; always yield to other tasks."""
        if self._ready:
            await asyncio.sleep(0)
            return
        if not self._running:
            await self._woken()
            return
        wait_s = self._due_s() - time.monotonic()
        if wait_s <= 0:
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)
        await self._woken()
        timer.cancel()

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def _due_s(self) -> float:
        """Return when the next step is due: one interval after the last step, and not before a choice is ready."""
        next_s = self._last_step_s + self._settings.inter_token_s
        if self._settings.ttft_s == 0:
            return next_s
        return max(next_s, min(choice.ready_s for choice in self._running))

    def _step(self, now_s: float) -> list[SequenceOutput]:
        """Make one token for every choice that is ready."""
        ready = [choice for choice in self._running if choice.ready_s <= now_s]
        striking = [choice for choice in ready if choice.fault is not None and choice.fault_is_due()]
        yielding = [choice for choice in ready if choice not in striking] if striking else ready
        self._step_stats.record_tokens([choice.clock for choice in yielding], now_s)
        self._step_stats.step_tokens.observe(len(yielding))
        outputs = [choice.step() for choice in yielding]
        self._counters.generated_tokens += sum([len(output.token_ids) for output in outputs])
        gone = {choice for choice, output in zip(yielding, outputs, strict=True) if output.finish_reason is not None}
        gone.update(striking)
        self._running = [choice for choice in self._running if choice not in gone]
        for choice in striking:
            self._inject_fault(choice, outputs)
        return outputs

    def _inject_fault(self, choice: ScriptedChoice | ScriptedInput, outputs: list[SequenceOutput]) -> None:
        if choice.fault == "crash":
            raise EngineDiedError(f"scripted crash after {choice.made} tokens of {choice.request_id}")
        if choice.fault == "exit":
            os._exit(SIGKILL_EXIT_CODE)
        if choice.fault == "fail":
            outputs.append(choice.end("error", f"scripted failure after {choice.made} tokens"))
        else:
            self._stalled.append(choice)
