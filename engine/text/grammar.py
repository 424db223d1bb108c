"""Answers that follow a grammar: a mask over the vocabulary at every token, from llguidance.

llguidance (https://github.com/guidance-ai/llguidance) runs an Earley parser over the answer so far and returns the
allowed next tokens. A mask takes about 50 µs, a large schema up to a second to compile, and both release the GIL: so
grammars are compiled, and masks computed, in separate threads beside the running batch. These threads do not use torch,
which would start a set of OpenMP threads for each.

A grammar of one line can take a second for each mask, and more with every token. So the CPU time of one answer's
grammar is limited: for a single mask, and for all of them together, which get an allowance plus a fixed amount per
token. Above that the request fails permanently. The batch does not wait for late masks (``deferred_rows``), and
grammars known to be slow have a separate thread. Consuming a token costs part of its mask, which tried all tokens, so
the limit of a mask bounds that too.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.errors import GrammarTooComplex, RequestRejected
from engine.text.grammar_check import COMPILE_CPU_S, PARSER_LIMITS, GrammarCheck, TooExpensive
from engine.types import GenerationRequest
from protocol.generation import Grammar

COMPILING_THREADS: Final = 2  # so that one enormous schema does not delay all others
MAX_COMPILED: Final = 64  # cached grammars
MAX_SOURCE_CHARS: Final = 200_000
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,20}"  # between parts of JSON: some models never stop emitting it
ANY_OBJECT: Final = '{"type": "object"}'
# CPU time. With 120,000 tokens and a schema of 450 fields, the largest that llguidance accepts, a mask takes 0.0012 s
# on average and 0.008 s at most; for ordinary schemas 0.0001 and 0.003.
MASK_LIMIT_S: Final = 0.05
SLOW_MASK_S: Final = 0.002  # a grammar whose last mask took longer moves to the thread for slow ones
MASKS_ALLOWANCE_S: Final = 1.0
MASKS_PER_TOKEN_S: Final = 0.005
TOKENS_ALLOWANCE_S: Final = 0.25  # for consuming tokens, which happens in the engine's thread
TOKENS_PER_TOKEN_S: Final = 0.0005
_SCHEMA_ERROR: Final = "failed to compile JSON schema: "
_EXCERPT: Final = re.compile(r" *\d+ \| | +\^+$")  # a line of the grammar, or the mark below it
_ADVICE_OF_OPTION: Final = re.compile(r"Enable 'coerce_one_of'[^\n]*")  # an option that Spillway does not offer
_NOT_ALLOWED: Final = "satisfy the grammar"  # llguidance's message for a token that is not allowed
# What each byte of a mask (one bit per token, lowest first) adds to the logits of its eight tokens.
_ADDED: Final = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)


class GrammarError(Exception):
    """The parser cannot continue: it does not allow a token, or allows none."""


class Budget:
    """The CPU time in seconds that an answer's grammar may still spend on one kind of work."""

    def __init__(self, allowance_s: float, per_token_s: float) -> None:
        self._left_s = allowance_s
        self._per_token_s = per_token_s

    def spend(self, cost_s: float) -> bool:
        """Subtract the cost of one token; return whether the answer may continue."""
        self._left_s += self._per_token_s - cost_s
        return self._left_s >= 0


class Family:
    """The state shared by all matchers of one compiled grammar, which share a lock in llguidance.

    While one of them computes a mask, another that consumes a token waits for it, and the whole batch with it.
    """

    def __init__(self) -> None:
        self.is_slow = False  # whether its latest mask was slow
        self.making: list[Future[None]] = []  # masks in the thread for slow ones

    @property
    def is_busy(self) -> bool:
        """Report whether a slow mask is being computed."""
        self.making = [one for one in self.making if not one.done()]
        return bool(self.making)


