"""All error codes with status, type, retry, cause and advice; and the page of them, GET /docs/errors."""

from collections.abc import Iterator
from functools import cache
from html import escape
from http import HTTPStatus
from itertools import starmap
from typing import Final, NamedTuple

from gateway.api.errors import HttpForm, forms_of_code
from gateway.error_codes import GROUPS, About

_STYLE: Final = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "code{font-family:ui-monospace,monospace}h3{margin:1.5rem 0 .25rem}h3 a{color:inherit;text-decoration:none}"
    "p{margin:.25rem 0}:target{outline:2px solid;outline-offset:.5rem}"
)
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Spillway error codes</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<h1>Error codes</h1>
<p>Every error body links to its code here (<code>error.doc_url</code>).
The message of an error says what happened to that one request.</p>
{groups}
</body>
</html>
"""


class Entry(NamedTuple):
    """An error code."""

    code: str
    about: About
    forms: list[HttpForm]  # empty: no response has this code

    @property
    def facts(self) -> str:
        """Status, types and retry, as one line of Markdown."""
        if not self.forms:
            return "Not sent as a response."
        statuses = dict.fromkeys(f"{form.status} {HTTPStatus(form.status).phrase}" for form in self.forms)
        types = dict.fromkeys(f"`{form.type}`" for form in self.forms)
        retries = dict.fromkeys(map(_retry, self.forms))
        return f"HTTP {' or '.join(statuses)} · type {', '.join(types)} · retry: {' or '.join(retries)}"


def entries() -> dict[str, list[Entry]]:
    """Return all codes, by the title of their group."""
    return {group.title: list(starmap(_entry, group.codes.items())) for group in GROUPS}


def _entry(code: str, about: About) -> Entry:
    return Entry(code, about, forms_of_code(code))


def _retry(form: HttpForm) -> str:
    if form.should_retry is None:
        return "as the client decides"
    if not form.should_retry:
        return "no"
    return "yes" if form.retry_after_s is None else "yes, after `Retry-After`"


@cache
def error_page() -> str:
    return _PAGE.format(style=_STYLE, groups="\n".join(_group_lines()))


def _group_lines() -> Iterator[str]:
    for title, several in entries().items():
        yield f"<h2>{escape(title)}</h2>"
        for entry in several:
            code = escape(entry.code)
            yield f'<h3 id="{code}"><a href="#{code}"><code>{code}</code></a></h3>'
            yield f"<p>{_inline(entry.facts)}</p>"
            yield f"<p><strong>Cause.</strong> {_inline(entry.about.cause)}</p>"
            yield f"<p><strong>What to do.</strong> {_inline(entry.about.advice)}</p>"


def _inline(text: str) -> str:
    """Return Markdown of one line as HTML; its only markup is code in backticks."""
    pieces = enumerate(escape(text, quote=False).split("`"))
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in pieces)
