"""Answers that follow a grammar: a mask over the vocabulary at every token, from llguidance.

llguidance (https://github.com/guidance-ai/llguidance) keeps an Earley parser over the answer so far and says which
tokens may follow. A mask takes some 50 µs, a large schema up to a second to compile, and both let go of the GIL: so
grammars are compiled, and masks made, in threads of their own beside the running batch. These run nothing of torch,
which would give them a set of OpenMP threads each.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.errors import RequestRejected
from engine.types import GenerationRequest, Grammar

COMPILING_THREADS: Final = 2  # so that one enormous schema does not hold up all others
MAX_COMPILED: Final = 64  # grammars kept for those who ask with the same one again
MAX_SOURCE_CHARS: Final = 200_000
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,20}"  # between the parts of JSON: some models never stop making it
ANY_OBJECT: Final = '{"type": "object"}'
# What each byte of a mask, a bit for each token, the lowest first, adds to the logits of its eight tokens.
_ADDED: Final = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0.0, -np.inf).astype(np.float32)


class GrammarError(Exception):
    """The parser has given up on an answer: by a limit of its own, or at a token that it does not allow."""


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._mask: NDArray[np.float32] | GrammarError | None = None  # for the next token; None: not made yet
        self.making: Future[None] | None = None  # of the mask, in another thread

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def make_mask(self) -> None:
        """Work out which tokens may come next."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._mask = GrammarError(self._matcher.get_error())
        elif mask.count(0) == len(mask):
            self._mask = GrammarError("no token of the vocabulary may come next")
        else:
            self._mask = np.take(_ADDED, np.frombuffer(mask, dtype=np.uint8), axis=0).reshape(-1)

    def forbid(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that must not come next to minus infinity. Raises GrammarError."""
        if self.making is not None:
            self.making.result()
            self.making = None
        mask = self._mask
        if not isinstance(mask, np.ndarray):
            raise mask or GrammarError("its mask was not made")
        logits += torch.from_numpy(mask[: len(logits)]).to(logits.device)

    def consume(self, token_id: int) -> None:
        """Take the next token. Raises GrammarError."""
        self._mask = None
        if not self._matcher.consume_token(token_id):
            raise GrammarError(self._matcher.get_error())


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar whose compilation has at least begun."""

    grammar: Grammar
    outcome: Future[LLMatcher | str]  # at the beginning of an answer; or why it is no grammar

    @property
    def is_good(self) -> bool:
        """Whether it is compiled by now, without an error."""
        done = self.outcome.done() and self.outcome.exception() is None
        return done and not isinstance(self.outcome.result(), str)

    def matcher(self) -> Matcher:
        """Return a matcher for one answer, as soon as it is there. Raises RequestRejected if the grammar is not one."""
        outcome = self.outcome.result()
        if isinstance(outcome, str):
            raise RequestRejected(self.grammar.field, f"invalid {self.grammar.kind}: {outcome}")
        return Matcher(outcome.deep_copy())


@dataclass(frozen=True, slots=True)
class Compiling:
    """A request that waits for its grammar."""

    request: GenerationRequest
    grammar: CompiledGrammar
    added_s: float  # of the monotonic clock


class MaskMaker:
    """Makes masks in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def begin(self, matchers: Sequence[Matcher]) -> None:
        """Start on masks for the next tokens. Until each is used, its matcher must not be told of a token."""
        if matchers:
            making = self._thread.submit(_make_masks, matchers)
            for matcher in matchers:
                matcher.making = making


def _make_masks(matchers: Sequence[Matcher]) -> None:
    for matcher in matchers:
        matcher.make_mask()


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary, each once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._threads = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="grammar-compiler")
        self._tokenizer: Future[LLTokenizer] | None = None  # takes up to a second; None: it cannot follow grammars
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            self._tokenizer = self._threads.submit(
                from_tokenizer, tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        self._added_tokens = tuple(tokenizer.get_added_vocab())  # their texts
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # the longest unused first
        self._limits = LLParserLimits(verbose_errors=False)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Begin to compile a grammar, unless that is done or begun. Raises RequestRejected for what is cheap to see."""
        if self._tokenizer is None:
            raise RequestRejected(grammar.field, "this model's tokenizer cannot follow grammars")
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise RequestRejected(grammar.field, f"the {grammar.kind} has more than {MAX_SOURCE_CHARS} characters")
        if grammar not in self._compiled:
            outcome = self._threads.submit(self._compile, grammar, self._tokenizer)
            self._compiled[grammar] = CompiledGrammar(grammar, outcome)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def give_up(self, compiled: CompiledGrammar) -> None:
        """Do not compile a grammar that nobody waits for any more, unless that has begun."""
        if compiled.outcome.cancel() and self._compiled.get(compiled.grammar) is compiled:
            del self._compiled[compiled.grammar]

    def _compile(self, grammar: Grammar, tokenizer: Future[LLTokenizer]) -> LLMatcher | str:
        try:
            source = _source(grammar, self._added_tokens)
            matcher = LLMatcher(tokenizer.result(), source, log_level=0, limits=self._limits)
        except (ValueError, RecursionError) as error:  # a schema that is no JSON, or nested too deeply
            return str(error)
        return str(matcher.get_error()) if matcher.is_error() else matcher


def _source(grammar: Grammar, added_tokens: Collection[str]) -> str:
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.source))
    schema = ANY_OBJECT if grammar.kind == "json_object" else grammar.source
    if any(text in schema for text in added_tokens) and isinstance(parsed := json.loads(schema), dict):
        # Of bytes that can be no others llguidance allows the tokens that its tokenizer makes of them, which for an
        # added token's text is that token; and then it does not take it. So it shall allow any tokens.
        spaced = json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **parsed})
        return str(LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\nstart: %json {spaced}\n'))
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
