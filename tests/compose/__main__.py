"""``make compose``: docker-compose.yml and the commands of its pages, on a real Docker.

The commands are taken from ``docs/deploy/one-box.md`` and ``docs/deploy/compose.md`` as they stand there; ``Rig.ours``
has what is replaced in them. Everything runs in a copy of the checkout and under a name of its own, and is removed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from tests.compose import steps
from tests.compose.docker import BUILD_ARGS_VARIABLE, CommandFailed, NoDocker, running_docker
from tests.compose.rig import Rig, Skipped, say
from tests.unit.deploy.description import ROOT

STEPS: Final[tuple[Callable[[Rig], str], ...]] = (
    steps.copy_and_build,
    steps.four_commands_to_a_stream,
    steps.usage_and_dashboard,
    steps.a_forged_address_is_not_believed,
    steps.another_model_under_load,
    steps.upgrade_under_load,
    steps.second_provider,
    steps.more_workers,
    steps.workers_on_other_machines,
    steps.tls,
    steps.third_gateway,
    steps.engine_benchmark,
    steps.alerts,
    steps.boards,
    steps.down,
)

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def main() -> int:
    """Run all steps until one fails. Return 0, 1 for a failure, 2 where there is no Docker."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/compose",
        help="where the copy and the logs lie; the engine must be able to mount it. Default: build/compose",
    )
    parser.epilog = f"{BUILD_ARGS_VARIABLE}: further arguments for `docker build`, for example '--network host'."
    given = parser.parse_args()
    for interruption in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interruption, interrupted)
    try:
        with running_docker() as (engine, compose):
            say(f"Docker Engine {engine}, Compose {compose}, {os.cpu_count()} cores")
            return all_steps(Rig(given.folder))
    except NoDocker as missing:
        sys.stderr.write(f"{missing}\n")
        return 2


def all_steps(rig: Rig) -> int:
    """Run the steps and remove what they started. Return 0, or 1 for a failure."""
    begun_s = time.monotonic()
    outcomes: list[str] = []
    try:
        for number, step in enumerate(STEPS, 1):
            outcomes.append(ran(rig, number, step))
            if outcomes[-1] == FAILED:
                break
    finally:
        is_ok = len(outcomes) == len(STEPS) and FAILED not in outcomes
        if not is_ok:
            rig.keep_logs()
            say(f"Logs: {rig.logs}")
        rig.remove()
    counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).items())
    say(f"{counts} of {len(STEPS)} steps in {time.monotonic() - begun_s:.0f} s")
    return 0 if is_ok else 1


def interrupted(number: int, _frame: object) -> None:
    """End by way of all ``finally`` blocks, which remove what was started."""
    sys.exit(128 + number)


def ran(rig: Rig, number: int, step: Callable[[Rig], str]) -> str:
    """Run one step and say what came of it. Return whether it passed, failed or was skipped."""
    say(f"{number:>2}. {step.__name__.replace('_', ' ')} …")
    rig.begin(number, step.__name__)
    begun_s = time.monotonic()
    try:
        text, outcome = step(rig), PASSED
    except Skipped as reason:
        text, outcome = f"skipped: {reason}", SKIPPED
    except (AssertionError, CommandFailed, httpx.HTTPError, OSError, subprocess.TimeoutExpired) as error:
        text, outcome = f"FAILED: {type(error).__name__}: {error}", FAILED
    say(f"    {time.monotonic() - begun_s:.0f} s: {text}")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
