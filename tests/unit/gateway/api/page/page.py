"""Parses the parameter tables of docs/reference/api.md.

A section begins with ``## POST /v1/…``. A table whose first column is "parameter" has the status of each parameter; one
whose first column is "inside" has the status of nested fields and values:

    | parameter | | |                         | inside | supported | ignored | refused | |
    | `n`, `seed` | supported | … |            | `tools[].type` | `function` | | `custom` | … |
"""

import re
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[5] / "docs" / "reference" / "api.md"
SUPPORTED: Final = "supported"
IGNORED: Final = "ignored"
REFUSED: Final = "refused"
ANYWHERE: Final = "*"  # the path of a field that is the same everywhere
OTHERS: Final = "*"  # the name of all values without their own row
_NAME: Final = re.compile(r"`([^`]+)`")
_ROUTE: Final = re.compile(r"`((?:GET|POST|DELETE) /\S*)`")

Section = dict[tuple[str, str], str]  # status by (path, name); path: "" for a parameter


def routes() -> set[str]:
    """Return all routes on the page."""
    return set(_ROUTE.findall(PAGE.read_text()))


def sections() -> dict[str, Section]:
    """Return the sections by the first route of their headings."""
    found: dict[str, Section] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        route = _ROUTE.search(heading)
        if route is not None:
            found[route[1]] = _section(text)
    return found


def _section(text: str) -> Section:
    section: Section = {}
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif columns[0] == "parameter":
            _add(section, {("", name): cells[1] for name in _NAME.findall(cells[0])})
        elif columns[0] == "inside":
            for status, names in zip(columns[1:4], cells[1:4], strict=True):
                rows = {(where, name): status for where in _NAME.findall(cells[0]) for name in _NAME.findall(names)}
                _add(section, rows)
    return section


def _add(section: Section, rows: Section) -> None:
    twice = rows.keys() & section.keys()
    assert not twice, f"docs/reference/api.md tells twice of {twice}"
    assert set(rows.values()) <= {SUPPORTED, IGNORED, REFUSED}, rows
    section |= rows


def status_of(section: Section, where: str, name: str) -> str | None:
    """Return the status from its row, or from the row of all others; None: no row."""
    rows = ((where, name), (ANYWHERE, name), (where, OTHERS))
    return next((section[row] for row in rows if row in section), None)
