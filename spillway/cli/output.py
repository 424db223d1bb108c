"""Output of commands: tables, objects, secrets and times."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from db.money import nano_usd, usd_text
from spillway.cli.context import err, out

TABLE_WIDTH_CHARS: Final = 140

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in the format of the admin API.")]
View = dict[str, Any]  # an object, as the admin API shows it

_Object = TypeVar("_Object")


def print_objects(
    found: Sequence[_Object],
    view: Callable[[_Object], View],
    columns: Mapping[str, Callable[[_Object], object]],
    *,
    as_json: bool,
) -> None:
    """Print objects as JSON, or as a table with these columns."""
    if as_json:
        out.print_json(data=[view(one) for one in found])
    else:
        print_table(columns, ([str(cell(one)) for cell in columns.values()] for one in found))


def print_object(view: View, *, as_json: bool) -> None:
    """Print an object as JSON, or its non-empty fields one per line."""
    if as_json:
        out.print_json(data=view)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for field, value in view.items():
        if value is not None and field != "object":
            table.add_row(field.removesuffix("_unix_ms"), escape(_fact(field, value)))
    out.print(table)


def print_changed(before: View, after: View, *, as_json: bool) -> None:
    """Print an object after a change, and a note if it is unchanged."""
    print_object(after, as_json=as_json)
    if before == after:
        err.print("note: nothing changed", style="yellow")


def print_secret(view: View, secret: str, *, as_json: bool) -> None:
    """Print the secret of a new or rotated object: only the secret on stdout, or the whole object as JSON."""
    if as_json:
        out.print_json(data=view)
        return
    out.print(secret, markup=False, soft_wrap=True)
    err.print(f"[dim]{view['id']}: save the secret now; it cannot be shown again[/dim]")


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*map(escape, row))
    # A pipe has no width, and a line that the terminal wraps is better than one that rich truncates.
    Console(width=max(out.width, TABLE_WIDTH_CHARS), highlight=False).print(table)


def local_time(unix_ms: int | None) -> str:
    """Format a time in this machine's time zone; empty for None."""
    return "" if unix_ms is None else f"{datetime.fromtimestamp(unix_ms / 1000).astimezone():%Y-%m-%d %H:%M}"


def zoned_time(unix_ms: int | None) -> str:
    """Format a time with the name of this machine's time zone; empty for None."""
    return "" if unix_ms is None else f"{local_time(unix_ms)} {datetime.fromtimestamp(unix_ms / 1000).astimezone():%Z}"


def _fact(field: str, value: object) -> str:
    if field.endswith("_unix_ms") and isinstance(value, int):
        return zoned_time(value)
    if field.endswith("_usd") and isinstance(value, float):
        return usd_text(nano_usd(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
