"""A worker in a separate process, for tests of signals and sudden exits."""

import asyncio
import subprocess
import sys
from pathlib import Path

from pool_worker.settings import WorkerSettings
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[3]
WORKER_PROCESS = """
import asyncio, logging, sys
from pool_worker.main import run
from pool_worker.settings import WorkerSettings

logging.basicConfig(level=logging.INFO)
asyncio.run(run(WorkerSettings.model_validate_json(sys.argv[1]), on_ready=lambda _task: print("ready", flush=True)))
"""


def start_process(settings: WorkerSettings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER_PROCESS, settings.model_dump_json()]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait until it has ended; return its exit status and its log."""
    _, log = await asyncio.to_thread(process.communicate, timeout=HANGS_S)
    return process.returncode, log