class Matcher:
    """The position of one answer in its grammar."""

    def __init__(
        self, matcher: LLMatcher, field: str, family: Family, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Start at the grammar's beginning.

        ``field`` is the request field that the grammar came from; ``clock`` returns the calling thread's CPU time.
        """
        self.family = family
        self._matcher = matcher
        self._field = field
        self._clock = clock
        self._masks = Budget(MASKS_ALLOWANCE_S, MASKS_PER_TOKEN_S)
        self._tokens = Budget(TOKENS_ALLOWANCE_S, TOKENS_PER_TOKEN_S)
        self._mask: NDArray[np.float32] | GrammarError | GrammarTooComplex | None = None  # None: not made yet
        self.making: Future[None] | None = None  # of the next token's mask, in another thread

    @property
    def is_complete(self) -> bool:
        """True once no further token can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def is_ready(self) -> bool:
        """True when it can be used without waiting for another thread."""
        return (self.making is None or self.making.done()) and not self.family.is_busy

    @property
    def too_complex(self) -> GrammarTooComplex | None:
        """The error that ends the answer because its grammar costs too much; otherwise None."""
        return self._mask if isinstance(self._mask, GrammarTooComplex) else None

    def make_mask(self) -> None:
        """Compute which tokens may come next."""
        began_s = self._clock()
        mask = self._matcher.compute_bitmask()
        cost_s = self._clock() - began_s
        self.family.is_slow = cost_s > SLOW_MASK_S
        if self._matcher.is_error():  # an llguidance limit was hit: other errors would have shown earlier
            self._mask = self._give_up(self._matcher.get_error())
        elif not self._masks.spend(cost_s) or cost_s > MASK_LIMIT_S:
            self._mask = self._give_up("computing the allowed tokens takes too long")
        elif mask.count(0) == len(mask):
            self._mask = GrammarError("no token of the vocabulary is allowed")
        else:
            self._mask = np.take(_ADDED, np.frombuffer(mask, dtype=np.uint8), axis=0).reshape(-1)

    def forbid(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that must not come next to minus infinity; waits for the mask.

        Raises GrammarError or GrammarTooComplex.
        """
        if self.making is not None:
            self.making.result()
            self.making = None
        mask = self._mask
        if not isinstance(mask, np.ndarray):
            raise mask or GrammarError("its mask was not made")
        logits += torch.from_numpy(mask[: len(logits)]).to(logits.device)

    def discard_mask(self) -> None:
        """Discard the mask of a token that is no longer needed; one in a batch of masks is still computed."""
        if self.making in self.family.making:
            self.making.cancel()

    def consume(self, token_id: int) -> None:
        """Consume the next token. Raises GrammarError or GrammarTooComplex."""
        self._mask = None
        began_s = self._clock()
        is_taken = self._matcher.consume_token(token_id)
        if not self._tokens.spend(self._clock() - began_s):
            raise self._give_up("it takes too long to follow")
        if not is_taken:
            error = self._matcher.get_error()
            raise GrammarError(error) if _NOT_ALLOWED in error else self._give_up(error)

    def _give_up(self, reason: str) -> GrammarTooComplex:
        first_line = reason.partition("\n")[0]
        return GrammarTooComplex(self._field, f"the grammar is too complex: {first_line}")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar whose compilation has at least begun."""

    grammar: Grammar
    outcome: Future[LLMatcher | RequestRejected]  # at the beginning of an answer; or the error
    family: Family

    @property
    def is_usable(self) -> bool:
        """Report whether it compiled without an error, and a matcher can be created without waiting."""
        done = self.is_ready and self.outcome.exception() is None
        return done and not isinstance(self.outcome.result(), RequestRejected)

    @property
    def is_ready(self) -> bool:
        """Report whether compilation has succeeded or failed, and a matcher can be created without waiting."""
        return self.outcome.done() and not self.family.is_busy

    def matcher(self) -> Matcher:
        """Wait for the compilation and return a matcher for one answer.

        Raises RequestRejected if the grammar is invalid, GrammarTooComplex if it costs too much to compile.
        """
        outcome = self.outcome.result()
        if isinstance(outcome, RequestRejected):
            raise type(outcome)(
                outcome.field, outcome.message
            )  # a new one: an exception that is raised again keeps all earlier tracebacks
        return Matcher(outcome.deep_copy(), self.grammar.field, self.family)


@dataclass(frozen=True, slots=True)
class Compiling:
    """A request that waits for its grammar."""

    request: GenerationRequest
    grammar: CompiledGrammar
    added_s: float  # monotonic clock


class MaskBuilder:
    """Computes masks in two threads, one of them for slow grammars, so that no other grammar waits for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._slow_thread = ThreadPoolExecutor(1, thread_name_prefix="slow-grammar-masks")

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """Start to compute masks for the next tokens. Until each is used, its matcher must not consume a token."""
        matchers = [matcher for matcher in matchers if matcher.making is None]  # others were preempted
        usual = [matcher for matcher in matchers if not matcher.family.is_slow]
        if usual:
            making = self._thread.submit(_make_masks, usual)
            for matcher in usual:
                matcher.making = making
        for matcher in [matcher for matcher in matchers if matcher not in usual]:
            matcher.making = self._slow_thread.submit(matcher.make_mask)
            matcher.family.making.append(matcher.making)


def _make_masks(matchers: Sequence[Matcher]) -> None:
    for matcher in matchers:
        matcher.make_mask()


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, each once."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        *,
        compile_cpu_s: float = COMPILE_CPU_S,
    ) -> None:
        self._threads = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar-compiler")
        self._tokenizer: Future[LLTokenizer] | None = None  # may take a second; None: it does not support grammars
        self._check: GrammarCheck | None = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            as_json = tokenizer.backend_tokenizer.to_str()
            self._check = GrammarCheck(as_json, vocab_size, eos_ids, cpu_s=compile_cpu_s)
            self._tokenizer = self._threads.submit(
                from_tokenizer, tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        self._added_tokens = tuple(tokenizer.get_added_vocab())  # their texts
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # least recently used first

    @property
    def can_compile(self) -> bool:
        """False if the model's tokenizer does not support grammars."""
        return self._tokenizer is not None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Start to compile a grammar, unless already done. Raises RequestRejected for cheaply detected errors."""
        if self._tokenizer is None or self._check is None:
            raise RequestRejected(grammar.field, "this model's tokenizer does not support grammars")
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise RequestRejected(grammar.field, f"the {grammar.kind} exceeds {MAX_SOURCE_CHARS} characters")
        if grammar not in self._compiled:
            outcome = self._threads.submit(self._compile, grammar, self._tokenizer, self._check)
            self._compiled[grammar] = CompiledGrammar(grammar, outcome, Family())
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def give_up(self, compiled: CompiledGrammar) -> None:
        """Cancel the compilation of a grammar that no request waits for, unless it has begun."""
        if compiled.outcome.cancel() and self._compiled.get(compiled.grammar) is compiled:
            del self._compiled[compiled.grammar]

    def _compile(
        self, grammar: Grammar, tokenizer: Future[LLTokenizer], check: GrammarCheck
    ) -> LLMatcher | RequestRejected:
        try:
            source = _source(grammar, self._added_tokens)
            error = check.find_error(source)
            if not error:
                matcher = LLMatcher(tokenizer.result(), source, log_level=0, limits=PARSER_LIMITS)
                if not matcher.is_error():
                    return matcher
                error = matcher.get_error()
        except (ValueError, RecursionError) as not_read:  # a schema that is not JSON, or nested too deeply
            error = str(not_read)
        except TooExpensive as why:
            return GrammarTooComplex(grammar.field, f"the {grammar.kind} is too complex: {why}")
        kind = "JSON schema" if _SCHEMA_ERROR in error else grammar.kind
        return RequestRejected(grammar.field, f"invalid {kind}: {_readable(error)}")


def _readable(error: str) -> str:
    """Return llguidance's error without its excerpt of the grammar, which Spillway may have written, and options."""
    lines = [line for line in error.rstrip().split("\n") if not _EXCERPT.match(line)]
    kept = "\n".join(lines).rstrip().rpartition(_SCHEMA_ERROR)[2]
    return _ADVICE_OF_OPTION.sub("Use anyOf, or alternatives that exclude each other.", kept)


def _source(grammar: Grammar, added_tokens: Collection[str]) -> str:
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.source))
    schema = ANY_OBJECT if grammar.kind == "json_object" else grammar.source
    if any(text in schema for text in added_tokens) and isinstance(parsed := json.loads(schema), dict):
        # If the next bytes are forced, llguidance allows only its tokenizer's tokens for them: for the text of an added
        # token that is the added token, which it then rejects. So forcing is off.
        spaced = json.dumps({**parsed, "x-guidance": {"whitespace_pattern": WHITESPACE}})
        return str(LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\nstart: %json {spaced}\n'))
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
