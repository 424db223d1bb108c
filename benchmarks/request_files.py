"""The files of Spillway that a streamed chat passes through: how much to read to follow one request.

The metric: files of the gateway's, the worker's and the ledger writer's process in which at least one function is
called while they answer one chat of 16 tokens with the scripted engine (``sys.setprofile``). It is the second chat, so
that one-time work does not count. Concurrent work, such as heartbeats, does. Fewer is better, as long as each file has
one subject.

    python -m benchmarks.request_files                          # this checkout
    python -m benchmarks.request_files --checkout ../older      # another one, with its own .venv
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx

from tests.acceptance.system import System, run_system

ANSWER_LIMIT_S: Final = 120.0
SETTLE_S: Final = 1.0  # for a request's record to reach the ledger
TOKENS: Final = 16
PARTS: Final = ("spillway gateway", "spillway worker", "spillway ledger")
CONFIG: Final = '[models.scripted]\n[pools.local]\nmodels = ["scripted"]\nengine = { kind = "scripted" }\n'
# Python imports this module automatically in each process that finds it.
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
        raise RuntimeError(f"the answer was cut off: {answer.text[-300:]}")


def measure(checkout: Path, python: Path) -> dict[str, Any]:
    """Run one system, send two requests, and return the files that the second one used."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seen, hook, config = folder / "seen", folder / "hook", folder / "spillway.toml"
        seen.mkdir()
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        config.write_text(CONFIG)
        os.environ |= {"PYTHONPATH": str(hook), "REQUEST_FILES": str(seen)}
        program = (str(python), "-m", "spillway")
        system = System(folder / "data", ["--config", str(config)], program=program, folder=checkout)
        with run_system(system):
            watch(system, seen)
        called = {Path(one) for path in seen.glob("*.json") for one in json.loads(path.read_text())}
    inside = {one.relative_to(checkout) for one in called if one.is_relative_to(checkout)}
    ours = [one for one in inside if one.parts[0] != ".venv"]
    roots = Counter(one.parts[0] for one in ours)
    return {"checkout": checkout.name, "files": len(ours), "roots": dict(roots.most_common())}


def watch(system: System, seen: Path) -> None:
    """Send two requests; for the second, the processes record the functions they call."""
    parts = [process for part in PARTS for process in system.children(part)]
    headers = {"authorization": f"Bearer {system.api_key}"}
    with httpx.Client(base_url=system.base_url, headers=headers, timeout=ANSWER_LIMIT_S) as client:
        ask(client)
        time.sleep(SETTLE_S)
        for part in parts:
            part.send_signal(signal.SIGUSR1)
        time.sleep(SETTLE_S)
        ask(client)
        time.sleep(SETTLE_S)
    for part in parts:
        part.send_signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + ANSWER_LIMIT_S
    while len(list(seen.glob("*.json"))) < len(parts):
        if time.monotonic() > deadline_s:
            raise RuntimeError("a process did not record its calls")
        time.sleep(SETTLE_S / 10)


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
