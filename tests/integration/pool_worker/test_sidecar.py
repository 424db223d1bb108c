"""A worker that owns its server's process (`exec`), with a misbehaving server program."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pool_worker.settings import ServerEngineSettings, WorkerSettings
from protocol import job as m
from spillway.config import DEMO_MODEL_PATH
from tests.integration.pool_worker.playing_gateway import MODEL, Attempt, PlayingGateway
from tests.integration.pool_worker.worker_process import WorkerProcess, finish, start_process
from tests.waiting import HANGS_S, HEALTHY_S, until

PROGRAM = Path(__file__).with_name("misbehaving_server.py")
REFUSED = 13  # from the program
PROMPT = m.pack_token_ids(range(40, 50))


class Server:
    """The server program, and what it reported about itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def settings(self, nats_url: str, *options: str, drain_s: float = 30.0, **engine: Any) -> WorkerSettings:
        command = [sys.executable, "-S", str(PROGRAM), str(self.folder), "{port}", *options]
        return WorkerSettings(
            worker_id="w1",
            pool="test",
            nats_urls=(nats_url,),
            models=(MODEL,),
            drain_s=drain_s,
            engine=ServerEngineSettings(
                kind="auto",
                url="http://127.0.0.1:{port}",
                exec=shlex.join(command),
                tokenizer=str(DEMO_MODEL_PATH),
                **{"exec_stop_s": 0.3, **engine},
            ),
        )

    def events(self, kind: str) -> list[str]:
        file = self.folder / "events"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(kind).strip() for line in lines if line.startswith(kind)]

    def pids(self) -> list[int]:
        return [int(pid) for pid in self.events("started") + self.events("grandchild")]

    def is_gone(self) -> bool:
        return all(_has_ended(pid) for pid in self.pids())


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    for pid in server.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


async def ask(gateway: PlayingGateway, max_tokens: int = 8) -> Attempt:
    return await gateway.ask(prompt_ids=PROMPT, max_tokens=max_tokens, ignore_eos=True)


async def answer(gateway: PlayingGateway) -> m.Frame:
    """Return how a job ends, after one retry if it is retryable."""
    end = await gateway.end_of(await ask(gateway))
    if isinstance(end, m.Failed) and end.retryable:
        end = await gateway.end_of(await ask(gateway))
    return end


async def mistake(gateway: PlayingGateway) -> m.Frame:
    return await gateway.end_of(await ask(gateway, max_tokens=REFUSED))


async def ended(process: WorkerProcess) -> tuple[int, str]:
    try:
        return await finish(process)
    finally:
        process.kill()


async def test_a_server_that_dies_midstream_is_restarted(
    gateway: PlayingGateway, nats_url: str, server: Server
) -> None:
    process = start_process(server.settings(nats_url))
    whole = await ask(gateway)
    assert isinstance(await gateway.end_of(whole), m.Finished)
    (server.folder / "die").touch()
    cut = await ask(gateway)
    failed = await gateway.end_of(cut)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    assert 0 < len(gateway.token_ids(cut)) < 8
    assert isinstance(await answer(gateway), m.Finished)  # by the next process, which also serves jobs that waited
    assert gateway.frames[whole][0].worker_id == "w1"  # type: ignore[union-attr]
    process.send_signal(signal.SIGTERM)
    code, log = await ended(process)
    assert code == 0, log
    assert "CUDA error: out of memory" in log
    assert len(server.events("started")) == 2
    assert server.is_gone()


async def test_a_hanging_server_is_restarted(gateway: PlayingGateway, nats_url: str, server: Server) -> None:
    process = start_process(server.settings(nats_url, "--ignore-term", "--grandchild", health_limit_s=HEALTHY_S))
    running = await ask(gateway, max_tokens=400)
    await gateway.tokens_of(running, 3)
    (server.folder / "hang").touch()
    failed = await gateway.end_of(running)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    waiting = await ask(gateway)
    (server.folder / "hang").unlink()
    assert isinstance(await gateway.end_of(waiting), m.Finished)
    process.send_signal(signal.SIGTERM)
    code, log = await ended(process)
    assert code == 0, log
    assert len(server.events("started")) == 2
    assert server.is_gone()


