"""The pages of docs/ that are generated in full, or between two marks."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

import typer

from console.admin.routes import add_admin_answers, admin_router
from console.admin.schema import ADMIN_BODIES
from console.usage import usage_routers
from gateway.app import Operations, build_app
from gateway.http.openapi import TAGS
from gateway.mount import Mounted
from scripts.reference.configuration import configuration_page
from spillway.cli import COMMANDS, Command, Group

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
BEGIN: Final = "<!-- generated: make reference -->\n"
COMMON: Final = frozenset({"--config", "--data", "--json"})  # explained once, before the commands
AS_IS: Final = re.compile(r"^spillway |^SPILLWAY_|\S {2,}\S", re.MULTILINE)
KINDS: Final = {"str": "text", "list[str]": "text", "int range": "number", "float range": "number", "int": "number"}
END: Final = "<!-- end of the generated part -->\n"


def generated() -> dict[str, str]:
    """Return the text of each generated page, by its path below docs/."""
    return {
        "reference/configuration.md": configuration_page(),
        "reference/http.md": _between_marks("reference/http.md", "".join(_operations())),
        "reference/cli.md": _between_marks("reference/cli.md", "".join(_commands(COMMANDS, ("spillway",)))),
        "adr/README.md": _between_marks("adr/README.md", "".join(_decisions())),
    }


def _between_marks(name: str, text: str) -> str:
    before, _, rest = (DOCS / name).read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{text.strip()}\n\n{END}{after}"


def cell(text: object) -> str:
    """Return a text as a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _operations() -> Iterator[str]:
    paths = _openapi()["paths"]
    for tag, about in TAGS.items():
        yield f"\n## {tag.capitalize()}\n\n{about}\n\n| operation | what it does |\n|---|---|\n"
        for path, methods in paths.items():
            for method, operation in methods.items():
                if tag in operation.get("tags", ()):
                    text = operation.get("description", operation.get("summary", "")).partition("\n\n")[0]
                    yield f"| `{method.upper()} {path}` | {cell(text)} |\n"


def _openapi() -> dict[str, Any]:
    """Return the document of ``/openapi.json``. Routes hold their services and use none of them until a request."""
    any_part = MagicMock()
    any_part.settings.cors_origins = ()
    operations = Operations(MagicMock(), {}, {})
    routers = (admin_router(any_part), *usage_routers(any_part, any_part, any_part))
    app = build_app(
        any_part,
        any_part,
        operations,
        keyed=any_part,
        runs=any_part,
        batches=any_part,
        mounted=Mounted(routers, ADMIN_BODIES, add_admin_answers),
    )
    document: dict[str, Any] = app._slow.openapi()  # type: ignore[attr-defined]  # noqa: SLF001  # GatewayApp's FastAPI
    return document


# --- the command line -------------------------------------------------------------------------------------------------


def _commands(table: Any, path: tuple[str, ...]) -> Iterator[str]:  # noqa: ANN401  # a mapping of commands and groups
    for name, entry in table.items():
        if isinstance(entry, Group):
            yield from _commands(entry.commands, (*path, name))
        elif isinstance(entry, Command):
            yield from _command(entry.load(name), (*path, name))


def _command(command: Any, path: tuple[str, ...]) -> Iterator[str]:  # noqa: ANN401  # Typer's types are private
    context = typer.Context(command, info_name=path[-1])
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join([*path, *(_argument(argument) for argument in arguments)])
    yield f"\n### {' '.join(path)}\n\n`{usage}`\n\n{_help(command.help or '')}\n"
    rows = [*_argument_rows(arguments), *_option_rows(options, context)]
    if rows:
        yield "\n| argument or option | default | meaning |\n|---|---|---|\n"
        yield from rows
    if common := [f"`{option.opts[0]}`" for option in options if _is_common(option)]:
        yield f"\nAlso {', '.join(common)}.\n"


def _is_common(option: Any) -> bool:  # noqa: ANN401
    return option.opts[0] in COMMON and (option.is_flag or option.opts[0] != "--json")


def _help(text: str) -> str:
    """Return a help text as Markdown: commands and aligned lines as they are, other paragraphs wrapped."""
    return "\n\n".join(
        f"```text\n{paragraph}\n```"
        if AS_IS.search(paragraph)
        else textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False)
        for paragraph in inspect.cleandoc(text).split("\n\n")
    )


def _argument(argument: Any) -> str:  # noqa: ANN401
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name.strip('[]')}]"


def _argument_rows(arguments: list[Any]) -> Iterator[str]:
    for argument in arguments:
        yield f"| `{_argument(argument)}` | | {cell(argument.help or '')} |\n"


def _option_rows(options: list[Any], context: typer.Context) -> Iterator[str]:
    for option in options:
        if not option.hidden and not _is_common(option):
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            kind = option.display_type(ctx=context).strip("<>")
            value = "" if option.is_flag else f" {option.metavar or KINDS.get(kind, kind)}"
            yield f"| {names}{value.replace('|', ' or ')} | {_default(option)} | {cell(option.help or '')} |\n"


def _default(option: Any) -> str:  # noqa: ANN401
    default = option.default
    if option.required:
        return "required"
    if default in {None, ""} or default is False or default == () or callable(default):
        return ""
    return "yes" if default is True else f"`{cell(default)}`"


# --- decisions --------------------------------------------------------------------------------------------------------


def _decisions() -> Iterator[str]:
    for path in sorted((DOCS / "adr").glob("[0-9]*.md")):
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        yield f"- {number}: [{title}]({path.name})\n"
