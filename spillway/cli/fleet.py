"""``spillway fleet``: run the controller, and show and explain its decisions."""

import time
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from db.tables import Decision
from fleet.machine import STARTING, Machine, State
from fleet.machine_store import MachineStore
from fleet.settings import PoolFleetSettings
from spillway import logs
from spillway.children import PYTHON, resolved_config_path
from spillway.cli.connections import database
from spillway.cli.context import (
    ConfigOption,
    DataOption,
    ReadyFileOption,
    fail,
    out,
    run_async,
    running_or_config,
    write_ready,
)
from spillway.cli.output import JsonOption
from spillway.config import Config
from spillway.fleet_config import controller_settings

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
TABLE_WIDTH_CHARS: Final = 100  # minimum, so that headings are not truncated


@logs.configured("fleet")
def run(
    config: ConfigOption = None,
    data: DataOption = None,
    end_machines: Annotated[
        bool, typer.Option("--end-machines", help="Drain and end all machines when the controller stops.")
    ] = False,
    ready_file: ReadyFileOption = None,
) -> None:
    """Run the fleet controller, which scales each pool that has a `fleet` section.

    You can run several controllers; one of them leads. Ctrl-C stops the
    controller but not its machines: the next controller adopts them.
    """
    resolved = running_or_config(config, data)
    _need_fleet(resolved)
    from fleet.main import run as run_controller  # noqa: PLC0415  # imports drivers

    path = config or resolved_config_path(resolved.data_dir)
    where = ("--config", str(path.resolve())) if path.exists() else ()
    commands = {name: (*PYTHON, "-m", "spillway", "worker", "--pool", name, *where) for name in resolved.pools}
    settings = controller_settings(resolved, commands)
    run_async(
        lambda: run_controller(settings, on_ready=lambda: write_ready(ready_file, {}), ends_machines=end_machines)
    )


def _need_fleet(config: Config) -> None:
    if not any(pool.fleet is not None for pool in config.pools.values()):
        raise fail("no pool has a [pools.<name>.fleet] section: there is no fleet to control")


def status(as_json: JsonOption = False, config: ConfigOption = None, data: DataOption = None) -> None:
    """Show each pool's machines: decided, serving, starting, draining, and lost in the last 24 hours."""
    resolved = running_or_config(config, data)
    _need_fleet(resolved)

    async def main() -> None:
        async with database(resolved) as engine:
            store = MachineStore(engine)
            machines = await store.machines()
            over = await store.over_since(_now_ms() - DAY_MS)
            latest = _latest(await store.decisions(_now_ms() - 30 * DAY_MS))
        rows = [
            _status_of(name, pool.fleet, machines, over, latest) for name, pool in resolved.pools.items() if pool.fleet
        ]
        if as_json:
            out.print_json(data=rows)
        else:
            _print_status(rows)

    run_async(main)


def _latest(decisions: list[Decision]) -> dict[str, Decision]:
    latest: dict[str, Decision] = {}
    for decision in decisions:  # the latest first
        latest.setdefault(decision.pool, decision)
    return latest


def _status_of(
    name: str, fleet: PoolFleetSettings, machines: list[Machine], over: list[Machine], latest: dict[str, Decision]
) -> dict[str, Any]:
    counts = Counter(machine.state for machine in machines if machine.pool == name)
    ends = Counter(machine.state for machine in over if machine.pool == name)
    return {
        "pool": name,
        "driver": fleet.driver.kind,
        "min_workers": fleet.min_workers,
        "max_workers": fleet.max_workers,
        "decided": latest[name].size if name in latest else None,
        "serving": counts[State.SERVING],
        "starting": sum(counts[state] for state in STARTING),
        "draining": counts[State.DRAINING] + counts[State.ENDING],
        "ended_24h": ends[State.GONE],
        "lost_24h": ends[State.LOST],
        "failed_24h": ends[State.FAILED],
    }


def _print_status(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "pool", "driver", "bounds", "decided", "serving", "starting", "draining", "ended", "lost", "failed",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for row in rows:
        pool, driver, least, most, decided, *counts = row.values()
        decided = "-" if decided is None else decided
        table.add_row(pool, driver, f"{least}-{most}", *map(str, (decided, *counts)))
    Console(width=max(out.width, TABLE_WIDTH_CHARS), highlight=False).print(table)
    out.print("[dim]ended, lost and failed: in the last 24 hours[/dim]")


def explain(
    pool: Annotated[str | None, typer.Argument(help="Only this pool.")] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="How many hours to look back.")] = 6.0,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Explain the size of pools: each scaling decision in one sentence, and each machine's state."""
    resolved = running_or_config(config, data)
    _need_fleet(resolved)
    if pool is not None and pool not in resolved.pools:
        raise fail(f"pools.{pool}: no such pool; defined pools: {', '.join(resolved.pools)}")
    since_ms = _now_ms() - round(hours * HOUR_MS)

    async def main() -> None:
        async with database(resolved) as engine:
            store = MachineStore(engine)
            decisions = await store.decisions(since_ms, pool)
            machines = [*await store.machines(), *await store.over_since(since_ms)]
        lines = [
            (one.decided_unix_ms, f"{one.pool}: {one.size} worker{'' if one.size == 1 else 's'}: {one.reason}")
            for one in decisions
        ]
        for machine in machines:
            changed_ms = max(
                moment
                for moment in (
                    machine.wanted_unix_ms, machine.launched_unix_ms, machine.serving_unix_ms, machine.drained_unix_ms,
                    machine.over_unix_ms,
                )
                if moment is not None
            )  # fmt: skip
            if changed_ms >= since_ms and pool in (None, machine.pool):
                place = f" at {machine.place}" if machine.place else ""
                text = f"{machine.pool}: machine {machine.machine_id}{place} is {machine.state}: {machine.reason}"
                lines.append((changed_ms, text))
        if as_json:
            out.print_json(data=[{"at_unix_ms": at_ms, "text": text} for at_ms, text in sorted(lines)])
            return
        for at_ms, text in sorted(lines):
            out.print(f"{datetime.fromtimestamp(at_ms / 1000, UTC):%m-%d %H:%M:%S}  {text}", soft_wrap=True)
        if not lines:
            out.print("no decisions in this period")

    run_async(main)


def _now_ms() -> int:
    return round(time.time() * 1000)
