"""CSV cells that spreadsheets do not run as formulas.

Keys, models and pools can have any name. See https://owasp.org/www-community/attacks/CSV_Injection
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

# At the start of a cell, or after what another program takes as the end of one. Includes full-width characters.
_FORMULA: Final = re.compile(r"(\A|[;\t\r\n])(?=\s{0,100}[=+\-@\t\r\n＝＋－＠])")  # noqa: RUF001


def guarded(row: Mapping[str, Any], columns: Sequence[str]) -> list[object]:
    """Return a row's cells in the order of ``columns``, with an apostrophe before each formula."""
    return [_FORMULA.sub(r"\1'", cell) if isinstance(cell := row[name], str) else cell for name in columns]
