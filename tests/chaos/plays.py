"""The questions of the ``surfaces`` scenario: the model plays answers with reasoning, tool calls and JSON.

A play is a file that the prompt names (``tests/player``). Every kind of question is asked streamed and whole.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pool_worker.engines.scripted_words import WORDS
from tests.chaos.mix import CHAT, MESSAGES, RESPONSES, Question

STREAMED_OF = 6  # of so many questions of a kind all but one are streamed
CUT_SHARE = 0.15  # of the answers, which end by ``max_tokens`` in the middle of something
CUT_TOKENS = (80, 160)
HARD_TO_CARRY = ('"quoted"', "a\nline", "C:\\path", "<tag>", "{brace}", "\t")  # in JSON, or in a tool call
ENOUGH_TOKENS = 4096

_ARGUMENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "note": {"type": "string"},
        "marks_cm": {"type": "array", "items": {"type": "integer"}},
        "urgent": {"type": "boolean"},
    },
    "required": ["place", "note", "marks_cm", "urgent"],
    "additionalProperties": False,
}
_FORM: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "enum": ["Elbe", "Rhine"]},
        "levels": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"cm": {"type": "integer"}, "remark": {"type": "string"}},
                "required": ["cm", "remark"],
                "additionalProperties": False,
            },
        },
        "summary": {"type": "string"},
    },
    "required": ["river", "levels", "summary"],
    "additionalProperties": False,
}
_TOOLS: Final = {"read_gauge": "The height of a river's water.", "open_gate": "Let water through."}


@dataclass(frozen=True, slots=True)
class _Kind:
    path: str
    has_tools: bool  # or else a JSON schema
    choices: int = 1

    def body(self, rng: random.Random) -> dict[str, Any]:
        """Return the fields that are not the same for all."""
        fields = _FIELDS[self.path, self.has_tools](rng)
        if rng.random() < CUT_SHARE:
            fields[_LIMITS[self.path]] = rng.randint(*CUT_TOKENS)
        return fields | ({"n": self.choices} if self.choices > 1 else {})


KINDS: Final = {
    "chat_tools": _Kind(CHAT, has_tools=True),
    "chat_tools_n2": _Kind(CHAT, has_tools=True, choices=2),
    "chat_json": _Kind(CHAT, has_tools=False),
    "chat_json_n3": _Kind(CHAT, has_tools=False, choices=3),
    "responses_tools": _Kind(RESPONSES, has_tools=True),
    "responses_json": _Kind(RESPONSES, has_tools=False),
    "messages_tools": _Kind(MESSAGES, has_tools=True),
}
_LIMITS: Final = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


def played_questions(seed: int, count: int, model: str, folder: Path, streamed_of: int = STREAMED_OF) -> list[Question]:
    """Make so many questions, of each kind in turn, and write their plays into a new folder below ``folder``."""
    rng = random.Random(f"plays {seed}")
    plays = folder / "plays"
    plays.mkdir(parents=True)
    made = [_question(rng, number, model, plays / f"{number}.json") for number in range(count)]
    whole = [number // len(KINDS) % streamed_of == streamed_of - 1 for number in range(count)]
    return [one if is_whole else _streamed(rng, one) for one, is_whole in zip(made, whole, strict=True)]


def _question(rng: random.Random, number: int, model: str, play: Path) -> Question:
    name, kind = list(KINDS.items())[number % len(KINDS)]
    turn = {"choices": [_turn(rng, has_tools=kind.has_tools) for _ in range(kind.choices)]}
    play.write_text(json.dumps([turn]))
    said = [{"role": "user", "content": f"Question {number} [[play={play}]]"}]
    body = {"model": model, "input" if kind.path == RESPONSES else "messages": said, **kind.body(rng)}
    return Question(number, kind.path, body, name)


def _streamed(rng: random.Random, asked: Question) -> Question:
    counted = asked.path == CHAT and rng.random() < 0.7
    options = {"stream_options": {"include_usage": True}} if counted else {}
    return replace(asked, body={**asked.body, "stream": True, **options})


# --- answers ----------------------------------------------------------------------------------------------------------


def _turn(rng: random.Random, *, has_tools: bool) -> dict[str, Any]:
    think = _text(rng, 5, 15)
    if not has_tools:
        levels = [{"cm": rng.randint(0, 999), "remark": _hard_text(rng, 6, 12)} for _ in range(rng.randint(2, 4))]
        answer = {"river": rng.choice(("Elbe", "Rhine")), "levels": levels, "summary": _hard_text(rng, 6, 12)}
        return {"think": think, "say": json.dumps(answer, separators=(",", ":"))}
    calls = [[rng.choice(list(_TOOLS)), _arguments(rng)] for _ in range(rng.randint(1, 2))]
    return {"think": think, "say": _text(rng, 5, 15), "calls": calls}


def _arguments(rng: random.Random) -> dict[str, Any]:
    marks_cm = [rng.randint(0, 999) for _ in range(rng.randint(0, 4))]
    return {
        "place": _text(rng, 1, 3),
        "note": _hard_text(rng, 8, 20),
        "marks_cm": marks_cm,
        "urgent": rng.random() < 0.5,
    }


def _text(rng: random.Random, fewest: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))


def _hard_text(rng: random.Random, fewest: int, most: int) -> str:
    """Return words, one of which is hard to carry."""
    words = rng.choices(WORDS, k=rng.randint(fewest, most))
    words[rng.randrange(len(words))] = rng.choice(HARD_TO_CARRY)
    return " ".join(words)


# --- what asks for them -----------------------------------------------------------------------------------------------


def _chat_tools(rng: random.Random) -> dict[str, Any]:
    strict = {"strict": True} if rng.random() < 0.5 else {}
    functions = [
        {"name": name, "description": told, "parameters": _ARGUMENTS, **strict} for name, told in _TOOLS.items()
    ]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def _chat_json(_: random.Random) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": _FORM, "strict": True}}}


def _responses_tools(rng: random.Random) -> dict[str, Any]:
    tools = [tool["function"] for tool in _chat_tools(rng)["tools"]]
    return {"tools": [{"type": "function", **tool} for tool in tools]}


def _responses_json(_: random.Random) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "f", "schema": _FORM, "strict": True}}}


def _messages_tools(_: random.Random) -> dict[str, Any]:
    tools = [{"name": name, "description": told, "input_schema": _ARGUMENTS} for name, told in _TOOLS.items()]
    return {"tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": ENOUGH_TOKENS}


_FIELDS: Final[dict[tuple[str, bool], Callable[[random.Random], dict[str, Any]]]] = {
    (CHAT, True): _chat_tools,
    (CHAT, False): _chat_json,
    (RESPONSES, True): _responses_tools,
    (RESPONSES, False): _responses_json,
    (MESSAGES, True): _messages_tools,
}
