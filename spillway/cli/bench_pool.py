"""``spillway bench pool``: the speed of a pool's engine, and recommended limits."""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pool_worker.settings import ConnectionSettings, EngineSettings
from protocol.distribution import install_command
from spillway.bench.limits import Memory, recommend
from spillway.bench.measure import WARM_UP_TOKENS, BenchError, Load, Row, Skipped
from spillway.bench.report import as_json
from spillway.cli.bench import MAX_ROUNDS, check_outputs, key_and_value, numbers, report, run_loads
from spillway.cli.context import ConfigOption, err, fail, resolve_config
from spillway.config import Config
from spillway.pool_section import PoolSettings

# The modules that run an engine are imported on use, as in bench.py.

MAX_SECONDS: Final = 86_400.0
TOKENS_OF_A_PRICE: Final = 1_000_000


def pool(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A pool of the configuration.")],
    config: ConfigOption = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Prompt lengths in tokens. Use lengths that are typical of your clients.")
    ] = "128,1024",
    batch: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,2,4,8,16,32,64",
    new_tokens: Annotated[str, typer.Option(help="Tokens generated for each request.")] = "64",
    rounds: Annotated[int, typer.Option(min=1, max=MAX_ROUNDS, help="Runs of each load.")] = 2,
    seconds: Annotated[
        float, typer.Option(min=1, max=MAX_SECONDS, help="Time limit for all loads, after the engine is ready.")
    ] = 300,
    max_tpot_ms: Annotated[float, typer.Option(min=0.001, help="Maximum TPOT that the recommended limits allow.")] = 50,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set any key of the pool's engine, such as url=http://10.0.0.7:8000. Repeatable.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before paying for a hosted API's tokens.")] = False,
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all results as JSON. - prints them instead of the table."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a chart: a .png or .svg file. Needs the extra `bench`.")
    ] = None,
) -> None:
    """Measure a pool's engine and recommend limits for its configuration.

    Works with every kind of engine: Spillway's own, a server at a URL, a server
    that the pool starts (`exec`), and a hosted API. This process calls the
    engine as a worker does, without a gateway or a queue. Stop the pool's
    workers first, or the measurement includes their load.

    Each combination of lengths and batch is one load of BATCH concurrent
    requests with greedy sampling. End tokens are ignored if the engine supports
    that. `spillway bench engine --help` explains the columns. Loads that do not
    fit the engine, or that exceed --seconds, are skipped. Ctrl-C prints the
    results so far.

    The last lines are for the configuration:

    max_sequences   the most concurrent requests whose TPOT p99 is at most
                    --max-tpot-ms at every measured length, and no more than
                    increase throughput: further requests wait in the queue,
                    where another pool can take them
    max_kv_tokens   the size of the engine's KV memory, if it reports it
                    (vLLM, SGLang, TGI)

    Example calls:

    spillway bench pool runpod
    spillway bench pool runpod --prompt-tokens 256,4096 --max-tpot-ms 30
    spillway bench pool laptop --batch 1,2,4 --seconds 60 --json laptop.json
    """
    loads = [
        Load(prompt, size, new)
        for new in numbers(new_tokens, "--new-tokens")
        for size in sorted(numbers(batch, "--batch"))  # so that each length has its smallest batches if time runs out
        for prompt in numbers(prompt_tokens, "--prompt-tokens")
    ]
    check_outputs(json_path, picture)
    section = _section(name, resolve_config(config, None))
    overrides = dict(key_and_value(text) for text in set_ or ())
    if overrides:
        section = resolve_config(config, None, {"pools": {name: {"engine": overrides}}}).pools[name]
    if section.is_hosted and not yes:
        _ask_before_paying(name, section, loads, rounds)
    outcomes: list[Row | Skipped] = []
    code, result, lines = _measure(name, section, loads, rounds, seconds, max_tpot_ms, outcomes)
    report(result, outcomes, json_path, picture, lines)
    if code:
        raise typer.Exit(code)


def _section(name: str, config: Config) -> PoolSettings:
    if name not in config.pools:
        raise fail(f"pools.{name}: no such pool; defined pools: {', '.join(config.pools) or 'none'}")
    return config.pools[name]


def _ask_before_paying(name: str, section: PoolSettings, loads: list[Load], rounds: int) -> None:
    shortest = min(load.prompt_tokens for load in loads)
    warm_up = [Load(shortest, size, WARM_UP_TOKENS) for size in {load.batch for load in loads}]
    asked = [*loads * rounds, *warm_up]
    prompt = sum(load.batch * load.prompt_tokens for load in asked)
    new = sum(load.batch * load.new_tokens for load in asked)
    price = section.prices.get(section.models[0])
    usd = 0.0 if price is None else (prompt * price.prompt + new * price.completion) / TOKENS_OF_A_PRICE
    cost = f", about {usd:,.2f} USD" if usd else ""
    err.print(f"pools.{name} is a hosted API. You pay for {prompt:,} prompt tokens and {new:,} new tokens{cost}.")
    typer.confirm("Continue?", abort=True, err=True)


def _measure(
    name: str,
    section: PoolSettings,
    loads: list[Load],
    rounds: int,
    seconds: float,
    max_tpot_ms: float,
    outcomes: list[Row | Skipped],
) -> tuple[int, dict[str, Any], list[str]]:
    """Return the exit code, the result as JSON values, and the lines to paste."""
    from spillway.bench.pool import PoolTarget

    settings = _without_own_limits(section.engine, max(load.batch for load in loads))
    with contextlib.ExitStack() as stack:
        try:
            with err.status(f"waiting for the engine of pools.{name} ({settings.kind})"):
                target = stack.enter_context(PoolTarget(name, section.models[0], settings, seconds))
        except BenchError as error:
            raise fail(f"pools.{name}: {error}") from error
        except ModuleNotFoundError as error:
            raise fail(f"pools.{name}: its engine needs {error.name}. Run: {install_command('worker')}") from error
        code = run_loads(target, loads, rounds, outcomes)
        memory = Memory(
            target.capacity.server_max_kv_tokens,
            is_configurable="max_kv_tokens" in type(settings).model_fields,
            applies=not target.is_an_api,
        )
        environment = target.environment()
    rows = [outcome for outcome in outcomes if isinstance(outcome, Row)]
    found = recommend(rows, max_tpot_ms, pool=name, memory=memory)
    result = as_json("pool", environment, rounds, outcomes) | {"recommended": found.as_json()}
    return code, result, found.as_lines() if rows else []


def _without_own_limits(settings: EngineSettings, batch: int) -> EngineSettings:
    """Raise a server's limit to the largest batch, so that the measurement is not capped by it."""
    if isinstance(settings, ConnectionSettings):
        return settings.model_copy(update={"max_sequences": batch})
    return settings
