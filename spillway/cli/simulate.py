"""``spillway fleet simulate`` and ``spillway plan``: simulate the fleet's policy, and estimate a month's cost."""

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
# The example of docs/explanation/fleet.md: 10 requests/s for 12 busy hours a day, 7 requests/s in the others; each GPU
# serves 0.5 requests/s; machines of 8 GPUs at a managed endpoint and on demand, single GPUs on spot markets.
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
        typer.Option(exists=True, help="Request trace in Azure's CSV format. Default: a generated, bursty load."),
    ] = None,
    spot: Annotated[
        Path | None,
        typer.Option(exists=True, help="Spot availability by zone (JSON of runs). Default: always available."),
    ] = None,
    days: Annotated[int, typer.Option(min=2, max=28, help="Days to simulate; the first is a Monday.")] = 3,
    scale: Annotated[float, typer.Option(min=0.1, help="Multiplies the traffic.")] = 4.0,
    batch: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of batch work, due a day later.")] = 0.25,
    tokens_per_s: Annotated[float, typer.Option(min=1, help="Throughput of one machine, in tokens/s.")] = 2000.0,
    start_s: Annotated[float, typer.Option(min=1, help="Seconds from a machine's launch until it serves.")] = 180.0,
    spot_usd: Annotated[float, typer.Option(min=0.001, help="USD per hour of a spot machine.")] = 0.92,
    on_demand_usd: Annotated[float, typer.Option(min=0.001, help="USD per hour of an on-demand machine.")] = 3.06,
    hosted_usd: Annotated[
        float | None, typer.Option(min=0.0, help="USD per million tokens of a hosted API, used as the last tier.")
    ] = None,
    machines: Annotated[int, typer.Option(min=1, help="Spot machines in the zone that has the most.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 1,
    peers: Annotated[bool, typer.Option(help="Also simulate other autoscalers.")] = True,
    equal_cost: Annotated[
        bool, typer.Option(help="Also simulate them with the headroom that costs the same as ours. Takes minutes.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a chart of the simulation (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON object.")] = False,
) -> None:
    """Simulate the fleet's policy over days of traffic and spot losses: cost, waits and machines. Takes about a minute.

    Compares the policy with a fleet of fixed size, with other autoscalers, and
    with the lowest possible cost, which needs perfect knowledge of the future.
    The last line is one JSON object.
    """
    import numpy as np  # noqa: PLC0415  # only simulations need it

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
        bar.update(task, description="lowest possible cost")
        least: float | None
        try:
            least, why_not = study.least_usd(), ""
        except (ImportError, Unsolved) as error:
            least = None
            why_not = str(error) if isinstance(error, Unsolved) else f"run `{install_command('simulate')}`"
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
        console.print(f"lowest possible cost: not computed: {why_not}")
    else:
        console.print(f"lowest possible cost: {least:,.0f} USD")
    console.print("".join(f"{name}: {_equal_text(equal)}\n" for name, equal in equals.items()), end="")
    if picture is not None:
        from fleet.simulation.picture import draw  # noqa: PLC0415

        draw(outcomes["spillway"], picture)
    figures = {name: facts(outcome, least) for name, outcome in outcomes.items()}
    typer.echo(json.dumps({"seed": seed, "least_usd": least, **figures}))


def _equal_text(equal: "Equal") -> str:
    if equal.is_equal:
        return f"costs the same as ours at a utilization of {equal.utilisation:.2f}"
    return f"not within 1% of our cost; nearest at a utilization of {equal.utilisation:.2f}"


def plan(
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="HOURSxREQUESTS", help="Hours of a day and their requests/s: 12x10. Repeatable."),
    ] = None,
    offer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=USD[/GPUS]", help="A machine's USD per hour and GPUs: p5=40.97/8. Repeatable."),
    ] = None,
    requests_per_gpu: Annotated[
        float, typer.Option(min=1e-6, help="Requests per second that one GPU serves.")
    ] = EXAMPLE_REQUESTS_PER_GPU_S,
    tokens_per_request: Annotated[
        float | None, typer.Option(min=1, help="Prompt and output tokens per request, for the cost per 1K tokens.")
    ] = None,
    days: Annotated[float, typer.Option(min=1, help="Days per month.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Estimate the monthly cost of each machine offer. Without options: the example in docs/explanation/fleet.md."""
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
    table = Table("offer", "machines", "USD per month", "USD per 1K tokens", box=SIMPLE_HEAD)
    for found in costs:
        per_1k = "-" if found.usd_per_1k_tokens is None else f"{found.usd_per_1k_tokens:.6f}"
        table.add_row(found.offer.name, " + ".join(map(str, found.machines)), f"{found.usd:,.0f}", per_1k)
    out.print(table)


def _phase(text: str) -> Phase:
    hours, x, requests = text.partition("x")
    try:
        return Phase(float(hours), float(requests)) if x else Phase(24.0, float(hours))
    except ValueError:
        raise ValueError(f"--phase {text}: must be HOURSxREQUESTS, such as 12x10") from None


def _offer(text: str) -> Offer:
    name, _, price = text.partition("=")
    usd, _, gpus = price.partition("/")
    try:
        return Offer(name, float(usd), int(gpus or 1))
    except ValueError:
        raise ValueError(f"--offer {text}: must be NAME=USD[/GPUS], such as p5=40.97/8") from None