async def test_a_frozen_server_is_killed_and_restarted(gateway: PlayingGateway, nats_url: str, server: Server) -> None:
    """A stopped process accepts connections and ignores SIGTERM."""
    process = start_process(server.settings(nats_url, health_limit_s=HEALTHY_S))
    running = await ask(gateway, max_tokens=400)
    await gateway.tokens_of(running, 3)
    os.kill(server.pids()[0], signal.SIGSTOP)
    failed = await gateway.end_of(running)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    assert isinstance(await answer(gateway), m.Finished)
    process.send_signal(signal.SIGTERM)
    code, log = await ended(process)
    assert code == 0, log
    assert re.search(r"is lost.*; restarting the server in [\d.]+ s", log)
    assert log.count("server: listening") == 2  # both processes' logs are in the worker's
    assert server.is_gone()


async def test_a_server_that_is_never_ready_is_restarted_up_to_the_limit(nats_url: str, server: Server) -> None:
    (server.folder / "hang").touch()
    process = start_process(server.settings(nats_url, ready_s=0.2, exec_restarts=1))
    code, log = await ended(process)
    assert code == 1
    assert "giving up after 2 crashes" in log[log.rindex("EngineDiedError") :]
    assert log.count("started the server: ") == 2
    assert server.is_gone()


async def test_a_server_that_hangs_during_a_drain_does_not_delay_it(
    gateway: PlayingGateway, nats_url: str, server: Server
) -> None:
    process = start_process(server.settings(nats_url, "--ignore-term", "--grandchild", drain_s=0.5))
    running = await ask(gateway, max_tokens=400)
    await gateway.tokens_of(running, 3)
    (server.folder / "hang").touch()
    process.send_signal(signal.SIGTERM)
    failed = await gateway.end_of(running)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    code, log = await ended(process)
    assert code == 0, log
    assert len(server.events("started")) == 1
    assert server.is_gone()


async def test_invalid_requests_do_not_count_as_server_failures(
    gateway: PlayingGateway, nats_url: str, server: Server
) -> None:
    """After a hundred refusals, the worker is still healthy (sglang #25811: the fleet was marked as bad)."""
    process = start_process(server.settings(nats_url))
    beside = await ask(gateway, max_tokens=200)
    await gateway.tokens_of(beside, 3)
    for _ in range(10):
        for end in await asyncio.gather(*(mistake(gateway) for _ in range(10))):
            assert isinstance(end, m.Failed)
            assert not end.retryable
            assert "an unlucky number" in end.message
    assert isinstance(await gateway.end_of(beside), m.Finished)
    last = await ask(gateway)
    assert isinstance(await gateway.end_of(last), m.Finished)
    assert gateway.frames[last][0].worker_id == "w1"  # type: ignore[union-attr]  # in its first life
    process.send_signal(signal.SIGTERM)
    code, log = await ended(process)
    assert code == 0, log
    assert len(server.events("started")) == 1


async def test_a_drain_ends_the_jobs_first_and_then_the_server(
    gateway: PlayingGateway, nats_url: str, server: Server
) -> None:
    process = start_process(server.settings(nats_url, exec_stop_s=HANGS_S))
    running = await ask(gateway, max_tokens=60)
    await gateway.tokens_of(running, 3)
    process.send_signal(signal.SIGTERM)
    assert isinstance(await gateway.end_of(running), m.Finished)
    code, log = await ended(process)
    assert code == 0, log
    assert len(server.events("ended")) == 1
    assert server.is_gone()


async def test_a_server_that_never_starts_ends_the_worker_with_its_last_log_lines(
    nats_url: str, server: Server
) -> None:
    process = start_process(server.settings(nats_url, "--die-at-start", exec_restarts=2))
    code, log = await ended(process)
    assert code == 1
    last = log[log.rindex("EngineDiedError") :]
    assert "giving up after 3 crashes" in last
    assert "exit code 3" in last
    assert "no such model: m" in last
    assert len(server.events("started")) == 3


async def test_a_killed_workers_server_and_children_are_killed(
    gateway: PlayingGateway, nats_url: str, server: Server
) -> None:
    process = start_process(server.settings(nats_url, "--ignore-term", "--grandchild"))
    assert isinstance(await answer(gateway), m.Finished)
    assert len(server.pids()) == 2
    assert not server.is_gone()
    process.send_signal(signal.SIGKILL)
    await until(server.is_gone)
    await ended(process)


async def test_stopping_while_the_server_starts_ends_both(nats_url: str, server: Server) -> None:
    (server.folder / "hang").touch()
    process = start_process(server.settings(nats_url))
    await until(lambda: server.events("started"))
    process.send_signal(signal.SIGTERM)
    code, log = await ended(process)
    assert code == 0, log
    assert server.is_gone()
