"""``spillway bench``: tables, JSON and charts of the speed of an engine or an endpoint."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pool_worker.settings import LocalEngineSettings
from protocol.distribution import install_command
from spillway.bench.measure import BenchError, Load, Row, Skipped, Target, measure
from spillway.bench.report import as_json, as_table, headline
from spillway.cli.context import ConfigOption, err, fail, out, resolve_config
from spillway.config import DEMO_MODEL_PATH

TABLE_WIDTH_CHARS: Final = 140
INTERRUPTED: Final = 130  # exit code of a shell's command after Ctrl-C
MAX_ROUNDS: Final = 1000
PICTURE_SUFFIXES: Final = (".png", ".svg")

# torch, httpx and matplotlib are imported on use, so that other commands start quickly.


def engine(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder or Hugging Face name; with --url, a model name of the endpoint. "
            "Default: the demo model, or the endpoint's first model."
        ),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Measure with the engine settings of this pool of the configuration.")
    ] = None,
    config: ConfigOption = None,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "128,512,1024",
    batch: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,8,32",
    new_tokens: Annotated[str, typer.Option(help="Tokens generated for each request.")] = "64",
    rounds: Annotated[int, typer.Option(min=1, max=MAX_ROUNDS, help="Runs of each load.")] = 3,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the engine. Default: all cores but one.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set any engine key, such as max_batched_tokens=512. Repeatable.",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Measure this OpenAI-compatible endpoint instead, over HTTP.")] = None,
    key: Annotated[str | None, typer.Option(help="Its API key.")] = None,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all results as JSON. - prints them instead of the table."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a chart: a .png or .svg file. Needs the extra `bench`.")
    ] = None,
) -> None:
    """Measure TTFT, TPOT and throughput by prompt length, batch and new tokens.

    Each combination is one load: BATCH concurrent requests of PROMPT random
    tokens, each generating NEW tokens with greedy sampling and ignoring end
    tokens. No prompt is in a cache. Each load is one row of the table:

    prefill   from submission to the last request's first token
    decode    from there to the last token; tokens/s: generated in this time
    TTFT      time to first token of a request, including its wait
    TPOT      time per output token of a request, after the first
    total     from submission to the last token; tokens/s: prompt and new

    Times and rates are medians of the rounds. The engine runs in this process,
    without a gateway or a queue. With --url, an endpoint is measured as its
    clients see it. Loads that do not fit the model's context are skipped.
    Ctrl-C prints the results so far.

    Example calls:

    spillway bench engine --model Qwen/Qwen3-0.6B --batch 1,4
    spillway bench engine --config spillway.toml --pool cheap --picture cheap.png
    spillway bench engine --url http://127.0.0.1:8000 --key sk-sw-… --json a.json
    """
    loads = [
        Load(prompt, size, new)
        for new in numbers(new_tokens, "--new-tokens")
        for prompt in numbers(prompt_tokens, "--prompt-tokens")
        for size in numbers(batch, "--batch")
    ]
    check_outputs(json_path, picture)
    chosen = {"threads": threads, "dtype": dtype} | dict(key_and_value(text) for text in set_ or ())
    overrides = {name: value for name, value in chosen.items() if value is not None}
    try:
        if url is None:
            target = _engine(_settings(model, pool, config, overrides))
        else:
            _refuse_with_url({"--pool": pool, "--config": config, "--threads/--dtype/--set": overrides})
            target = _endpoint(url, key, model)
    except BenchError as error:
        raise fail(str(error)) from error
    outcomes: list[Row | Skipped] = []
    code = run_loads(target, loads, rounds, outcomes)
    report(as_json("engine", target.environment(), rounds, outcomes), outcomes, json_path, picture)
    if code:
        raise typer.Exit(code)


def numbers(text: str, option: str) -> list[int]:
    """Parse a list of numbers. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers above 0, such as 1,8,32", param_hint=option)
    return list(dict.fromkeys(int(part) for part in parts))


def key_and_value(text: str) -> tuple[str, str]:
    """Parse one key and value of an engine's settings. Raises BadParameter."""
    name, equals, value = text.partition("=")
    if not equals or name in {"kind", "path"}:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE, where KEY is a key of the engine", param_hint="--set")
    return name, value


