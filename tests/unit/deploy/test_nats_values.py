"""deploy/helm/nats: the values for NATS' own chart, held against nats-server and against the settings of one box."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from protocol.nats.topology import QueueBounds, streams
from tests.shipped import CLUSTER_CONFIG, NATS_CONFIG
from tests.unit.deploy.chart import HELM_FOLDER, documents
from tests.unit.deploy.description import ROOT, instructions, tool

VALUES = HELM_FOLDER / "nats/values.yaml"


# The chart's own settings, as far as ours meet them (helm/charts/nats/files/config of chart 2.14.2).
def chart_config(values: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(values["config"])
    cluster, jetstream = config["cluster"], config["jetstream"]
    assert set(config) == {"cluster", "jetstream", "monitor", "merge"}
    return {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "port": 4222,
        "cluster": {"name": "nats", "port": 6222, "no_advertise": True, **cluster["merge"]},
        "http_port": 8222,
        "jetstream": {
            "max_memory_store": f"<< {jetstream['memoryStore']['maxSize']} >>",
            "store_dir": "/data",
            "max_file_store": f"<< {jetstream['fileStore']['maxSize']} >>",
            **jetstream["merge"],
        },
        **config["merge"],
    }


def test_nats_server_accepts_what_the_chart_makes_of_the_values(tmp_path: Path) -> None:
    values = documents(VALUES)[0]
    text = yaml.safe_dump(chart_config(values), default_flow_style=True, width=100_000, default_style='"')
    text = re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", re.sub(r'!!\w+ "(\w+)"', r"\1", text))
    (tmp_path / "nats.conf").write_text(text.replace('"/data"', f'"{tmp_path}"').strip().strip("{}"))
    environment = {
        "SERVER_NAME": "nats-0",
        "NATS_PASSWORD": "n" + "1" * 64,
        "NATS_CLUSTER_PASSWORD": "c" + "2" * 64,
        "NATS_ROUTES": "[nats://cluster:c2@nats-0.nats-headless:6222, nats://cluster:c2@nats-1.nats-headless:6222]",
    }
    assert set(environment) == {"SERVER_NAME", *(set(values["container"]["env"]) - {"GOMEMLIMIT"})}
    done = subprocess.run(
        [tool("nats-server"), "-t", "-c", str(tmp_path / "nats.conf")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_queue_is_set_up_as_on_one_machine() -> None:
    values = documents(VALUES)[0]
    single, config = NATS_CONFIG.read_text(), values["config"]
    assert f"max_memory_store: {config['jetstream']['memoryStore']['maxSize']}\n" in single
    assert f"max_file_store: {config['jetstream']['fileStore']['maxSize']}\n" in single
    assert config["jetstream"]["merge"] == {"sync_interval": "always"}
    assert "  sync_interval: always\n" in single
    assert config["merge"]["max_payload"] == "<< 8MB >>"
    assert "max_payload: 8MB\n" in single
    for subject in ("$SYS.ACCOUNT.*.DISCONNECT", "$SYS.ACCOUNT.SPILLWAY.DISCONNECT"):
        assert subject in str(config["merge"]["accounts"])
        assert subject in single
    assert "authorization { user: cluster, password: $NATS_CLUSTER_PASSWORD }" in CLUSTER_CONFIG.read_text()
    base = [arguments for name, arguments in instructions(ROOT / "deploy/images/nats.Dockerfile") if name == "FROM"]
    assert base == [f"nats:{values['container']['image']['tag']}"]
    stores = {
        kind: sum(s.get("max_bytes") or 0 for s in streams(QueueBounds()) if s["storage"] == kind)
        for kind in ("memory", "file")
    }
    assert stores["memory"] < 2_000_000_000
    assert stores["file"] < 8_000_000_000
