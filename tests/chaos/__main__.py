"""``python -m tests.chaos``: see the package's docstring for what is promised and how it is judged."""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from rich import progress as rich_progress
from rich.console import Console

from tests.chaos.hosts.scenario import ABOUT, HOSTS_FAULTS, HostsPlan, run_hosts
from tests.chaos.load_scenarios import LOAD_SCENARIOS
from tests.chaos.load_scenarios.plan import LoadPlan, run_load
from tests.chaos.report import Report
from tests.chaos.run import ChaosError, Plan, Progress, run
from tests.chaos.scenarios import SCENARIOS, for_engine
from tests.compose.docker import CommandFailed, NoDocker, running_docker

EPILOG = """
examples
  python -m tests.chaos kill --faults 1000          a thousand SIGKILLs in mid-stream, some five minutes
  python -m tests.chaos mix --seed 7                everything at random; the same seed strikes in the same order
  python -m tests.chaos kill --engine spillway --faults 100
  python -m tests.chaos upstream                    an inference server does everything wrong that servers do
  python -m tests.chaos kill-vllm                   real servers are installed on demand, which takes minutes
  python -m tests.chaos all                         every scenario with its own number of faults, without real servers
  make chaos SCENARIO=kill KILLS=1000 SEED=1        the same from make

The last line is one JSON object. The exit code is 0 if every promise was kept, 1 if one was broken (the first offences
are shown with the processes' own log lines; --keep DIR keeps all logs), 2 if there is no verdict, because the system
did not even work undisturbed, 130 if it was interrupted: Ctrl-C and SIGTERM end all processes first.
"""
INTERRUPTED = 130
HOSTS = "hosts"


def parse_arguments() -> argparse.Namespace:
    scenarios = "\n".join(f"  {name:<12} {s.about} ({s.faults} faults)" for name, s in SCENARIOS.items())
    scenarios += "\nloads\n" + "\n".join(f"  {name:<12} {s.about}" for name, s in LOAD_SCENARIOS.items())
    scenarios += f"\ncontainers\n  {HOSTS:<12} {ABOUT} ({HOSTS_FAULTS} faults)"
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=f"Break a real Spillway in mid-stream and compare every answer.\n\nscenarios\n{scenarios}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "scenario",
        choices=[*SCENARIOS, *LOAD_SCENARIOS, HOSTS, "all"],
        help="what goes wrong; all: one after the other, but those that install real servers",
    )
    parser.add_argument("--seed", type=int, default=1, help="of questions, schedule and victims")
    parser.add_argument("--faults", type=int, help="how many strike; default: the scenario's own number")
    parser.add_argument(
        "--engine", choices=["scripted", "spillway"], default="scripted", help="what makes the tokens; loads: scripted"
    )
    parser.add_argument("--seconds", type=float, help="how long a load is offered; default: the scenario's own time")
    parser.add_argument("--trace", type=Path, help="what a market had, for fleet-spot; default: a made-up one")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs, queue and ledger in this new folder")
    arguments = parser.parse_args()
    if arguments.scenario in {*LOAD_SCENARIOS, HOSTS} and arguments.engine != "scripted":
        parser.error(f"{arguments.scenario} needs an engine whose speed is known, the scripted one")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    # asyncio ends everything in order on SIGINT, also where a shell ignores that for us; a SIGTERM shall do no less.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _run_all(arguments, Console(stderr=True))
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_all(arguments: argparse.Namespace, console: Console) -> int:
    ours = [name for name, scenario in SCENARIOS.items() if not scenario.needs_real_servers]
    names = [*ours, *LOAD_SCENARIOS] if arguments.scenario == "all" else [arguments.scenario]
    codes = [_exit_code(name, arguments, console) for name in names]
    if arguments.scenario == "all":
        try:
            with running_docker():
                codes.append(_exit_code(HOSTS, arguments, console))
        except NoDocker as reason:
            console.print(f"{HOSTS}: skipped: {reason}", style="yellow", markup=False)
    return max(codes)


def _exit_code(name: str, arguments: argparse.Namespace, console: Console) -> int:
    run_it = _run_hosts if name == HOSTS else _run_load if name in LOAD_SCENARIOS else _run_faults
    try:
        return 0 if run_it(name, arguments, console).kept else 1
    except (ChaosError, NoDocker, CommandFailed, AssertionError, TimeoutError) as error:
        console.print(f"{name}: error: {str(error) or type(error).__name__}", style="red", markup=False)
        return 2


def _run_faults(name: str, arguments: argparse.Namespace, console: Console) -> Report:
    scenario = for_engine(SCENARIOS[name], arguments.engine)
    plan = Plan(name, scenario, arguments.seed, arguments.faults or scenario.faults)
    keep = arguments.keep and arguments.keep / name
    with tempfile.TemporaryDirectory(prefix="spillway-chaos-") as folder, _progress_shown(console) as progress:
        report = uvloop.run(run(plan, keep or Path(folder) / "run", progress))
    report.extras["engine"] = plan.scenario.shape.engine
    return _tell(report, console)


def _run_load(name: str, arguments: argparse.Namespace, console: Console) -> Report:
    scenario = LOAD_SCENARIOS[name]
    seconds, count = arguments.seconds or scenario.seconds, arguments.faults or scenario.count
    plan = LoadPlan(name, arguments.seed, seconds, count, arguments.trace)
    keep = arguments.keep and arguments.keep / name
    with tempfile.TemporaryDirectory(prefix="spillway-chaos-") as folder, _progress_shown(console) as progress:
        began_s = time.monotonic()
        report = uvloop.run(run_load(scenario, plan, keep or Path(folder) / "run", progress))
        report.duration_s = time.monotonic() - began_s
    report.extras["engine"] = scenario.shape.engine
    return _tell(report, console)


def _run_hosts(name: str, arguments: argparse.Namespace, console: Console) -> Report:
    plan = HostsPlan(arguments.seed, arguments.faults or HOSTS_FAULTS)
    keep = arguments.keep and arguments.keep / name
    with (
        running_docker(),
        tempfile.TemporaryDirectory(prefix="spillway-chaos-") as folder,
        _progress_shown(console) as progress,
    ):
        report = uvloop.run(run_hosts(plan, keep or Path(folder) / "run", progress))
    return _tell(report, console)


@contextmanager
def _progress_shown(console: Console) -> Iterator[Progress]:
    """A bar for each thing that goes on: so many done of so many; loads show answers of requests so far."""
    columns = ("{task.description}", rich_progress.BarColumn(), rich_progress.MofNCompleteColumn())
    tasks: dict[str, rich_progress.TaskID] = {}
    with rich_progress.Progress(*columns, rich_progress.TimeElapsedColumn(), console=console) as bar:

        def show(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=of)

        yield show


def _tell(report: Report, console: Console) -> Report:
    report.extras["commit"] = _commit()
    report.show(console)
    sys.stdout.write(report.line() + "\n")
    sys.stdout.flush()
    return report


def _commit() -> str:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
