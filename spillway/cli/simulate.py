"""``spillway fleet simulate`` and ``spillway plan``: what a fleet would have done, and what a month costs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fleet.plan import Offer, Phase, cost, gpus_of
from protocol.distribution import install_command
from spillway.cli.context import err, fail, out
from spillway.cli.output import JsonOption

if TYPE_CHECKING:
    from fleet.simulation.study import Equal

TABLE_WIDTH_CHARS: Final = 150
# The example of docs/explanation/fleet.md: ten requests a second in twelve busy hours, seven in the others, half a
# request a second and GPU; machines of eight GPUs at a managed endpoint and on demand, single GPUs on spot markets.
EXAMPLE_PHASES: Final = (Phase(12, 10, 20), Phase(12, 7, 15))
EXAMPLE_REQUESTS_PER_GPU_S: Final = 0.5
EXAMPLE_OFFERS: Final = (
    Offer("managed endpoint", 47.11, 8),
    Offer("on demand", 40.966, 8),
    Offer("spot, mixed", 2.5, 1),
)


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, help="Requests as Azure publishes them (CSV); default: a made-up, bursty load."),
    ] = None,
    spot: Annotated[
        Path | None,
        typer.Option(exists=True, help="Spot machines by zone (JSON of runs); default: always to be had."),
    ] = None,
    days: Annotated[int, typer.Option(min=2, max=28, help="Length, from a Monday on.")] = 3,
    scale: Annotated[float, typer.Option(min=0.1, help="Copies of the trace beside each other.")] = 4.0,
    batch: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of batch work, due a day later.")] = 0.25,
    tokens_per_s: Annotated[float, typer.Option(min=1, help="Of one machine.")] = 2000.0,
    start_s: Annotated[float, typer.Option(min=1, help="Until a machine serves.")] = 180.0,
    spot_usd: Annotated[float, typer.Option(min=0.001, help="USD an hour of a spot machine.")] = 0.92,
    on_demand_usd: Annotated[float, typer.Option(min=0.001, help="USD an hour of one on demand.")] = 3.06,
    hosted_usd: Annotated[
        float | None, typer.Option(min=0.0, help="USD per million tokens of a hosted API as the last tier.")
    ] = None,
    machines: Annotated[int, typer.Option(min=1, help="Spot machines that the market's fullest zone has.")] = 16,
    seed: Annotated[int, typer.Option(help="Of all that is drawn at random.")] = 1,
    peers: Annotated[bool, typer.Option(help="Play the policies of others, too.")] = True,
    equal_cost: Annotated[
        bool, typer.Option(help="Play them with as much headroom as makes them as dear as ours, too: some minutes.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw what happened as a picture (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last line alone.")] = False,
) -> None:
    """Play days of traffic and spot losses against the fleet's policy: cost, waits, machines, in a minute or so.

    Compares it with a fleet fixed at its peak, with other autoscalers, and with
    the least that somebody who knew everything could have paid. The last line
    is one JSON object.
    """
    import numpy as np  # noqa: PLC0415  # what only simulations need

    from fleet.simulation import market as markets  # noqa: PLC0415
    from fleet.simulation import workload as workloads  # noqa: PLC0415
    from fleet.simulation.optimum import Unsolved  # noqa: PLC0415
    from fleet.simulation.study import FIXED, Study, facts  # noqa: PLC0415
    from fleet.simulation.world import HostedApi, SimulatedPool  # noqa: PLC0415

    rng = np.random.default_rng(seed)
    try:
        work = (
            workloads.bursty(days, 5.4 * scale, rng)
            if trace is None
            else workloads.stretched(workloads.read_trace(trace), days, scale, rng)
        )
        work = workloads.with_batch(work, batch, rng)
        zones = None if spot is None else markets.read_spot(spot)
    except (ValueError, KeyError) as error:
        raise fail(f"{trace or spot}: {error}") from error
    market = (
        {}
        if zones is None
        else markets.by_second(zones, work.seconds, machines=machines, first_tick=int(rng.integers(0, 1000)))
    )
    most = max(200, 8 * machines)
    study = Study(
        work,
        (
            SimulatedPool("spot", "spot", spot_usd, tokens_per_s, start_s, most, tuple(market) or ("",)),
            SimulatedPool("on-demand", "on-demand", on_demand_usd, tokens_per_s, start_s, most),
        ),
        market,
        None if hosted_usd is None else HostedApi(hosted_usd, 2.0),
        seed=seed,
    )
    outcomes = {}
    equals = {}
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True
    ) as bar:
        task = bar.add_task("spillway", total=None)
        outcomes["spillway"] = study.ours()
        for name, play in study.peers().items() if peers else ():
            bar.update(task, description=name)
            outcomes[name] = play()
        for name in study.peers() if equal_cost else ():
            if name != FIXED:
                bar.update(task, description=f"{name}, at our cost")
                equals[name] = study.at_equal_cost(name, outcomes["spillway"].usd)
                about = "our" if equals[name].is_equal else "nearest to our"
                outcomes[f"{name}, at {about} cost"] = equals[name].outcome
        bar.update(task, description="the clairvoyant optimum")
        least: float | None
        try:
            least, why_not = study.least_usd(), ""
        except (ImportError, Unsolved) as error:
            least = None
            why_not = str(error) if isinstance(error, Unsolved) else f"that needs `{install_command('simulate')}`"
    table = Table(
        "policy", "USD", "x least", "late", "wait p50", "p95", "p99", "p99.9 (s)", "GPU-hours", "lost", "batch missed",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for name, outcome in outcomes.items():
        table.add_row(
            name,
            f"{outcome.usd:,.0f}",
            "-" if least is None else f"{outcome.usd / least:.2f}",
            f"{outcome.late_share:.3%}",
            *(f"{outcome.wait_s[one]:.0f}" for one in ("p50", "p95", "p99", "p99.9")),
            f"{sum(outcome.machine_hours.values()):,.0f}",
            str(outcome.lost_machines),
            str(outcome.batch_missed),
        )
    console = Console(width=max(out.width, TABLE_WIDTH_CHARS), highlight=False, quiet=as_json)
    console.print(table)
    if least is None:
        console.print(f"the least it could have cost is not computed: {why_not}")
    else:
        console.print(f"the least it could have cost: {least:,.0f} USD")
    console.print("".join(f"{name}: {_said_of(equal)}\n" for name, equal in equals.items()), end="")
    if picture is not None:
        from fleet.simulation.picture import draw  # noqa: PLC0415

        draw(outcomes["spillway"], picture)
    figures = {name: facts(outcome, least) for name, outcome in outcomes.items()}
    typer.echo(json.dumps({"seed": seed, "least_usd": least, **figures}))


def _said_of(equal: "Equal") -> str:
    if equal.is_equal:
        return f"as dear as ours at a utilisation of {equal.utilisation:.2f}"
    return f"not within 1 % of our cost; nearest at a utilisation of {equal.utilisation:.2f}"


def plan(
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="HOURSxREQUESTS", help="Part of a day and its requests a second: 12x10. Repeatable."),
    ] = None,
    offer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=USD[/GPUS]", help="A machine: USD an hour, and its GPUs: p5=40.97/8. Repeatable."),
    ] = None,
    requests_per_gpu: Annotated[
        float, typer.Option(min=1e-6, help="Requests a second that one GPU serves.")
    ] = EXAMPLE_REQUESTS_PER_GPU_S,
    tokens_per_request: Annotated[
        float | None, typer.Option(min=1, help="Prompt and output; for the cost of 1,000 tokens.")
    ] = None,
    days: Annotated[float, typer.Option(min=1, help="Of a month.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Say what a month costs, by way of renting machines. Without options: the example of docs/explanation/fleet.md."""
    try:
        phases = EXAMPLE_PHASES if not phase else tuple(_phase(text) for text in phase)
        offers = EXAMPLE_OFFERS if not offer else tuple(_offer(text) for text in offer)
        costs = [
            cost(one, phases, requests_per_gpu_s=requests_per_gpu, days=days, tokens_per_request=tokens_per_request)
            for one in offers
        ]
    except ValueError as error:
        raise fail(str(error)) from error
    if as_json:
        out.print_json(data=[msgspec.to_builtins(found) for found in costs])
        return
    for one in phases:
        needed = gpus_of(one, requests_per_gpu)
        out.print(f"{one.hours:g} hours a day with {one.requests_per_s:g} requests/s: {needed} GPUs")
    table = Table("offer", "machines", "USD a month", "USD per 1K tokens", box=SIMPLE_HEAD)
    for found in costs:
        per_1k = "-" if found.usd_per_1k_tokens is None else f"{found.usd_per_1k_tokens:.6f}"
        table.add_row(found.offer.name, " + ".join(map(str, found.machines)), f"{found.usd:,.0f}", per_1k)
    out.print(table)


def _phase(text: str) -> Phase:
    hours, x, requests = text.partition("x")
    try:
        return Phase(float(hours), float(requests)) if x else Phase(24.0, float(hours))
    except ValueError:
        raise ValueError(f"--phase {text}: not HOURSxREQUESTS, such as 12x10") from None


def _offer(text: str) -> Offer:
    name, _, price = text.partition("=")
    usd, _, gpus = price.partition("/")
    try:
        return Offer(name, float(usd), int(gpus or 1))
    except ValueError:
        raise ValueError(f"--offer {text}: not NAME=USD[/GPUS], such as p5=40.97/8") from None
