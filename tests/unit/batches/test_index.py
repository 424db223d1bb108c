"""The process that indexes the lines of a batch."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import msgspec

from batches.index import Index, IndexTask, build
from batches.lines import Done

PATH = "/v1/completions"
LINES = b"".join(
    json.dumps({"custom_id": str(n), "method": "POST", "url": PATH, "body": {"model": "m", "prompt": "x"}}).encode()
    + b"\n"
    for n in range(100)
)


def task_in(folder: Path) -> IndexTask:
    return IndexTask(str(folder / "one.index"), PATH, {"m": "m"}, max_lines=1000, max_line_bytes=1000)


def test_whose_gateway_dies_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "batches.index"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(msgspec.json.encode(task_in(tmp_path)) + b"\n" + LINES)
    process.stdin.close()
    assert process.wait() == 1
    assert list(tmp_path.iterdir()) == []
    assert process.stderr.read() == b""
    process.stderr.close()


def test_an_open_index_has_no_file(tmp_path: Path) -> None:
    """Whatever ends its process, nothing is left; large files of dead gateways filled the disk for a day."""
    task, source = task_in(tmp_path), tmp_path / "lines"
    source.write_bytes(LINES)
    with source.open("rb") as lines:
        assert build(task, lines).total == 100
    index = Index(Path(task.path))
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]
    assert sorted(asyncio.run(_numbers(index))) == list(range(1, 101))
    index.close()


async def _numbers(index: Index) -> list[int]:
    return [number async for number, _ in index.lines(Done())]
