"""``spillway up`` and a worker that is not ready: what is said, and when it is given up."""

from typing import Any

import pytest

from spillway.children import ChildError, event_of
from spillway.up import worker_ready


class StartingWorker:
    """Is ready, or has ended, after the looks that it is given."""

    name = "worker-gpu-1"
    log_path = "gpu.log"

    def __init__(self, *looks: dict[str, Any] | str) -> None:
        self._looks = list(looks)
        self._event = ""
        self.starts = 0

    async def facts_if_ready(self) -> dict[str, Any] | None:
        look = self._looks.pop(0)
        if isinstance(look, dict):
            return look
        if look == "ended":
            raise ChildError("worker-gpu-1 ended while starting")
        self._event = look
        return None

    def last_event(self) -> str:
        return self._event

    async def start(self) -> None:
        self.starts += 1


async def waited(*looks: dict[str, Any] | str, early_s: float = 0.0) -> tuple[list[str], int]:
    said: list[str] = []
    worker: Any = StartingWorker(*looks)
    assert await worker_ready(worker, said.append, period_s=0.0, early_s=early_s) == {"task": "generate"}
    return said, worker.starts


async def test_what_it_waits_for_is_said_once() -> None:
    said, starts = await waited("", "not ready", "not ready", "loading", {"task": "generate"})
    assert said == [
        "worker-gpu-1: starting: not ready (log: gpu.log)",
        "worker-gpu-1: starting: loading (log: gpu.log)",
    ]
    assert starts == 0


async def test_one_that_gave_up_its_engine_is_started_again() -> None:
    said, starts = await waited("ended", {"task": "generate"})
    assert said == ["worker-gpu-1 ended while starting\n  restarting it"]
    assert starts == 1


async def test_one_that_ends_at_once_ends_the_start() -> None:
    with pytest.raises(ChildError):
        await waited("ended", early_s=3600.0)


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ('{"process": "worker", "event": "not ready", "level": "info"}', "not ready"),
        ("INFO: a server's own line", "INFO: a server's own line"),
        ("[1, 2]", "[1, 2]"),
        ('{"level": "info"}', '{"level": "info"}'),
    ],
)
def test_what_a_line_says(line: str, event: str) -> None:
    assert event_of(line) == event
