"""deploy/helm/nats: the values for NATS' own chart, held against nats-server and against the settings of one box."""

import re
import subprocess
from pathlib import Path

import pytest

from protocol.nats.topology import QueueBounds, streams
from tests.certificates import certified
from tests.shipped import CLUSTER_CONFIG, LEAF_CONFIG, NATS_CONFIG
from tests.unit.deploy.description import ROOT, instructions, tool
from tests.unit.deploy.nats_chart import CERTIFICATES, Values, as_text, server_config, values_of


def environment_of(values: Values) -> dict[str, str]:
    """What the Secret gives to a server."""
    known = {
        "NATS_PASSWORD": "n" + "1" * 64,
        "NATS_CLUSTER_PASSWORD": "c" + "2" * 64,
        "NATS_ROUTES": "[nats://cluster:c2@nats-0.nats-headless:6222, nats://cluster:c2@nats-1.nats-headless:6222]",
        "NATS_HOME": '"tls://spillway:n1@queue.example.com:7422"',
    }
    return {name: known[name] for name in set(values["container"]["env"]) - {"GOMEMLIMIT"}}


@pytest.mark.parametrize(
    "names", [["values"], ["values", "values-public"], ["values", "values-public", "values-regions"], ["values-leaf"]]
)
def test_nats_server_accepts_what_the_chart_makes_of_the_values(names: list[str], tmp_path: Path) -> None:
    values = values_of(*names)
    certified(tmp_path, "127.0.0.1")
    text = as_text(server_config(values)).replace('"/data"', f'"{tmp_path}"')
    text = re.sub(rf"{CERTIFICATES}/\w+/tls\.\w+", str(tmp_path / "127.0.0.1.pem"), text)
    (tmp_path / "nats.conf").write_text(text)
    done = subprocess.run(
        [tool("nats-server"), "-t", "-c", str(tmp_path / "nats.conf")],
        env={"SERVER_NAME": "nats-0", **environment_of(values)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leaf_is_set_up_as_on_one_machine() -> None:
    config, shipped = values_of("values-leaf")["config"]["merge"], LEAF_CONFIG.read_text()
    account, home = config["accounts"]["SPILLWAY"], values_of("values")["config"]["merge"]["accounts"]["SPILLWAY"]
    [(there, on_the_way)] = account["mappings"].items()
    assert home["mappings"] == {on_the_way: there}
    assert f'mappings: {{ "{there}": "{on_the_way}" }}' in shipped
    assert f'mappings: {{ "{on_the_way}": "{there}" }}' in NATS_CONFIG.read_text()
    assert f'reconnect: "{config["leafnodes"]["reconnect"]}"' in shipped
    assert "max_payload: 8MB\n" in shipped
    assert config["max_payload"] == "<< 8MB >>"


def test_the_queue_is_set_up_as_on_one_machine() -> None:
    values = values_of("values")
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
