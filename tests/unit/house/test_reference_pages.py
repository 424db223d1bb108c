"""The generated pages of docs/reference are what the source says, and every error code is explained."""

from types import ModuleType

import pytest

from gateway.error_codes import ABOUT, MALFORMED_JSON
from gateway.errors import InvalidParameter
from protocol.errors import ErrorCode
from tests.reference import errors, log_messages
from tests.reference.error_messages import kinds, messages_by_code
from tests.reference.recorder import UnknownErrors
from tests.reference.source_texts import distinct, is_open, pattern_of, read_module, texts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", [errors, log_messages], ids=["errors", "log-messages"])
def test_the_page_is_up_to_date(page: ModuleType) -> None:
    assert page.DOCUMENT.read_text() == page.document(), "run: python -m tests.reference"


def test_every_code_is_explained_and_no_other() -> None:
    codes = {code for kind in kinds() for code in (kind.code or MALFORMED_JSON, *kind.other_codes)}
    assert codes | {code.value for code in ErrorCode} | messages_by_code().keys() == ABOUT.keys()
    for code, (cause, advice) in ABOUT.items():
        assert cause.endswith("."), code
        assert advice.endswith("."), code


SOURCE = """
MOST = 5
def refused(name):
    where = "the key"
    if name:
        why = f"may have {MOST} of '{name}'"
    else:
        why = "has " + reason()
    return Error(f"{where} {why}: {name.upper()}")
def reason() -> str:
    return "no name" if MOST else "none"
class Caller:
    def raised(self, code, text):
        raise Error(text % code if code else text)
    def called(self):
        self.raised(1, "one of two")
"""


def test_texts_are_followed_to_where_they_are_put_together() -> None:
    module = read_module("x.py", SOURCE)
    several = [texts(site, site.call.args[0]) for site in module.calls["Error"]]
    assert several == [
        [
            "the key may have 5 of '{name}': {…}",
            "the key has no name: {…}",
            "the key has none: {…}",
        ],
        ["{text}", "one of two"],
    ]


def test_templates_match_what_is_made_of_them() -> None:
    pattern = pattern_of(["at most {most}, not {…}.", "none"])
    assert pattern.fullmatch("at most 5, not (6).")
    assert not pattern.fullmatch("at most 5.")
    assert distinct(["no {team}", "no {key}", "a"]) == ["a", "no {key}"]
    assert [is_open(text) for text in ("{error}", "'{error}'.", "a {b}")] == [True, True, False]


def test_an_error_that_the_page_does_not_have_is_found() -> None:
    unknown = UnknownErrors()
    unknown.note("malformed_http", "This is not a valid HTTP/1.1 request.")
    unknown.note(InvalidParameter.code, "anything")  # some texts of this code are other people's
    assert unknown.take() == []
    unknown.note("head_too_large", "no such text")
    unknown.note("no_such_code", None)
    assert unknown.take() == ["head_too_large: no such text", "no_such_code"]
    assert unknown.take() == []
