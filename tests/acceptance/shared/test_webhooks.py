"""Webhooks of a running Spillway, by the commands that an operator has."""

import json
import time

from tests.acceptance.system import System
from tests.waiting import HANGS_S, POLL_S


def test_the_ledger_process_delivers_and_stays_out_of_our_network(system: System) -> None:
    made = json.loads(system.command("webhooks", "create", "https://localhost/hook", "-e", "batch.failed", "--json"))
    assert system.command("webhooks", "test", made["id"]).startswith("evt_test_")
    deadline_s, error = time.monotonic() + HANGS_S, None
    while error is None and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        [delivery] = json.loads(system.command("webhooks", "deliveries", made["id"], "--json"))
        error = delivery["error"]
    assert "which is not public" in str(error)
    system.command("webhooks", "delete", made["id"])