def check_outputs(json_path: str | None, picture: Path | None) -> None:
    """Check before the measurement that its results can be written."""
    for option, path in (
        ("--json", None if json_path in {None, "-"} else Path(str(json_path))),
        ("--picture", picture),
    ):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"{path.parent}: no such folder", param_hint=option)
    if picture is not None:
        if picture.suffix.lower() not in PICTURE_SUFFIXES:
            raise typer.BadParameter(f"{picture} must end in {' or '.join(PICTURE_SUFFIXES)}", param_hint="--picture")
        if importlib.util.find_spec("matplotlib") is None:
            raise fail(f"--picture needs matplotlib. Run: {install_command('bench')}")


def _refuse_with_url(options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value:
            raise typer.BadParameter("cannot be combined with --url", param_hint=option)


def _settings(
    model: str | None, pool: str | None, config: Path | None, overrides: dict[str, Any]
) -> LocalEngineSettings:
    if pool is None:
        if config is not None:
            raise typer.BadParameter("requires --pool", param_hint="--config")
        base: dict[str, Any] = {"path": model or str(DEMO_MODEL_PATH)}
    else:
        base = _pool_settings(pool, config) | ({} if model is None else {"path": model})
    try:
        return LocalEngineSettings.model_validate(base | overrides)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise fail("engine settings: " + "; ".join(problems)) from error


def _pool_settings(name: str, config: Path | None) -> dict[str, Any]:
    pools = resolve_config(config, None).pools
    if name not in pools:
        raise fail(f"pools.{name}: no such pool; defined pools: {', '.join(pools) or 'none'}")
    settings = pools[name].engine
    if not isinstance(settings, LocalEngineSettings):
        raise fail(f"pools.{name}.engine.kind: a {settings.kind!r} engine does not run in this process; use --url")
    return settings.model_dump()


def _engine(settings: LocalEngineSettings) -> Target:
    try:
        from spillway.bench.in_process import EngineTarget
    except ModuleNotFoundError as error:
        raise fail(f"the engine needs {error.name}. Run: {install_command('worker')}") from error
    with err.status(f"loading {settings.path}"):
        return EngineTarget(settings)


def _endpoint(url: str, key: str | None, model: str | None) -> Target:
    from spillway.bench.endpoint import EndpointTarget

    return EndpointTarget(url, key, model)


def run_loads(target: Target, loads: Sequence[Load], rounds: int, outcomes: list[Row | Skipped]) -> int:
    """Measure all loads, appending to ``outcomes``; return the exit code."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("measuring", total=len(loads) * rounds)
        try:
            outcomes.extend(measure(target, loads, rounds, lambda: progress.advance(task)))
        except KeyboardInterrupt:
            err.print("interrupted; results so far:", style="yellow")
            return INTERRUPTED
        except BenchError as error:
            err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
            return 1
    return 0 if any(isinstance(outcome, Row) for outcome in outcomes) else 1


def report(
    result: dict[str, Any],
    outcomes: Sequence[Row | Skipped],
    json_path: str | None,
    picture: Path | None,
    more: Sequence[str] = (),
) -> None:
    """Print and write the results; ``result``: as JSON values, ``more``: lines below the table."""
    figures, title = json.dumps(result), headline(result["environment"])
    if json_path == "-":
        out.print_json(figures)
    else:
        # A pipe has no width, and a line that the terminal wraps is better than one that rich truncates.
        console = Console(width=max(out.width, TABLE_WIDTH_CHARS), highlight=False)
        console.print(title, markup=False)
        console.print(as_table(outcomes))
        for line in more:
            console.print(line, markup=False, soft_wrap=True)
    for outcome in outcomes:
        if isinstance(outcome, Skipped):
            size = f"{outcome.prompt_tokens} + {outcome.new_tokens} tokens, batch {outcome.batch}"
            err.print(f"skipped: {size}: {outcome.reason}", style="yellow", markup=False, soft_wrap=True)
    try:
        if json_path not in {None, "-"}:
            Path(str(json_path)).write_text(figures + "\n")
        rows = [outcome for outcome in outcomes if isinstance(outcome, Row)]
        if picture is not None and rows:
            from spillway.bench.picture import draw

            draw(rows, title, picture)
    except OSError as error:
        raise fail(str(error)) from error
