"""``spillway batch``: submit and follow batches over the HTTP API of any gateway."""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from protocol.wire import UNDECODABLE
from spillway.cli.batch_client import LONG_RETRY_LIMIT_S, RETRY_LIMIT_S, BatchApiError, BatchClient
from spillway.cli.batch_views import OVER, SHOWN_ERRORS, counts_of, facts_of, summary_of, table_of
from spillway.cli.context import err, fail, out

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TABLE_WIDTH_CHARS: Final = 140
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
POLL_S: Final = 1.0
PROGRESS_PERIOD_S: Final = 30.0  # between two lines of progress without a terminal
INTERRUPTED: Final = 130

UrlOption = Annotated[
    str,
    typer.Option(
        "--base-url", envvar=["SPILLWAY_BASE_URL", "OPENAI_BASE_URL"], help="URL of the gateway, with or without /v1."
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar=["SPILLWAY_API_KEY", "OPENAI_API_KEY"], help="An API key of the gateway."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until the batch has ended. Exit code 1 unless all lines were answered.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the API's JSON.")]
BatchArgument = Annotated[str, typer.Argument(metavar="ID", help="The batch's id: batch_…")]


def submit(
    file: Annotated[
        Path, typer.Argument(help="A file in OpenAI's batch format: lines of {custom_id, method, url, body}.")
    ],
    endpoint: Annotated[
        str | None,
        typer.Option(help="Endpoint of the lines, such as /v1/chat/completions. Default: the first line's url."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model for all lines. Replaces the model in each line.")] = None,
    window: Annotated[str, typer.Option(help="Time limit for the whole batch: 90m, 24h, 7d.")] = "24h",
    wait: WaitOption = False,
    output: Annotated[
        Path | None,
        typer.Option(help="With --wait: write answers to this new file, and failed lines to NAME.errors.jsonl."),
    ] = None,
    as_json: JsonOption = False,
    base_url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Upload a file of requests, create a batch from it, and print the batch's id."""
    if output is not None and not wait:
        raise typer.BadParameter(
            "requires --wait. To download the answers later, use `spillway batch download`", param_hint="--output"
        )
    _check_targets(output)
    with _client(base_url, api_key) as client, _prepared(file, model) as (ready, first):
        endpoint = endpoint or _endpoint_of(first, file)
        file_id = _upload(client, ready, file.name)
        client.retry_limit_s = LONG_RETRY_LIMIT_S if wait else RETRY_LIMIT_S
        batch = client.create(file_id, endpoint, window)
        if as_json:
            out.print_json(json.dumps(batch))
        else:
            out.print(batch["id"], markup=False)
        if wait:
            _wait_to_the_end(client, batch, output)


def list_(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number, newest first.")] = 20,
    as_json: JsonOption = False,
    base_url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """List the batches of the key's team."""
    with _client(base_url, api_key) as client:
        found = list(client.batches(limit))
    if as_json:
        out.print_json(json.dumps(found))
    elif not found:
        out.print("no batches")
    else:
        # A pipe has no width, and a line that the terminal wraps is better than one that rich truncates.
        Console(width=max(out.width, TABLE_WIDTH_CHARS)).print(table_of(found))


def show(
    batch_id: BatchArgument,
    wait: WaitOption = False,
    output: Annotated[Path | None, typer.Option(help="As for `submit`.")] = None,
    as_json: JsonOption = False,
    base_url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Show a batch. With --wait: after it has ended."""
    _check_targets(output)
    with _client(base_url, api_key) as client:
        batch = client.retrieve(batch_id)
        if wait:
            _wait_to_the_end(client, batch, output)
        elif as_json:
            out.print_json(json.dumps(batch))
        else:
            for name, value in facts_of(batch):
                out.print(f"{name:<12} {value}", markup=False, soft_wrap=True)


def cancel(
    batch_id: BatchArgument,
    as_json: JsonOption = False,
    base_url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Cancel a batch. Its files keep the lines that are already done."""
    with _client(base_url, api_key) as client:
        batch = client.cancel(batch_id)
    if as_json:
        out.print_json(json.dumps(batch))
    else:
        out.print(f"{batch['id']} is {batch['status']}", markup=False)


def download(
    batch_id: BatchArgument,
    output: Annotated[Path, typer.Option(help="The file to write. An existing file is never overwritten.")],
    errors: Annotated[
        bool, typer.Option("--errors", help="Download the error file instead of the output file.")
    ] = False,
    base_url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
) -> None:
    """Download the output file of a batch, or its error file."""
    _check_new(output)
    with _client(base_url, api_key) as client:
        batch = client.retrieve(batch_id)
        kind = "error_file_id" if errors else "output_file_id"
        if batch.get(kind) is None:
            what = "has no error file" if errors else "has no output file"
            raise fail(f"{batch_id} {what}" + ("" if batch["status"] in OVER else f" yet: it is {batch['status']}"))
        _download(client, batch[kind], output)
    out.print(f"{output}", markup=False)


# --- before -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _client(base_url: str, api_key: str | None) -> Iterator[BatchClient]:
    """Open a client. Its errors end the command with a message."""
    if not api_key:
        raise fail("no API key: use --api-key, or set SPILLWAY_API_KEY or OPENAI_API_KEY")
    if not base_url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{base_url!r} must start with http:// or https://", param_hint="--base-url")
    try:
        with BatchClient(base_url, api_key) as client:
            yield client
    except BatchApiError as error:
        raise fail(str(error)) from error


def _errors_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def _check_targets(output: Path | None) -> None:
    if output is not None:
        _check_new(output)
        _check_new(_errors_path(output))


def _check_new(path: Path) -> None:
    if path.exists():
        raise typer.BadParameter(f"{path} already exists", param_hint="--output")
    if not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"{path.parent}: no such folder", param_hint="--output")


@contextlib.contextmanager
def _prepared(file: Path, model: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Return the file to upload, and its first line."""
    try:
        if model is None:
            first = next(_lines(file), None)
            if first is None:
                raise fail(f"{file} has no lines")
            yield file, first
            return
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as changed:
            first = None
            for line in _lines(file):
                first = first or line
                line["body"] = {**(line.get("body") or {}), "model": model}
                changed.write(msgspec.json.encode(line) + b"\n")
            changed.flush()
            if first is None:
                raise fail(f"{file} has no lines")
            yield Path(changed.name), first
    except OSError as error:
        raise fail(f"{error.filename or file}: {error.strerror}") from error


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as source:
        number = 0
        while text := source.readline(MAX_LINE_BYTES):
            number += 1
            if not text.strip():
                continue
            try:
                line = msgspec.json.decode(text, type=dict[str, Any])
            except UNDECODABLE as error:
                raise fail(f"{file}, line {number}: not a JSON object: {error}") from error
            if not isinstance(line.get("body", {}), dict):
                raise fail(f"{file}, line {number}: 'body' must be an object")
            yield line


def _endpoint_of(first: dict[str, Any], file: Path) -> str:
    url = first.get("url")
    if not isinstance(url, str):
        raise fail(f"{file}, first line: 'url' is missing: use --endpoint, such as /v1/chat/completions")
    return url


# --- transfers --------------------------------------------------------------------------------------------------------


def _upload(client: BatchClient, path: Path, name: str) -> str:
    with _transfer() as progress:
        bar = progress.add_task("uploading", total=path.stat().st_size)
        return client.upload(path, name, lambda sent: progress.update(bar, completed=sent))


def _download(client: BatchClient, file_id: str, path: Path) -> None:
    with _transfer() as progress:
        bar = progress.add_task("downloading", total=None)
        client.download(file_id, path, lambda size, whole: progress.update(bar, completed=size, total=whole))


def _transfer() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, disable=not err.is_terminal, transient=True)


# --- waiting ----------------------------------------------------------------------------------------------------------


class _Rate(ProgressColumn):
    """Lines a second."""

    def render(self, task: Task) -> Text:
        """Render the rate; empty until it is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f} lines/s", style="progress.data.speed")


def _wait_to_the_end(client: BatchClient, batch: dict[str, Any], output: Path | None) -> None:
    """Wait, download, and end the command with an error unless every line was answered."""
    try:
        over = _waited(client, batch)
    except (KeyboardInterrupt, BatchApiError) as error:
        if isinstance(error, BatchApiError):
            err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        again = f"spillway batch show {batch['id']} --wait" + ("" if output is None else f" --output {output}")
        err.print(f"{batch['id']} continues at {client.url}; to wait again: {again}", markup=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, BatchApiError) else INTERRUPTED) from error
    err.print(summary_of(over), markup=False, soft_wrap=True)
    if output is not None and over.get("output_file_id"):
        _download(client, over["output_file_id"], output)
        err.print(f"answers: {output}", markup=False, soft_wrap=True)
    _report_failures(client, over, output)


def _report_failures(client: BatchClient, over: dict[str, Any], output: Path | None) -> None:
    """Print the batch's errors. End the command with exit code 1 unless every line was answered."""
    for error in ((over.get("errors") or {}).get("data") or [])[:SHOWN_ERRORS]:
        where = f"line {error['line']}: " if error.get("line") else ""
        err.print(f"{where}{error.get('code')}: {error.get('message')}", style="red", markup=False, soft_wrap=True)
    counts = counts_of(over)
    if over["status"] == "completed" and not counts["failed"]:
        return
    message = f"{over['id']} is {over['status']}: {counts['failed']:,} of {counts['total']:,} lines failed"
    if over.get("error_file_id"):
        if output is None:
            message += f"; for the errors: spillway batch download {over['id']} --errors --output FILE"
        else:
            path = _errors_path(output)
            _download(client, over["error_file_id"], path)
            message += f"; errors: {path}"
    raise fail(message)


def _waited(client: BatchClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Wait until the batch has ended, showing its progress; return it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    client.retry_limit_s = LONG_RETRY_LIMIT_S
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        # Lines that are already done must not count for the displayed rate.
        done = counts_of(batch)["completed"] + counts_of(batch)["failed"]
        bar = progress.add_task(batch["status"], total=None, completed=done, note="")
        client.on_retry = lambda why: _show_retry(progress, bar, why)
        printed, printed_s = "", 0.0
        while True:
            counts = counts_of(batch)
            done = counts["completed"] + counts["failed"]
            note = f"[red]{counts['failed']:,} failed[/]" if counts["failed"] else ""
            progress.update(bar, description=batch["status"], completed=done, total=counts["total"] or None, note=note)
            is_due = batch["status"] != printed or time.monotonic() - printed_s > PROGRESS_PERIOD_S
            if is_due and not err.is_terminal:
                printed, printed_s = batch["status"], time.monotonic()
                err.print(summary_of(batch), markup=False, soft_wrap=True)
            if batch["status"] in OVER:
                break
            time.sleep(POLL_S)
            batch = client.retrieve(batch["id"])
    client.retry_limit_s = RETRY_LIMIT_S
    return batch


def _show_retry(progress: Progress, bar: Any, why: str) -> None:  # noqa: ANN401  # rich's TaskID
    progress.update(bar, note=f"[yellow]{escape(why)}; retrying[/]")
    if not err.is_terminal:
        err.print(f"{why}; retrying", markup=False, soft_wrap=True)
