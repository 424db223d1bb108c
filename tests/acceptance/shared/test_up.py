"""``spillway up`` as a newcomer meets it."""

import json
import stat
import subprocess
import time
from pathlib import Path

import httpx
from typer.testing import CliRunner

from spillway.cli import app
from tests.acceptance.system import System, clean_environment
from tests.waiting import HANGS_S, POLL_S

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "[[tokens=5]] hello"}]}


def test_a_killed_child_is_started_again(system: System) -> None:
    for command in (" worker --pool scripted ", " gateway ", " ledger "):
        children = system.children(command)
        assert len(children) == 1, command
        children[0].kill()
        children[0].wait(timeout=HANGS_S)
    transport = httpx.HTTPTransport(retries=20)  # connection errors only: the gateway is starting
    with httpx.Client(
        transport=transport, headers={"Authorization": f"Bearer {system.api_key}"}, timeout=HANGS_S
    ) as http:
        assert http.post(f"{system.base_url}/v1/chat/completions", json=ASK).status_code == 200


def test_keys_are_made_and_revoked_while_it_runs(system: System) -> None:
    token = system.command("keys", "create", "second").splitlines()[0]
    with httpx.Client(base_url=system.base_url, headers={"Authorization": f"Bearer {token}"}) as http:
        assert wait_for_status(http, 200)
        assert "second" in system.command("keys", "list")
        system.command("keys", "revoke", "second")
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
    """Return what an ``up`` that must not run says: it ends at once, with exit code 1 and no traceback."""
    done = CliRunner().invoke(app, ["up", *arguments])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.output
    return done.stderr


def test_other_users_of_the_machine_can_open_nothing(system: System) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": ASK}
    with system.http() as http:
        uploaded = http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("batch.jsonl", json.dumps(line).encode())}
        )
        assert uploaded.status_code == 200, uploaded.text
    paths = [system.data_dir, *system.data_dir.rglob("*")]
    names = {str(path.relative_to(system.data_dir)) for path in paths}
    assert names >= {"spillway.db", "queue-password", "logs/gateway.log", "logs/nats.log", "run/config.json"}
    assert any(name.startswith("files/") for name in names)
    assert {path: oct(mode) for path in paths if (mode := mode_of(path)) & 0o077} == {}


def mode_of(path: Path) -> int:
    try:
        return stat.S_IMODE(path.lstat().st_mode)
    except FileNotFoundError:  # the system runs: it was a draft
        return 0


def test_a_worker_by_hand_joins_with_the_configuration_of_the_running_up(system: System, tmp_path: Path) -> None:
    """The command of docs/deploy/one-box.md; it is ready once the queue server has let it in."""
    ready, config = tmp_path / "ready", system.data_dir / "run" / "config.json"
    command = [*system.program, "worker", "--pool", "scripted", "--config", str(config), "--ready-file", str(ready)]
    with (tmp_path / "log").open("w") as log:
        worker = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=clean_environment(), cwd=system.folder
        )
    try:
        deadline_s = time.monotonic() + HANGS_S
        while not ready.exists():
            assert worker.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(POLL_S)
        worker.terminate()
        assert worker.wait(timeout=HANGS_S) == 0
    finally:
        worker.kill()
        worker.wait()


def test_two_cannot_share_a_data_folder(system: System) -> None:
    said = refused_up("--port", "0", "--data", str(system.data_dir), "--model", "scripted")
    assert "in use by another" in said


def test_a_missing_model_folder_and_an_unwritable_data_folder_are_told_at_once(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    said = refused_up("--port", "0", "--data", str(tmp_path / "data"), "--model", "/no/such/folder")
    assert "/no/such/folder: no such folder" in said
    said = refused_up("--port", "0", "--data", str(occupied / "data"), "--model", "scripted")
    assert f"cannot write to the data folder {occupied}/data" in said


def test_a_taken_port_is_told(system: System, tmp_path: Path) -> None:
    said = refused_up("--data", str(tmp_path / "other"), "--port", str(system.port), "--model", "scripted")
    assert f"port {system.port}" in said
