"""One data folder through faults, a restart at another address and an impatient end of ``spillway up``."""

import asyncio
import json
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.disturbed_load import REQUESTS, check_the_records, run_all
from tests.acceptance.system import System
from tests.waiting import HANGS_S

# At an IPv6 address; a model of vectors before the one of text; and running requests are waited for.
PATIENT = """
[gateway]
host = "::1"
[gateway.timeouts]
shutdown_s = 600
[models.vectors]
[pools.vectors]
models = ["vectors"]
engine = { kind = "scripted", task = "embed", dimensions = 4 }
[models.scripted]
[pools.local]
models = ["scripted"]
provider = "here"
region = "here"
tier = "spot"
usd_per_hour = 0
engine = { kind = "scripted", faults_from_prompt = true }
"""


def test_records_keys_and_the_password_survive_faults_and_a_restart(tmp_path: Path) -> None:
    system = System(tmp_path / "data", ["--model", "scripted"])
    system.start()
    try:
        key = system.api_key
        resolved = json.loads((system.data_dir / "run" / "config.json").read_text())
        assert resolved["gateway"]["timeouts"]["leave_s"] == 0  # there is no load balancer that would have to notice
        password = check_the_login(system)
        ask(system)
        row = system.wait_for_usage_of("default")
        assert (row["requests"], row["completion_tokens"]) == (1, 5)
        seen = asyncio.run(run_all(system))
        assert sum(seen.values()) == REQUESTS
        assert set(seen) <= {"ok", "cancelled", "failed"}, f"{seen}\n{system.logs()}"
        system.wait_for_requests(1 + REQUESTS)
        assert system.stop(signal.SIGINT) == 0  # everything that was still to be written is written now
        check_the_records(system, seen + Counter(ok=1))
        requests, failed = counted(system)  # the reports need no running system
        assert requests == 1 + REQUESTS
        kept = "".join(path.read_text(errors="replace") for path in system.data_dir.rglob("*.log"))
        assert password not in kept

        config = tmp_path / "spillway.toml"
        config.write_text(PATIENT)
        system.arguments = ["--config", str(config)]
        system.host = "[::1]"
        system.start()
        assert re.search(r"Login +admin +\(set earlier\)", system.output)
        assert f"spillway admin password --config {config} --data {system.data_dir}\n" in system.output
        assert system.api_key == key
        check_the_printed_urls(system)
        ask(system)
        check_the_printed_curl(system)
        check_that_a_second_ctrl_c_ends_what_still_runs(system)
        wanted = (requests + 3, failed + 1)
        if counted(system) != wanted:  # the ledger was not waited for, either: it writes what the queue holds
            system.start()
            system.wait_for_requests(requests + 3)
            assert system.stop() == 0
    finally:
        system.kill_if_running()
    assert counted(system) == wanted


def counted(system: System) -> tuple[int, int]:
    """Return how many requests are in the ledger, and how many of them failed."""
    usage: list[Any] = system.usage()
    return sum(row["requests"] for row in usage), sum(row["failed"] for row in usage)


def ask(system: System) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "[[tokens=5]] hello"}]}
    with system.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def check_the_login(system: System) -> str:
    """Log in with the password that was printed, and with a new one; return the first."""
    found = re.search(r"Login +admin +(\w{20}) +\(shown only once\)", system.output)
    assert found is not None, system.output
    with httpx.Client(base_url=system.base_url, timeout=HANGS_S) as browser:
        right = {"name": "admin", "password": found[1]}
        assert log_in(browser, right) == 303
        assert [key["name"] for key in browser.get("/admin/v1/keys").json()["data"]] == ["default"]
        new = system.command("admin", "password").splitlines()[0]
        assert browser.get("/admin/v1/keys").status_code == 401
        assert log_in(browser, right) == 401
        assert log_in(browser, {**right, "password": new}) == 303
    return found[1]


def log_in(browser: httpx.Client, form: dict[str, str]) -> int:
    """Return the status of the first answer that is not "try again": on a busy machine SQLite's writers wait."""
    begun_s = time.monotonic()
    while (status := browser.post("/login", data=form).status_code) == 503:
        assert time.monotonic() - begun_s < HANGS_S
    return status


def check_the_printed_urls(system: System) -> None:
    assert re.findall(r"http://\S+", system.output)[:2] == [f"{system.base_url}/v1", f"{system.base_url}/dashboard"]
    assert f"listening on {system.base_url}" in (system.data_dir / "logs" / "gateway.log").read_text()
    assert httpx.get(f"{system.base_url}/login", timeout=HANGS_S).status_code == 200


def check_the_printed_curl(system: System) -> None:
    """Check that it asks for what the first model can do."""
    printed = system.output[system.output.index("curl -N") :]
    assert "/v1/embeddings" in printed
    arguments = shlex.split(printed.strip().replace("\\\n", " "))
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=HANGS_S)
    assert len(json.loads(done.stdout)["data"]) == 2


def check_that_a_second_ctrl_c_ends_what_still_runs(system: System) -> None:
    stalling = {"model": "scripted", "messages": [{"role": "user", "content": "[[stall after=2]]"}], "stream": True}
    with system.http() as http, http.stream("POST", "/v1/chat/completions", json=stalling) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        system.send(signal.SIGINT)
        system.wait_for_output("stopping")
        system.send(signal.SIGINT)
        assert any('"shutting_down"' in line for line in lines)
    assert system.stop(signal.SIGINT) == 0
