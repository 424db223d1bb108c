"""docs/reference/log-messages.md: every log message at warning or above, and every error of a command."""

import ast
from collections.abc import Iterator
from typing import Final

from tests.reference.source_texts import ROOT, Site, argument, distinct, is_open, modules, sites, texts

DOCUMENT: Final = ROOT / "docs" / "reference" / "log-messages.md"
LEVELS: Final = {"critical": "critical", "exception": "error, with a traceback", "error": "error", "warning": "warning"}
_HEAD: Final = """\
# Log messages and errors of commands

<!-- Written by `python -m tests.reference` from the source. Do not edit. -->

All messages at the levels warning, error and critical, by process, and all errors that commands print. `%s` and `{…}`
stand for values. The logger is the name of the module, as in the log's `logger` field.

A message says what happened and what it concerns. Most warnings report something that Spillway retries: no action is
needed while the message does not repeat. A critical message ends the process; its supervisor must start it again.
"""
_PROCESSES: Final = {
    "Gateway": ("gateway", "console"),
    "Worker": ("pool_worker", "engine"),
    "Ledger": ("ledger",),
    "Fleet controller": ("fleet",),
    "Every process": ("protocol", "db"),
    "`spillway up` and other commands": ("spillway", "migrations", "models"),
}
# Errors that a command prints as one line (protocol.errors.ExpectedError), by the functions and classes that make them.
_COMMANDS: Final = ("fail", "BadParameter")


def document() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_log_lines(), *_command_lines()])


def _log_lines() -> Iterator[str]:
    for process, roots in _PROCESSES.items():
        rows = sorted({row for module in modules() if module.root in roots for row in _rows(module.path)})
        yield f"## {process}\n"
        yield _table(("Level", "Message", "Logger"), rows)


def _rows(path: str) -> Iterator[tuple[str, ...]]:
    module = next(one for one in modules() if one.path == path)
    for name, level in LEVELS.items():
        for site in module.calls.get(name, ()):
            if ast.unparse(site.call.func) == f"log.{name}":
                for text in texts(site, site.call.args[0]):
                    yield level, _code(text), f"`{module.dotted}`"


def _command_lines() -> Iterator[str]:
    yield "## Errors of commands\n"
    yield "A command that fails prints one of these lines and exits with a status other than 0.\n"
    found = {(_code(text),) for site in _command_sites() for text in _command_texts(site) if not is_open(text)}
    yield _table(("Message",), sorted(found))


def _command_sites() -> Iterator[Site]:
    yield from (site for site in sites(*_COMMANDS) if site.module.root == "spillway")
    yield from sites(*_expected_errors())


def _command_texts(site: Site) -> list[str]:
    message = argument(site, 0, "message")
    if message is None:
        return []
    option = argument(site, None, "param_hint")
    start = "" if option is None else f"Invalid value for {texts(site, option)[0]}: "
    return distinct(start + text for text in texts(site, message))


def _expected_errors() -> list[str]:
    """Return the names of all classes derived from ExpectedError; those of accounts have their own shape."""
    bases = {one.name: {ast.unparse(base) for base in one.bases} for module in modules() for one in module.classes}
    found = {"ExpectedError"}
    while more := {name for name, several in bases.items() if several & found} - found:
        found |= more
    return sorted(found - {"ExpectedError"})


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
