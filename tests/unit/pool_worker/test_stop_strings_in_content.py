"""Stop strings are searched in the content that the client sees, in every dialect, however the text is split."""

import random
from collections.abc import Iterable, Sequence

import pytest

from engine.text.detokenizer import TokenText
from engine.text.output_text import OutputText
from engine.text.stop_strings import ContentStopStrings
from pool_worker.generation import content_finder
from protocol.dialects.dialect import AnswerForm, Dialect
from protocol.generation import SamplingParams
from protocol.job import Markup
from tests.unit.engine.tiny_models import byte_level_tokenizer
from tests.unit.protocol.dialects.format_cases import CASES
from tests.unit.protocol.dialects.test_formats import TOOLS, Events, read_events

NAMES = tuple(tool.name for tool in TOOLS)
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "a\\nb. END"}}\n</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>One.\nEND<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "END"}<|call|>'
)
FINAL = "<|channel|>analysis<|message|>One.\nEND<|end|><|start|>assistant<|channel|>final<|message|>Two.\nEND three"


def form_of(markup: Markup) -> AnswerForm:
    dialect = Dialect.of("", {}, tool_parser=markup.tool_parser, reasoning_parser=markup.reasoning_parser)
    assert dialect is not None
    form = AnswerForm(dialect, TOOLS, begins_in_reasoning=markup.begins_in_reasoning)
    assert form.markup == markup
    return form


def markup_of(tool_parser: str, reasoning_parser: str = "none", *, begins_in_reasoning: bool = False) -> Markup:
    return Markup(tool_parser, reasoning_parser, NAMES, begins_in_reasoning)


def stopped(markup: Markup, stops: Sequence[str], parts: Iterable[str]) -> tuple[str, str | None]:
    """Return the text sent to the gateway, and the stop string found."""
    finder = content_finder(markup)
    assert finder is not None
    matcher, shown = ContentStopStrings(tuple(stops), finder()), ""
    for part in parts:
        released, stop = matcher.push(part)
        shown += released
        if stop is not None:
            return shown, stop
    released, stop = matcher.end()
    return shown + released, stop


def check_every_cut(markup: Markup, stops: Sequence[str], text: str, expected: Events, by: str | None) -> None:
    form, source = form_of(markup), random.Random(3)
    places = [sorted(source.sample(range(len(text) + 1), min(5, len(text)))) for _ in range(20)]
    for parts in (
        [text],
        list(text),
        *([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)] for at in places),
    ):
        shown, stop = stopped(markup, stops, parts)
        assert (read_events(form, [shown]), stop) == (expected, by), parts


@pytest.mark.parametrize(
    ("markup", "stops", "text", "expected", "by"),
    [
        # Invisible in reasoning, in markup, in arguments, and in the layout between sections.
        (
            markup_of("hermes", "think"),
            ["\n", "END", "<tool_call>", "</think>"],
            f"<think>\nSo.\nEND\n</think>\n\nI look.\n{CALL}",
            [("reasoning", "So.\nEND"), ("content", "I look."), ("call", "f"), ("arguments", '{"s": "a\\nb. END"}')],
            None,
        ),
        (
            markup_of("none", "think", begins_in_reasoning=True),
            ["\n"],
            "So.\nYes.\n</think>\n\nHi\nyou",
            [("reasoning", "So.\nYes."), ("content", "Hi")],
            "\n",
        ),
        # A match that spans reasoning and content does not count; nor does one that spans a call.
        (markup_of("none", "think"), ["AB"], "<think>A</think>B", [("reasoning", "A"), ("content", "B")], None),
        (
            markup_of("hermes"),
            ["AB"],
            f"A{CALL}B",
            [("content", "A"), ("call", "f"), ("arguments", '{"s": "a\\nb. END"}'), ("content", "B")],
            None,
        ),
        # White space at the end is content if no call follows.
        (markup_of("hermes"), ["\n"], "Hi\n", [("content", "Hi")], "\n"),
        (markup_of("hermes"), ["\n"], "Hi\nyou", [("content", "Hi")], "\n"),
        # Text that only looks like a call is content.
        (markup_of("hermes"), ["no"], "<tool_call>no</tool_call>", [("content", "<tool_call>")], "no"),
        # After a call.
        (
            markup_of("hermes"),
            ["END"],
            f"{CALL}\nso END it",
            [("call", "f"), ("arguments", '{"s": "a\\nb. END"}'), ("content", "so ")],
            "END",
        ),
        (
            markup_of("harmony", "harmony"),
            ["\n", "END", "<|end|>"],
            HARMONY,
            [("reasoning", "One.\nEND"), ("content", "I look."), ("call", "f"), ("arguments", '{"s": "END"}')],
            None,
        ),
        (
            markup_of("harmony", "harmony"),
            ["END"],
            FINAL,
            [("reasoning", "One.\nEND"), ("content", "Two.\n")],
            "END",
        ),
        # The first of several, over several pieces.
        (markup_of("hermes"), ["three", "o thr"], "One two three", [("content", "One tw")], "o thr"),
    ],
)
def test_stop_strings_apply_to_content_only(
    markup: Markup, stops: Sequence[str], text: str, expected: Events, by: str | None
) -> None:
    check_every_cut(markup, stops, text, expected, by)


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_every_dialect(parser: str, text: str, expected: Events) -> None:
    """A character of the content stops the answer, and any other character does not."""
    markup = markup_of(parser, "harmony" if parser == "harmony" else "none")
    stretches = [content for kind, content in expected if kind == "content"]
    unseen = sorted(char for char in set(text) if not any(char in content for content in stretches))
    check_every_cut(markup, unseen, text, expected, None)
    if stretches:
        char = stretches[0][-1]
        number = next(number for number, (kind, _) in enumerate(expected) if kind == "content")
        before = stretches[0].partition(char)[0]
        check_every_cut(markup, [char], text, [*expected[:number], *([("content", before)] if before else [])], char)


@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 5, 24])
def test_a_choice_of_tokens(min_tokens: int, keeps_stop: bool) -> None:
    tokenizer, text = byte_level_tokenizer(), "<think>a.\nb</think>\nc.\nd.\ne"
    params = SamplingParams(stop=("\n",), max_tokens=100, min_tokens=min_tokens, include_stop_str_in_output=keeps_stop)
    finder = content_finder(markup_of("none", "think"))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = TokenText(tokenizer).detokenizer([], skip_special_tokens=True)
    output, shown = OutputText(params, frozenset(), detokenizer, content_finder=finder), ""
    for token_id in token_ids:
        shown += output.read(token_id)
        if output.finish_reason is not None:
            break
    expected = "<think>a.\nb</think>\nc." if min_tokens < 24 else "<think>a.\nb</think>\nc.\nd."
    assert (shown, output.finish_reason, output.stop_reason) == (expected + "\n" * keeps_stop, "stop", "\n")
