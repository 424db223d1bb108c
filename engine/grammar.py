"""Answers that follow a grammar: a mask over the vocabulary at every token, from llguidance.

llguidance (https://github.com/guidance-ai/llguidance) keeps an Earley parser over the answer so far and says which
tokens may follow. Compiling and masking release the GIL; a mask takes some 50 µs, a large schema up to a second.
"""

from collections import OrderedDict
from typing import Final

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.errors import RequestRejected
from engine.types import Grammar

MAX_COMPILED: Final = 64  # grammars kept for those who ask with the same one again
MAX_SOURCE_CHARS: Final = 200_000
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,20}"  # between the parts of JSON: some models never stop making it
ANY_OBJECT: Final = '{"type": "object"}'
_BITS: Final = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


class GrammarError(Exception):
    """The parser has given up on an answer: by a limit of its own, or at a token that it does not allow."""


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def forbid(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that must not come next to minus infinity. Raises GrammarError."""
        mask = bytearray(self._matcher.compute_bitmask())  # a bit for each token, the lowest first
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        if mask.count(0) == len(mask):
            raise GrammarError("no token of the vocabulary may come next")
        bits = torch.frombuffer(mask, dtype=torch.uint8)[:, None] & _BITS
        logits.masked_fill_((bits.flatten()[: len(logits)] == 0).to(logits.device), float("-inf"))

    def consume(self, token_id: int) -> None:
        """Take the next token. Raises GrammarError."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(self._matcher.get_error())


class GrammarCompiler:
    """Makes matchers for one model's vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None  # made at first need: it takes up to a second
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # the longest unused first
        self._limits = LLParserLimits(verbose_errors=False)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of an answer. Raises RequestRejected if the grammar is not one."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.source) > MAX_SOURCE_CHARS:
            raise RequestRejected(grammar.field, f"the {grammar.kind} has more than {MAX_SOURCE_CHARS} characters")
        try:
            matcher = LLMatcher(self._ll_tokenizer(grammar.field), _source(grammar), log_level=0, limits=self._limits)
        except ValueError as error:  # a schema that is no JSON
            raise RequestRejected(grammar.field, f"invalid {grammar.kind}: {error}") from error
        if matcher.is_error():
            raise RequestRejected(grammar.field, f"invalid {grammar.kind}: {matcher.get_error()}")
        return matcher

    def _ll_tokenizer(self, field: str) -> LLTokenizer:
        if self._tokenizer is None:
            if not isinstance(self._hf_tokenizer, PreTrainedTokenizerFast):
                raise RequestRejected(field, "this model's tokenizer cannot follow grammars")
            self._tokenizer = from_tokenizer(self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        return self._tokenizer


def _source(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.source))
    schema = ANY_OBJECT if grammar.kind == "json_object" else grammar.source
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
