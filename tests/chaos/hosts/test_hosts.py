"""What the ``hosts`` scenario runs, as far as it can be told without Docker, and how it judges."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.http_client import Exchange
from spillway.config import load_config
from tests.chaos.hosts.installation import OVERLAY, SECOND_MODEL, SECOND_POOL, WATCHED, with_our_engine
from tests.chaos.hosts.scenario import HOSTS, LOSSES, LOST, REGIONS, judge_cut, told
from tests.chaos.ledger import LedgerRow
from tests.chaos.load import Call
from tests.chaos.mix import Question
from tests.chaos.oracle import Answer, Choice
from tests.chaos.report import Report
from tests.chaos.strikes import Strike
from tests.unit.deploy.description import ROOT, services, tool

STREAMED = Question(1, "/v1/chat/completions", {"stream": True})
QUEUE_SERVERS = set(HOSTS["queue server"])


def overlay() -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        """Reads Compose's own tags as what they stand before."""

    def override(loader: yaml.SafeLoader, node: yaml.Node) -> list[Any]:
        assert isinstance(node, yaml.SequenceNode)
        return list(loader.construct_sequence(node))

    Loader.add_constructor("!override", override)
    Loader.add_constructor("!reset", lambda _loader, _node: None)
    whole: dict[str, Any] = yaml.load(OVERLAY.read_text(), Loader)
    return whole


def test_the_overlay_follows_the_compose_specification(tmp_path: Path) -> None:
    read = tmp_path / "compose.json"
    read.write_text(json.dumps(overlay()))
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(read)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_kind_of_host_is_lost_in_each_way() -> None:
    assert len(set(LOST)) == len(HOSTS) * len(LOSSES)
    assert {service for names in HOSTS.values() for service in names} <= services().keys() | overlay()[
        "services"
    ].keys()


def test_workers_reach_queue_servers_and_nothing_else() -> None:
    found = overlay()
    for region in ("region-a", "region-b"):
        assert found["networks"][region]["internal"] is True
        members = {name for name, service in found["services"].items() if region in service.get("networks", ())}
        assert members - QUEUE_SERVERS <= {*REGIONS, "worker-two"}
        assert members >= QUEUE_SERVERS
    for name in REGIONS:
        assert "networks: !override" in OVERLAY.read_text().split(f"\n  {name}:\n")[1].split("\n\n")[0]


def test_what_comes_back_has_its_address_and_the_ledger_stays_within_reach() -> None:
    found = overlay()
    assert all("ipam" in network for name, network in found["networks"].items() if name != WATCHED)
    assert found["services"]["postgres"]["networks"] == ["backend", WATCHED]


def test_the_configuration_is_the_shipped_one_with_an_engine_that_is_known(tmp_path: Path) -> None:
    changed = tmp_path / "spillway.toml"
    changed.write_text(with_our_engine((ROOT / "deploy/compose/spillway.toml").read_text()) + SECOND_POOL)
    config = load_config(changed, env={})
    assert config.nats.queue.replicas == len(QUEUE_SERVERS)
    assert {pool: settings.models for pool, settings in config.pools.items()} == {
        "demo": ("spillway-demo",),
        SECOND_MODEL: (SECOND_MODEL,),
    }
    assert {settings.engine.kind for settings in config.pools.values()} == {"scripted"}


def _call(request_id: str, *arrivals_s: float, ended_s: float) -> Call:
    reply = Exchange(0.0, "whole", 200, [(b"x-request-id", request_id.encode())], [], ended_s)
    return Call(STREAMED, [reply], Answer([Choice("x", "stop")], None, list(arrivals_s)))


def test_callers_who_waited_are_told_of_by_what_happened() -> None:
    strike = Strike("worker killed", 10.0, None, [], 0, mended_s=12.0)
    struck, later = _call("a", 1.0, 2.5, 11.5, ended_s=11.6), _call("b", 1.0, ended_s=9.0)
    failed = Call(STREAMED, [Exchange(11.0, "whole", 503, [], [], 11.5)], None, "HTTP 503")
    assert told([strike], [struck, later, failed]) == "up to 2.0 s: 2 requests, 1 failed, 0 cut, longest silence 9.0 s"


@pytest.mark.parametrize(("outcome", "offences"), [("failed", 0), ("ok", 1)])
def test_a_stream_that_was_cut_counts_as_failed(outcome: str, offences: int) -> None:
    cut = Exchange(0.0, "cut", 200, [(b"x-request-id", b"req_1")], [], 1.0)
    call = _call("req_2", 3.0, ended_s=4.0)
    call.replies.insert(0, cut)
    report = Report("hosts", 1, 1)
    judge_cut(report, [call], {"req_1": LedgerRow("req_1", outcome, 3, 1)})
    assert len(report.offences) == offences
    assert report.extras["of_these_accepted"] == 1
