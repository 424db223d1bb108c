"""The playing engine: what a prompt's play says next, in the dialect of the model's chat template.

A play is a JSON file that the prompt names, ``[[play=/path/of/it.json]]``: a list of turns. The turn that is played is
the one after as many tool results as the conversation has since then; without tools it is the last.

    {"think": "…", "say": "…", "calls": [["name", {arguments}], …], "expect": "…"}
    {"choices": [{"think": …}, …]}      for each choice its own

``expect`` is a text that the last tool result must hold: otherwise the answer says that it does not. A prompt without a
play is answered by ``NO_PLAY``. Plays are ASCII, so that each token is text.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer

from engine.errors import RequestRejected
from engine.pooling.pooling_types import PoolingRequest
from engine.types import GenerationRequest
from pool_worker.engines.scripted import ScriptedEngine
from pool_worker.engines.scripted_words import Script
from pool_worker.settings import ScriptedEngineSettings
from protocol.generation import Grammar
from protocol.job import ModelCard, pack_token_ids
from tests.tool_templates import THINKING_STYLE

NO_PLAY: Final = "Hello from Spillway."
_PLAY: Final = re.compile(r"\[\[play=([^\]]+)\]\]")
_RESULT: Final = "<tool_response>\n"
_RESULT_END: Final = "\n</tool_response>"
_TOOLS: Final = "<tools>\n"
_OPEN_REASONING: Final = "<think>\n"

_SOURCES: Final[dict[str, Callable[[str], str]]] = {  # in llguidance's form, by the kind of grammar
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
    "json_schema": LLMatcher.grammar_from_json_schema,
    "json_object": lambda _: LLMatcher.grammar_from_json_schema('{"type": "object"}'),
}

Turn = dict[str, Any]


def answer_to(prompt: str, choice: int = 0) -> str:
    """Return the whole answer to a rendered prompt."""
    reasons = prompt.endswith(_OPEN_REASONING)
    plays = list(_PLAY.finditer(prompt))
    if not plays:
        return _written({"say": NO_PLAY}, reasons=reasons)
    turns: list[Turn] = json.loads(Path(plays[-1][1]).read_text())
    results = [part.partition(_RESULT_END)[0] for part in prompt[plays[-1].end() :].split(_RESULT)[1:]]
    turn = turns[min(len(results), len(turns) - 1)] if _TOOLS in prompt else turns[-1]
    if results and turn.get("expect", "") not in results[-1]:
        turn = {"say": f"Expected {turn['expect']!a}, not {results[-1]!a}"}
    return _written(turn["choices"][choice] if "choices" in turn else turn, reasons=reasons)


def _written(turn: Turn, *, reasons: bool) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in turn.get("calls", ())
    ]
    said = "\n".join([*([turn["say"]] if "say" in turn else []), *calls])
    return f"{turn.get('think', 'Let me see.')}\n</think>\n\n{said}" if reasons else said


class PlayedScript(Script):
    """The tokens of plays instead of made-up words."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.tokenizer)
        self.text_of = {id_: self.tokenizer.decode([id_]) for id_ in range(self.vocabulary_size)}
        self._answers: dict[int, list[int]] = {}  # by seed

    def answer_seed(self, prompt_ids: Sequence[int], choice: int) -> int:
        """Return what stands for the answer, which is known from here on."""
        text = answer_to(self.tokenizer.decode(list(prompt_ids), skip_special_tokens=False), choice)
        assert text.isascii(), text
        digest = hashlib.blake2b(pack_token_ids(prompt_ids), digest_size=8, person=b"%d" % choice).digest()
        seed = int.from_bytes(digest, "little")
        self._answers[seed] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return seed

    def answer_tokens(self, seed: int) -> int:
        """Return how long the whole answer is."""
        return len(self._answers[seed])

    def token_at(self, seed: int, place: int) -> int:
        """Return the token at one place of an answer, counted from 0."""
        return self._answers[seed][place]

    def ids(self, prompt_ids: Sequence[int], choice: int) -> list[int]:
        """Return all tokens of a choice."""
        return self._answers[self.answer_seed(prompt_ids, choice)]


class PlayingEngine(ScriptedEngine):
    """A scripted engine whose answers are plays, and obey grammars: one that does not is refused."""

    def __init__(self, settings: ScriptedEngineSettings, template: str = THINKING_STYLE) -> None:
        super().__init__(settings)
        self._template = template
        self._script: PlayedScript = PlayedScript(self._script)
        self._vocabulary: LLTokenizer | None = None

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """Return a card whose template knows tools and reasoning."""
        card, tokenizer_json = super().model_card(model)
        return msgspec.structs.replace(card, chat_template=self._template), tokenizer_json

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """Accept a request without blocking."""
        if isinstance(request, GenerationRequest) and request.sampling.grammar is not None and not self._fault(request):
            request = replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=None))
        super().submit(request)

    def _check(self, request: GenerationRequest | PoolingRequest) -> None:
        if isinstance(request, GenerationRequest) and (grammar := request.sampling.grammar) is not None:
            raise RequestRejected(grammar.field, self._fault(request))
        super()._check(request)

    def _fault(self, request: GenerationRequest) -> str:
        """Return what an answer has against the request's grammar; empty if all choices obey."""
        grammar = request.sampling.grammar
        assert grammar is not None
        if self._vocabulary is None:
            self._vocabulary = LLTokenizer(self._script.tokenizer.to_str(), eos_token=self._script.end_of_text_id)
        faults = [self._fault_of(self._script.ids(request.prompt_ids, n), grammar) for n in range(request.sampling.n)]
        return next(filter(None, faults), "")

    def _fault_of(self, ids: list[int], grammar: Grammar) -> str:
        assert self._vocabulary is not None
        matcher = LLMatcher(self._vocabulary, _SOURCES[grammar.kind](grammar.source))
        if matcher.is_error():
            return str(matcher.get_error())
        allowed = matcher.try_consume_tokens(ids)
        if allowed == len(ids) and matcher.is_accepting():
            return ""
        text = self._script.tokenizer.decode(ids)
        return f"the play breaks the grammar after {allowed} tokens: {text!a}\n{grammar.source}"
