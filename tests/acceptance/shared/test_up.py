"""``spillway up`` as a newcomer meets it."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.acceptance.system import System, clean_environment
from tests.waiting import HANGS_S, POLL_S

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "[[tokens=5]] hello"}]}


def ask(system: System) -> httpx.Response:
    with system.http() as http:
        return http.post("/v1/chat/completions", json=ASK)


def test_usage_keys_and_the_password_survive_a_restart_and_ctrl_c_ends_every_child(tmp_path: Path) -> None:
    system = System(tmp_path / "data", ["--model", "scripted"])
    system.start()
    try:
        key = system.api_key
        assert ask(system).status_code == 200
        resolved = json.loads((system.data_dir / "run" / "config.json").read_text())
        assert resolved["gateway"]["timeouts"]["leave_s"] == 0  # there is no load balancer that would have to notice
        password = check_the_login(system)
        assert system.stop(signal.SIGINT) == 0
        kept = "".join(path.read_text(errors="replace") for path in system.data_dir.rglob("*.log"))
        assert password not in kept
        system.start()
        assert "password` sets a new one)" in re.sub(r"[\s│]+", " ", system.output)  # the box may break the line
        assert system.api_key == key
        assert ask(system).status_code == 200
        assert system.stop(signal.SIGTERM) == 0
    finally:
        system.kill_if_running()
    # After the end: every record has been written, and the reports need no running system.
    assert [row["requests"] for row in system.usage()] == [2]
    assert [row["completion_tokens"] for row in system.usage()] == [10]


def check_the_login(system: System) -> str:
    """Log in with the password that was printed, and with a new one; return the first."""
    found = re.search(r"Login +admin +(\w{20}) +\(shown only once\)", system.output)
    assert found is not None, system.output
    with httpx.Client(base_url=system.base_url, timeout=HANGS_S) as browser:
        right = {"name": "admin", "password": found[1]}
        assert browser.post("/login", data=right).status_code == 303
        assert [key["name"] for key in browser.get("/admin/v1/keys").json()["data"]] == ["default"]
        new = system.command("admin", "password").splitlines()[0]
        assert browser.get("/admin/v1/keys").status_code == 401
        assert browser.post("/login", data=right).status_code == 401
        assert browser.post("/login", data={**right, "password": new}).status_code == 303
    return found[1]


def test_a_second_ctrl_c_ends_what_still_runs(tmp_path: Path) -> None:
    patient = tmp_path / "spillway.toml"
    patient.write_text(
        "[gateway.timeouts]\nshutdown_s = 600\n[models.scripted]\n"
        '[pools.local]\nmodels = ["scripted"]\nprovider = "here"\nregion = "here"\ntier = "spot"\nusd_per_hour = 0\n'
        '[pools.local.engine]\nkind = "scripted"\nfaults_from_prompt = true\n'
    )
    system = System(tmp_path / "data", ["--config", str(patient)])
    system.start()
    try:
        stalling = {"model": "scripted", "messages": [{"role": "user", "content": "[[stall after=2]]"}], "stream": True}
        with system.http() as http, http.stream("POST", "/v1/chat/completions", json=stalling) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            system.send(signal.SIGINT)
            system.wait_for_output("stopping")
            system.send(signal.SIGINT)
            assert any('"shutting_down"' in line for line in lines)
        assert system.stop(signal.SIGINT) == 0
        if not system.usage():  # the ledger was not waited for, either: it writes what the queue holds once it starts
            system.start()
            system.wait_for_usage_of("default")
            assert system.stop() == 0
    finally:
        system.kill_if_running()
    assert [row["failed"] for row in system.usage()] == [1]


def test_a_killed_child_is_started_again(scripted: System) -> None:
    for command in (" worker ", " gateway ", " ledger "):
        children = [p for p in scripted.children("spillway") if command in " ".join(p.cmdline()) + " "]
        assert len(children) == 1, command
        children[0].kill()
        children[0].wait(timeout=HANGS_S)
    transport = httpx.HTTPTransport(retries=20)  # connection errors only: the gateway is starting
    with httpx.Client(
        transport=transport, headers={"Authorization": f"Bearer {scripted.api_key}"}, timeout=HANGS_S
    ) as http:
        assert http.post(f"{scripted.base_url}/v1/chat/completions", json=ASK).status_code == 200


def test_keys_are_made_and_revoked_while_it_runs(scripted: System) -> None:
    token = scripted.command("keys", "create", "second").splitlines()[0]
    with httpx.Client(base_url=scripted.base_url, headers={"Authorization": f"Bearer {token}"}) as http:
        assert wait_for_status(http, 200)
        assert "second" in scripted.command("keys", "list")
        scripted.command("keys", "revoke", "second")
        assert wait_for_status(http, 401)


def wait_for_status(http: httpx.Client, status: int) -> bool:
    """A change of keys reaches a gateway by a message."""
    deadline_s = time.monotonic() + HANGS_S
    while http.get("/v1/models").status_code != status:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def refused_up(*arguments: str) -> str:
    """Return the output of an ``up`` that must not run: it ends at once, with exit code 1 and no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "spillway", "up", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
        env=clean_environment(),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_two_cannot_share_a_data_folder(scripted: System) -> None:
    said = refused_up("--data", str(scripted.data_dir), "--port", "0", "--model", "scripted")
    assert "in use by another" in said


def test_a_missing_model_folder_and_an_unwritable_data_folder_are_told_at_once(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    said = refused_up("--port", "0", "--data", str(tmp_path / "data"), "--model", "/no/such/folder")
    assert "/no/such/folder: no such model folder" in said
    said = refused_up("--port", "0", "--data", str(occupied / "data"), "--model", "scripted")
    assert f"cannot write to the data folder {occupied}/data" in said


def test_a_taken_port_is_told(scripted: System, tmp_path: Path) -> None:
    said = refused_up("--data", str(tmp_path / "other"), "--port", str(scripted.port), "--model", "scripted")
    assert f"port {scripted.port}" in said
