"""Teams, keys and the login, by the commands that an operator has."""

import json

import httpx

from tests.acceptance.shared.test_up import wait_for_status
from tests.acceptance.system import System
from tests.waiting import HANGS_S


def client_of(system: System, token: str) -> httpx.Client:
    return httpx.Client(base_url=system.base_url, headers={"Authorization": f"Bearer {token}"}, timeout=HANGS_S)


def test_an_operator_makes_a_team_with_a_key_rotates_it_and_reads_who_did_what(system: System) -> None:
    limits = ["--tpm", "50000", "--budget", "50 USD/month"]
    team = json.loads(system.command("teams", "create", "search", *limits, "--weight", "3", "--json"))
    assert (team["tokens_per_minute"], team["budget_usd"], team["budget_period"]) == (50_000, 50.0, "month")
    asked = ["--team", "search", "--scope", "admin", "--scope", "inference", "--model", "scripted"]
    first = system.command("keys", "create", "nightly", *asked, "--expires", "90d", "--rpm", "60").splitlines()[0]
    with client_of(system, first) as http:
        assert wait_for_status(http, 200)
        [key] = http.get("/admin/v1/keys", params={"team": "search"}).json()["data"]
    assert (key["scopes"], key["models"], key["requests_per_minute"]) == (["inference", "admin"], ["scripted"], 60)
    assert 89 < (key["expires_unix_ms"] - key["created_unix_ms"]) / 86_400_000 < 91
    assert json.loads(system.command("keys", "list", "--team", "search", "--json")) == [key]

    second = system.command("keys", "rotate", "nightly", "--grace", "0").splitlines()[0]
    with client_of(system, first) as old, client_of(system, second) as new:
        assert wait_for_status(old, 401)
        assert wait_for_status(new, 200)
        system.command("keys", "update", "nightly", "--rpm", "none", "--batch-only", "--expires", "never")
        changed = new.get("/admin/v1/keys/nightly").json()
    assert (changed["requests_per_minute"], changed["priority"], changed["expires_unix_ms"]) == (
        None,
        "batch",
        None,
    )
    assert "batch only" in system.command("keys", "list")

    actions = [entry["action"] for entry in json.loads(system.command("audit", "--subject", key["id"], "--json"))]
    assert actions == ["key.update", "key.rotate", "key.create"]
    assert "requests_per_minute: 60 → none" in " ".join(system.command("audit").split())
