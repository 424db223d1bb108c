"""The files of Spillway that a streamed chat runs through: how much somebody reads who wants to follow one request.

The metric: files of the gateway's, the worker's and the ledger writer's process in which at least one function is
called while they answer one chat of 16 tokens by the scripted engine (``sys.setprofile``). It is the second chat: what
is loaded or made once does not count. What runs beside it, such as heartbeats, does. Fewer is better, as long as each
file has one subject.

    python -m benchmarks.request_files                          # this checkout
    python -m benchmarks.request_files --checkout ../older      # another one, with a .venv of its own
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.ports import free_port

START_LIMIT_S: Final = 120.0
SETTLE_S: Final = 1.0  # for the record of a request to reach the ledger
TOKENS: Final = 16
CONFIG: Final = """
[models.scripted]
[pools.local]
models = ["scripted"]
engine = {{ kind = "scripted" }}
[gateway]
port = {port}
"""
# Python imports this module by itself, in each process that finds it.
HOOK: Final = """
import json, os, signal, sys, threading

seen = set()

def called(frame, event, argument):
    if event == "call":
        seen.add(frame.f_code.co_filename)

def begin(*_):
    seen.clear()
    threading.setprofile(called)
    sys.setprofile(called)

def end(*_):
    sys.setprofile(None)
    threading.setprofile(None)
    path = os.path.join(os.environ["REQUEST_FILES"], f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump(sorted(seen), file)
    os.replace(path + ".part", path)

if "REQUEST_FILES" in os.environ:
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
"""


def ask(client: httpx.Client) -> None:
    """Stream one chat to its end."""
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "What is Spillway?"}],
        "max_tokens": TOKENS,
        "stream": True,
    }
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    if "[DONE]" not in answer.text:
        raise RuntimeError(f"the answer is cut: {answer.text[-300:]}")


def parts_of(launcher: psutil.Process) -> list[psutil.Process]:
    """Return the gateway's, the worker's and the ledger writer's process."""
    words = ("gateway", "worker", "ledger")
    return [child for child in launcher.children(recursive=True) if set(words) & set(child.cmdline())]


def measure(checkout: Path, python: Path) -> dict[str, Any]:
    """Run one system, and return the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        (folder / "seen").mkdir()
        port = free_port()
        (folder / "spillway.toml").write_text(CONFIG.format(port=port))
        environment = {**os.environ, "PYTHONPATH": str(folder / "hook"), "REQUEST_FILES": str(folder / "seen")}
        files = ["--config", str(folder / "spillway.toml"), "--data", str(folder / "data")]
        command = [str(python), "-m", "spillway", "up", *files]
        with (folder / "log").open("w+") as log:
            launcher = subprocess.Popen(command, cwd=checkout, env=environment, stdout=log, stderr=log)
            try:
                return {"checkout": checkout.name, **watch(psutil.Process(launcher.pid), port, folder, checkout)}
            except Exception:
                sys.stderr.write((folder / "log").read_text()[-3000:])
                raise
            finally:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(START_LIMIT_S)


def watch(launcher: psutil.Process, port: int, folder: Path, checkout: Path) -> dict[str, Any]:
    """Ask twice, the second time watched."""
    key = key_of(folder)
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=START_LIMIT_S) as client:
        until_ready(client)
        ask(client)
        time.sleep(SETTLE_S)
        parts = parts_of(launcher)
        for part in parts:
            part.send_signal(signal.SIGUSR1)
        time.sleep(SETTLE_S / 10)
        ask(client)
        time.sleep(SETTLE_S)
        for part in parts:
            part.send_signal(signal.SIGUSR2)
        deadline_s = time.monotonic() + START_LIMIT_S
        while len(list((folder / "seen").glob("*.json"))) < len(parts) and time.monotonic() < deadline_s:
            time.sleep(SETTLE_S / 10)
    ours: set[str] = set()
    for path in (folder / "seen").glob("*.json"):
        ours |= {
            str(Path(one).relative_to(checkout))
            for one in json.loads(path.read_text())
            if one.startswith(f"{checkout}/") and ".venv" not in one
        }
    roots = Counter(one.split("/")[0] for one in ours)
    return {"processes": len(parts), "files": len(ours), "roots": dict(roots.most_common())}


def key_of(folder: Path) -> str:
    """Return the API key that the launcher has made, once it is written."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        found = [word for word in (folder / "log").read_text().split() if word.strip('"').startswith("sk-")]
        if found:
            return found[0].strip("\"'")
        time.sleep(SETTLE_S / 10)
    raise RuntimeError("no API key was printed")


def until_ready(client: httpx.Client) -> None:
    """Wait until the gateway serves its model."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            if client.get("/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(SETTLE_S / 10)
    raise RuntimeError("the gateway is not ready")


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--checkout", type=Path, default=here, help="whose files are counted")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    own = checkout / ".venv" / "bin" / "python"
    print(json.dumps(measure(checkout, own if own.exists() else Path(sys.executable))))


if __name__ == "__main__":
    main()
