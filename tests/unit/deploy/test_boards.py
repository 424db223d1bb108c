"""Grafana's boards and Prometheus' rules ask for series that a gateway has, and boards fit Grafana's grid."""

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.dispatch.lifecycle import OpenRequest
from protocol.job import Paused
from tests.unit.deploy.description import ROOT, observability, promtool
from tests.unit.gateway.dispatch.opened_requests import accepted, failed, open_request
from tests.unit.gateway.telemetry.test_exposition import answered_series, beat, scrape, snapshot
from tests.waiting import HANGS_S

pytestmark = pytest.mark.slow

BOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
GRID_WIDTH = 24
OF_PROMETHEUS = {"up", "ALERTS"}
OF_A_SCRAPE = {"instance", "job", "le"}
# What is called like a series of a gateway, or of our own recording.
SERIES = re.compile(r"\b((?:vllm:|spillway_|spillway:|process_|python_)\w+(?::\w+)*|up|ALERTS)\b(?:\{([^}]*)\})?")


def rules() -> list[dict[str, Any]]:
    groups = itertools.chain.from_iterable(yaml.safe_load(path.read_text())["groups"] for path in RULES)
    return [rule for group in groups for rule in group["rules"]]


def panels(board: Path) -> list[dict[str, Any]]:
    return list(json.loads(board.read_text())["panels"])


def board_expressions(board: Path) -> list[str]:
    variables = json.loads(board.read_text())["templating"]["list"]
    asked = [target["expr"] for panel in panels(board) for target in panel.get("targets", [])]
    return [*asked, *(variable["definition"] for variable in variables if variable["type"] == "query")]


async def exposed() -> dict[str, set[str]]:
    """Each series that a gateway shows, and its labels."""
    found: dict[str, set[str]] = {}
    series = answered_series()
    series.refused("chat.completions", 503, "no_workers")
    series.failed_over(rescued_request())
    for name, labels in (await scrape(snapshot(series, beat(), beat("w2", paused=Paused("401"))))).samples:
        found.setdefault(name, set()).update(label for label, _ in labels)
    return found


def rescued_request() -> OpenRequest:
    request, _ = open_request()
    request.on_frame("w", accepted(), 2.0)
    request.on_frame("w", failed(1), 3.0)
    return request


def unknown(expression: str, series: dict[str, set[str]]) -> list[str]:
    """Return the series of an expression that nothing exposes."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    wrong = []
    for name, matchers in SERIES.findall(expression):
        if name in recorded | OF_PROMETHEUS:
            continue
        if name not in series:
            wrong.append(name)
        else:
            asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            wrong += [f"{name}{{{label}}}" for label in sorted(asked - series[name] - OF_A_SCRAPE)]
    return wrong


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
async def test_every_series_of_a_board_exists(board: Path) -> None:
    expressions = board_expressions(board)
    assert len(expressions) > 10
    series = await exposed()
    assert {expression: wrong for expression in expressions if (wrong := unknown(expression, series))} == {}
    assert all(SERIES.search(expression) for expression in expressions)


async def test_every_series_of_a_rule_exists() -> None:
    series = await exposed()
    assert {rule["expr"]: wrong for rule in rules() if (wrong := unknown(rule["expr"], series))} == {}
    assert all(SERIES.search(rule["expr"]) for rule in rules())


async def test_the_check_finds_what_is_wrong() -> None:
    series = await exposed()
    wrong_name = 'sum(rate(vllm:no_such_total{model_name="m"}[5m])) / spillway_bus_connected'
    assert unknown(wrong_name, series) == ["vllm:no_such_total"]
    assert unknown('spillway_queued_jobs{lane="h0", tenant=~"a.*"}', series) == ["spillway_queued_jobs{tenant}"]
    assert unknown("spillway:not_recorded", series) == ["spillway:not_recorded"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_a_board_fits_the_grid(board: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels(board):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= GRID_WIDTH, panel["title"]
        cells = itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
        for cell in cells:
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_a_board_can_be_told_apart_and_read(board: Path) -> None:
    ids = [panel["id"] for panel in panels(board)]
    assert len(ids) == len(set(ids))
    for panel in panels(board):
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(letters) == len(set(letters))
    uids = [json.loads(path.read_text())["uid"] for path in BOARDS]
    assert len(uids) == len(set(uids))


def test_provisioning_names_the_data_source_and_the_folder_that_compose_mounts() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((folder / "dashboards/spillway.yml").read_text())["providers"]
    mounts = {mount.split(":")[1] for mount in observability()["grafana"]["volumes"]}
    assert {provider["options"]["path"], "/etc/grafana/provisioning"} <= mounts
    assert "prometheus" in observability()


@pytest.mark.servers
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml"),
        ("check", "rules", *(str(path) for path in RULES)),
        ("test", "rules", "deploy/prometheus/tests/alerts.yml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [promtool(), *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    tested = yaml.safe_load((ROOT / "deploy/prometheus/tests/alerts.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tested for one in test.get("alert_rule_test", []) if one.get("exp_alerts")}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert fired == {rule["alert"] for rule in alerts}
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description"}
