"""What scenarios are given before they start: names, and what the older release of an upgrade gets."""

import os
import subprocess
import sys
from pathlib import Path

import migrations
from tests.chaos.load_scenarios import LOAD_SCENARIOS
from tests.chaos.older import create_older_schema, unpack_older
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.system import System
from tests.nats_server import NatsServer

READ = (
    "import sys, pathlib; from importlib.metadata import version; from spillway.config import load_config; "
    "load_config(pathlib.Path(sys.argv[1]), env={}); print(version('spillway'))"
)


def test_a_name_is_of_one_scenario() -> None:
    """Of two with one name, one would never run."""
    assert not SCENARIOS.keys() & LOAD_SCENARIOS.keys()


def test_the_older_release_reads_its_configuration_and_its_database_is_upgraded(tmp_path: Path) -> None:
    system, url = System(tmp_path, SCENARIOS["upgrade"].shape), f"sqlite:///{tmp_path / 'spillway.db'}"
    system.queue_servers = [NatsServer(tmp_path)]
    system.write_config(url)
    older = unpack_older(tmp_path / "older")
    reading = [sys.executable, "-c", READ, str(system.config_path)]
    read = subprocess.run(reading, env=os.environ | older, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    create_older_schema(older, url)
    assert migrations.current(url) == migrations.BASELINE
    migrations.upgrade(url)
    assert migrations.current(url) == migrations.head()
