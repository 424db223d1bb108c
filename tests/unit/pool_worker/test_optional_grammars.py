"""An optional grammar is dropped if the server cannot follow it."""

import pytest

from engine.types import GenerationRequest, ResumePoint
from pool_worker.engines.formats.base import without_optional_grammar
from protocol.generation import Grammar, SamplingParams

BEGUN = (ResumePoint(0, (1, 2), 5),)


@pytest.mark.parametrize(
    ("is_optional", "grammars", "resume", "is_kept"),
    [
        (True, {"lark"}, (), True),
        (True, {"json_schema"}, (), False),
        (True, {"lark"}, BEGUN, False),  # the server would restart it in the middle of the answer
        (True, {"lark"}, (ResumePoint(0, (), 0),), True),
        (False, {"json_schema"}, (), True),  # is refused by name
        (False, {"lark"}, BEGUN, True),
    ],
)
def test_an_optional_grammar_is_dropped(
    is_optional: bool, grammars: set[str], resume: tuple[ResumePoint, ...], is_kept: bool
) -> None:
    sampling = SamplingParams(grammar=Grammar("lark", "start: /a/", "tools", is_optional=is_optional))
    request = GenerationRequest("r", [1], sampling, resume)
    assert (without_optional_grammar(request, grammars).sampling.grammar is not None) == is_kept


def test_a_request_without_a_grammar_is_unchanged() -> None:
    request = GenerationRequest("r", [1], SamplingParams())
    assert without_optional_grammar(request, set()) is request
