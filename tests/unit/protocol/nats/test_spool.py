"""Records on disk survive crashes and torn writes, belong to one process, and stay within the bound."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.nats.outbox import SEGMENT_BYTES, Record, Spool, SpoolFull

HOLDER = """
import sys
from pathlib import Path
from protocol.nats.outbox import Spool
spool = Spool(Path(sys.argv[1]))
spool.append([("theirs", b"x")])
print("ready", flush=True)
sys.stdin.read()
"""


def drained(spool: Spool) -> list[Record]:
    found: list[Record] = []
    while spool.size_bytes:
        found += spool.oldest()
        spool.drop_oldest()
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spool"))


def test_appended_records_are_returned_once_and_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    records = [(f"r{number}", bytes([number])) for number in range(6)]
    spool.append(records[:3])
    assert spool.oldest() == records[:3]  # later records go to another segment
    spool.append(records[3:])
    assert spool.oldest() == records[:3]
    assert drained(spool) == records
    assert files(tmp_path / "spool") == []


def test_segments_are_bounded(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(3):
        spool.append([(f"r{number}", bytes(SEGMENT_BYTES))])
    assert len(files(tmp_path)) == 3
    assert [record_id for record_id, _ in drained(spool)] == ["r0", "r1", "r2"]


def test_segments_of_dead_processes_are_taken_over_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        assert Spool(tmp_path).size_bytes == 0
        holder.kill()
    assert drained(Spool(tmp_path)) == [("theirs", b"x")]


@pytest.mark.parametrize("torn", [b"\0", b"\0\0\0\5\1\2\3\4ab", b"\0\0\0\1\1\2\3\4x", b"\xff" * 40])
def test_a_torn_end_loses_nothing_before_it(tmp_path: Path, torn: bytes) -> None:
    spool = Spool(tmp_path)
    spool.append([("whole", b"1")])
    spool.close()
    [path] = files(tmp_path)
    path.write_bytes(path.read_bytes() + torn)
    heir = Spool(tmp_path)
    heir.append([("later", b"2")])  # never after unreadable bytes
    assert drained(heir) == [("whole", b"1"), ("later", b"2")]


def test_it_refuses_records_beyond_its_bound(tmp_path: Path) -> None:
    spool = Spool(tmp_path, max_bytes=100)
    spool.append([("r", bytes(50))])
    with pytest.raises(SpoolFull):
        spool.append([("s", bytes(50))])
    assert drained(spool) == [("r", bytes(50))]


def test_a_partial_write_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    spool.append([("before", b"1")])

    def disk_is_full(descriptor: int, content: bytes) -> int:
        real_write(descriptor, bytes(content)[:3])
        raise OSError(28, "No space left on device")

    real_write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk_is_full)
        with pytest.raises(OSError, match="No space"):
            spool.append([("lost", b"2")])
    spool.append([("after", b"3")])
    assert drained(spool) == [("before", b"1"), ("after", b"3")]
