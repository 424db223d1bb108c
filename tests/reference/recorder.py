"""Watches the errors that tests provoke: each must be in docs/reference/errors.md."""

import re
import sys
from functools import cache
from typing import Any, Final

from gateway.error_codes import MALFORMED_JSON
from gateway.errors import Refused, RequestFailed
from tests.reference.source_texts import ROOT, pattern_of

DOCUMENT: Final = ROOT / "docs" / "reference" / "errors.md"
FENCE: Final = "```"
OTHER_TEXTS: Final = "Other texts come from a library, a model's server or another process."
_FOLDERS: Final = (str(ROOT / "gateway") + "/", str(ROOT / "console") + "/")


class UnknownErrors:
    """Errors made by the product that the page does not have."""

    def __init__(self) -> None:
        self._found: set[str] = set()

    def watch(self) -> None:
        """See every error as it is made, from now on."""
        make = Refused.__init__

        def watched(error: Refused, message: str | None = None, **rest: Any) -> None:
            make(error, message, **rest)
            if _is_made_by_product():
                is_passed_on = isinstance(error, RequestFailed)  # its text may be one of a test's own
                self.note(error.code or MALFORMED_JSON, None if is_passed_on else message)

        Refused.__init__ = watched  # type: ignore[method-assign,assignment]

    def take(self) -> list[str]:
        """Return what was found since the last call."""
        found = sorted(self._found)
        self._found.clear()
        return found

    def note(self, code: str, message: str | None) -> None:
        """Look at one error."""
        patterns = _patterns()
        if code not in patterns:
            self._found.add(code)
        elif message and (pattern := patterns[code]) is not None and not pattern.fullmatch(" ".join(message.split())):
            self._found.add(f"{code}: {message}")


@cache
def _patterns() -> dict[str, re.Pattern[str] | None]:
    """Return the messages by code, as the page has them; None: a code that has other texts, too."""
    found: dict[str, re.Pattern[str] | None] = {}
    for section in DOCUMENT.read_text().split("\n### ")[1:]:
        code, _, rest = section.partition("\n")
        _, _, block = rest.partition(f"\n{FENCE}text\n")
        templates = block.partition(f"\n{FENCE}\n")[0].splitlines()
        found[code] = None if OTHER_TEXTS in rest else pattern_of(templates)
    return found


def _is_made_by_product() -> bool:
    """Return whether the class is called there: tests make errors of their own."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in {"__init__", "watched"} and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_FOLDERS)
