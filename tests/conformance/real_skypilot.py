"""Run the SkyPilot driver, and a fleet with it, against the real SkyPilot with a real Slurm. Needs no account.

    python -m tests.conformance.real_skypilot

SkyPilot is installed on demand, in a separate environment. Its machines are jobs of the Slurm of ``slurm_in_a_box``, on
which it installs its runtime as usual; the packages come from uv's cache, because the box has no network.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.peers import pinned
from fleet.drivers.skypilot import SkyPilotDriver
from fleet.errors import LaunchRefused
from fleet.machine import Order, State, labels_of, name_of, new_machine_id
from fleet.machine_store import MachineStore
from fleet.settings import SkyPilotSettings
from tests.chaos.load_scenarios.fleet import start_controller
from tests.chaos.load_scenarios.plan import LoadPlan, LoadScenario, Stage, run_load
from tests.chaos.system import Shape
from tests.conformance import slurm_in_a_box
from tests.conformance.slurm_in_a_box import run_in_box

MODULE: Final = "tests.conformance.real_skypilot"
FLEET, POOL = "conformance", "slurm"
PLACE: Final = f"slurm/{slurm_in_a_box.NAME}"
ENVIRONMENT: Final = pinned.ENVIRONMENTS / "skypilot"
UV_CACHE: Final = ENVIRONMENT / "uv-cache"
CACHE_IN_BOX: Final = "/tmp/uv_cache_0"  # SkyPilot's own choice for root
ITS_PYTHON: Final = "3.10"  # the uv that SkyPilot would download
SERVES_LIMIT_S: Final = 400.0  # a launch takes one to two minutes
GONE_LIMIT_S: Final = 120.0
POLL_S: Final = 1.0
TOKENS: Final = 20

INSTALLER: Final = """\
#!/bin/sh
# Stands in for curl in SkyPilot's installation of uv.
case "$*" in
  *astral.sh/uv/*) echo 'mkdir -p "$UV_INSTALL_DIR" && cp "{folder}/uv" "$UV_INSTALL_DIR/uv"' ;;
  *) exit 6 ;;
esac
"""
UV: Final = """\
#!/bin/sh
for argument; do
  shift
  if [ "$argument" = "{its}" ]; then argument="{ours}"; fi
  set -- "$@" "$argument"
done
exec "{uv}" "$@"
"""


def main() -> int:
    if sys.argv[1:2] == ["--in-box"]:
        asyncio.run(_check(Path(sys.argv[2])))
        return 0
    lacking = slurm_in_a_box.missing()
    if lacking is not None:
        sys.stderr.write(f"{lacking}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the folder is deleted
    version = pinned.install("skypilot", "skypilot")
    with tempfile.TemporaryDirectory(prefix="spillway-skypilot-", dir="/var/tmp") as folder:
        python = str(Path(sys.executable).resolve())
        _fill_cache(Path(folder) / "filling", python, version)
        programs = Path(folder) / "bin"
        programs.mkdir()
        _write_program(programs / "curl", INSTALLER.format(folder=programs))
        _write_program(programs / "uv", UV.format(its=ITS_PYTHON, ours=python, uv=ENVIRONMENT / "bin" / "uv"))
        environment = {
            "PATH": f"{programs}:{ENVIRONMENT / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "UV_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "false",  # pip's syntax for: without
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }
        command = [sys.executable, "-m", MODULE, "--in-box", folder]
        return run_in_box(Path(folder) / "box", {UV_CACHE: CACHE_IN_BOX}, environment, command)


def _fill_cache(folder: Path, python: str, version: str) -> None:
    """Fill uv's cache with the packages that SkyPilot installs on its machines, unless done."""
    uv, stamp = str(ENVIRONMENT / "bin" / "uv"), UV_CACHE / "filled.txt"
    if stamp.exists() and stamp.read_text() == version:
        return
    cache = ["--cache-dir", str(UV_CACHE)]
    subprocess.run([uv, "venv", "--quiet", *cache, "--seed", "--python", python, str(folder)], check=True)
    packages = [f"skypilot[slurm,remote]=={version}", "pip", "setuptools", "wheel"]
    install = [uv, "pip", "install", "--quiet", *cache, "--python", str(folder / "bin" / "python")]
    subprocess.run([*install, *packages], check=True)
    stamp.write_text(version)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


# --- inside the box ---------------------------------------------------------------------------------------------------


async def _check(folder: Path) -> None:
    began_s = time.monotonic()
    await _check_driver(folder)
    _tell(f"the driver keeps its duties ({time.monotonic() - began_s:.0f} s)")
    began_s = time.monotonic()
    await _check_fleet(folder)
    _tell(f"a fleet served, lost a machine, served again and left nothing ({time.monotonic() - began_s:.0f} s)")


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _settings(folder: Path, run: str, cpus: int = 1) -> SkyPilotSettings:
    task = folder / f"task-{cpus}.yaml"
    task.write_text(f"resources:\n  cpus: {cpus}\nrun: {run}\n")
    python = str(ENVIRONMENT / "bin" / "python")
    return SkyPilotSettings(kind="skypilot", task=str(task), python=python, infra=(PLACE,))


def _order(place: str = PLACE) -> Order:
    machine_id = new_machine_id()
    return Order(machine_id, POOL, place, labels_of(FLEET, machine_id, POOL), {"SPILLWAY_POOL": POOL})


async def _check_driver(folder: Path) -> None:
    """Run the checks of ``tests/fleet/test_drivers.py``, as far as a Slurm can show them."""
    settings, huge = _settings(folder, "sleep 600"), _settings(folder, "sleep 600", cpus=1000)
    made: list[SkyPilotDriver] = []

    def driver(of: SkyPilotSettings = settings, pool: str = POOL, *, spot: bool = False) -> SkyPilotDriver:
        made.append(SkyPilotDriver(of, FLEET, pool, spot=spot))
        return made[-1]

    try:
        one, other_pool = driver(), driver(pool="other")
        assert await one.machines() == []
        await _expect_refused(driver(huge), _order(), "Catalog does not contain")
        await _expect_refused(driver(spot=True), _order(), "Catalog does not contain")
        await _expect_refused(one, _order("slurm/nowhere"), "not found")
        await _expect_refused(one, _order(f"{PLACE}/nowhere"), "not found")
        assert _jobs() == []
        _tell("what cannot be had is refused")
        order = _order()
        first = await one.launch(order)
        assert first == await one.launch(order) == name_of(order.labels)
        [machine] = await driver().machines()  # a new instance finds it
        assert (machine.provider_id, machine.labels) == (first, order.labels)
        assert len(_jobs()) == 1
        assert await other_pool.machines() == []
        await other_pool.end(first)
        assert len(await one.machines()) == 1
        _tell("the same order is one machine, which a new driver finds and another pool's does not")
        await one.end(first)  # its launch continues
        await _until(lambda: not _jobs(), GONE_LIMIT_S)
        assert await one.machines() == []
        await one.end(first)
        _tell("a machine that is ended while it is launched is gone")
    finally:
        await asyncio.gather(*(one.close() for one in made))


async def _expect_refused(driver: SkyPilotDriver, order: Order, text: str) -> None:
    with pytest.raises(LaunchRefused, match=text) as refusal:
        await driver.launch(order)
    assert refusal.type is LaunchRefused


async def _check_fleet(folder: Path) -> None:
    """Run real workers in Slurm jobs, started and ended by the real controller."""
    run = folder / "run"
    worker = _settings(folder, f"cd {Path.cwd()} && {sys.executable} -m spillway worker --config {run}/config-0.json")
    shape = Shape(
        workers=0,
        drain_s=5.0,
        fleet={"fleet_id": FLEET, "period_s": 1.0, "listed_after_s": 30.0},
        worker_settings={
            "tier": "on-demand",
            "usd_per_hour": 1.0,
            "fleet": {
                "min_workers": 1,
                "max_workers": 1,
                "unavailable_s": 5.0,
                "driver": worker.model_dump(mode="json"),
            },
        },
    )
    report = await run_load(LoadScenario("a fleet at SkyPilot", shape, _serve, 0), LoadPlan(POOL, 1, 0), run)
    assert report.offences == []
    assert report.errors == 0
    assert report.ledger_rows == report.requests == 2


async def _serve(stage: Stage) -> None:
    began_s = time.monotonic()
    controller = await start_controller(stage.system, {})
    controller.stop_limit_s = GONE_LIMIT_S  # SkyPilot is slow
    store = MachineStore(stage.system.database)
    first = await _until_serving(store, began_s)
    await _ask(stage)
    _take_away_the_job()
    second = await _until_serving(store, time.monotonic(), after=first)
    assert second != first
    await _ask(stage)
    began_s = time.monotonic()
    await controller.stop()
    await _until(lambda: not _jobs(), GONE_LIMIT_S)
    assert await store.machines() == []
    reasons = {one.machine_id: one.reason for one in await store.over_since(0)}
    assert reasons.keys() == {first, second}, reasons
    # Its worker falls silent before SkyPilot has asked Slurm; if that is noticed first, the machine is lost.
    assert "silent" in reasons[first] or "taken" in reasons[first], reasons
    assert not _processes("spillway worker"), _processes("spillway worker")
    _tell(f"drained and ended within {time.monotonic() - began_s:.0f} s")


async def _until_serving(store: MachineStore, since_s: float, after: str = "") -> str:
    """Wait until a machine serves that is not the one before; return its id."""
    serving: list[str] = []

    async def serves() -> bool:
        machines = await store.machines()
        serving[:] = [one.machine_id for one in machines if one.state is State.SERVING and one.machine_id != after]
        return bool(serving)

    await _until(serves, SERVES_LIMIT_S)
    _tell(f"a machine serves after {time.monotonic() - since_s:.0f} s")
    return serving[0]


async def _ask(stage: Stage) -> None:
    asked = await stage.callers.ask(tokens=TOKENS)
    assert asked.record.status == 200, asked.record
    assert asked.answer.completion_tokens == TOKENS, asked.answer


def _take_away_the_job() -> None:
    [job] = _jobs()
    # After SIGTERM, as usual, the worker would leave in order.
    subprocess.run(["scancel", "--full", "--signal=KILL", job], check=True)


def _jobs() -> list[str]:
    """Return the ids of Slurm's jobs, including ending ones."""
    done = subprocess.run(["squeue", "--noheader", "--format=%i"], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.split()


def _processes(words: str) -> list[str]:
    done = subprocess.run(["ps", "-e", "-o", "args="], check=True, stdout=subprocess.PIPE, text=True)
    return [line for line in done.stdout.splitlines() if words in line]


async def _until(condition: Callable[[], Any], limit_s: float) -> None:
    """Return once the condition, which may be a coroutine function, is true."""
    async with asyncio.timeout(limit_s):
        while True:
            is_true = condition()
            if await is_true if asyncio.iscoroutine(is_true) else is_true:
                return
            await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
