"""A batch of a million lines: its memory, CPU time and disk space, from the upload to the last result.

A whole Spillway with default settings (one gateway, which feeds, an embedded nats-server, ledger writer, SQLite) and
one worker with the scripted engine, which answers each line with one token immediately, so that only the rest is
measured. A file of short chats is uploaded, validated, indexed, and then fed until all lines are done or ``--feed-s``
have passed; the remaining lines are canceled, so each of them gets a line in the error file. At the end both files are
read: every ``custom_id`` must occur once.

*MiB* is resident memory of the gateway (the indexing process separately: its highest), nats-server, ledger writer and
worker, at several times; *grown* is the maximum in the last fifth of the feeding minus the maximum in its second fifth
(the first fifth warms up; nats-server remembers the ids of two minutes' messages). *CPU ms per line* is user and system
time of each process while lines were fed, divided by the lines done. *Disk* is the size of the data folder; the open
index, which is an unlinked file, is reported at each time.

    python -m benchmarks.batch_million [--lines 1000000] [--feed-s 600]
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import uvloop

from benchmarks.cpu_meter import OWN, CpuMeter
from benchmarks.gateway_overhead import machine
from benchmarks.spillway_under_test import RunningSpillway, running
from gateway.batches.store import OVER, Status

PATH: Final = "/v1/chat/completions"
SAMPLE_S: Final = 2.0
LINE_S: Final = 600.0  # per call: uploads of hundreds of MB take long
SETTINGS: Final[dict[str, Any]] = {
    "models": {"instant": {}},
    "pools": {"instant": {"models": ["instant"], "engine": {"kind": "scripted"}}},
}
MIB: Final = 2**20


def write_lines(path: Path, count: int) -> None:
    """Write the input file."""
    with path.open("w") as file:
        for number in range(count):
            message = {"role": "user", "content": f"Line {number}: say something short."}
            body = {"model": "instant", "max_tokens": 1, "messages": [message]}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": body}
            file.write(json.dumps(line) + "\n")


def disk_mib(folder: Path) -> dict[str, float]:
    """Return the sizes in the data folder: clients' files and results, queue, SQL, and unfinished indexes."""

    def size(paths: list[Path]) -> float:
        return round(sum(path.stat().st_blocks * 512 for path in paths if path.is_file()) / MIB, 1)

    return {
        "files": size(list((folder / "files").rglob("*"))),
        "queue": size([path for path in folder.rglob("*") if "nats" in str(path.relative_to(folder))]),
        "sql": size(list(folder.glob("spillway.db*"))),
        "batches": size(list((folder / "batches").rglob("*"))),
    }


def open_mib(pid: int) -> float:
    """Return the size of the unlinked files that a process holds open: the index."""
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            status = descriptor.stat()
        except OSError:
            continue
        if status.st_nlink == 0:
            found += status.st_blocks * 512
    return round(found / MIB, 1)


@dataclass
class Gauge:
    """Memory over time."""

    pids: dict[str, int]
    samples: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)  # (time, lines done, MiB)
    done: int = 0
    indexer_mib: float = 0.0

    async def run(self) -> None:
        """Sample until canceled."""
        while True:
            self.samples.append((time.monotonic(), self.done, self.now()))
            for child in psutil.Process(self.pids["gateway"]).children():
                try:
                    self.indexer_mib = max(self.indexer_mib, child.memory_info().rss / MIB)
                except psutil.Error:
                    continue
            await asyncio.sleep(SAMPLE_S)

    def now(self) -> dict[str, float]:
        """Return the MiB of each process."""
        return {name: round(psutil.Process(pid).memory_info().rss / MIB, 1) for name, pid in self.pids.items()}

    def peaks(self, from_s: float, until_s: float) -> dict[str, float]:
        """Return each process's maximum in a time span."""
        within = [mib for at_s, _, mib in self.samples if from_s <= at_s <= until_s] or [self.now()]
        return {name: max(mib[name] for mib in within) for name in self.pids}


class Client:
    """The calls of a client."""

    def __init__(self, system: RunningSpillway) -> None:
        headers = {"authorization": f"Bearer {system.api_key}"}
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{system.port}", headers=headers, timeout=httpx.Timeout(LINE_S)
        )

    async def upload(self, path: Path) -> str:
        """Upload a file, streamed from disk."""
        with path.open("rb") as file:  # httpx reads it in pieces
            form = {"file": ("lines.jsonl", file)}
            answer = await self._http.post("/v1/files", files=form, data={"purpose": "batch"})
        return str(self._body(answer)["id"])

    async def create(self, file_id: str) -> str:
        """Create the batch."""
        body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
        return str(self._body(await self._http.post("/v1/batches", json=body))["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """Retrieve it."""
        return self._body(await self._http.get(f"/v1/batches/{batch_id}"))

    async def cancel(self, batch_id: str) -> None:
        """Cancel it."""
        self._body(await self._http.post(f"/v1/batches/{batch_id}/cancel"))

    async def lines(self, file_id: str | None) -> AsyncIterator[str]:
        """Read a file line by line."""
        if file_id is None:
            return
        async with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
            async for line in answer.aiter_lines():
                yield line

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    def _body(self, answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body


async def measure(folder: Path, count: int, feed_s: float) -> dict[str, Any]:
    """Run everything, one step after the other."""
    source, data = folder / "lines.jsonl", folder / "data"
    data.mkdir()
    await asyncio.to_thread(write_lines, source, count)
    async with running(data, SETTINGS, {"worker": "instant"}) as system:
        client, gauge, meter = Client(system), Gauge(system.pids), CpuMeter(system.pids)
        sampling = asyncio.create_task(gauge.run())
        report: dict[str, Any] = {"lines": count, "input_mib": round(source.stat().st_size / MIB, 1)}
        moments = {"started": gauge.now()}

        def moment(name: str) -> None:
            moments[name] = {**gauge.now(), "index_on_disk": open_mib(system.pids["gateway"])}
            print(name, gauge.done, moments[name], file=sys.stderr, flush=True)

        began_s = time.monotonic()
        with meter.window() as uploading:
            file_id = await client.upload(source)
        source.unlink()
        report["upload"] = {"seconds": round(time.monotonic() - began_s, 1), **_cpu_s(uploading.cpu_s)}
        moment("uploaded")
        began_s = time.monotonic()
        with meter.window() as indexing:
            batch_id = await client.create(file_id)
            while (await client.batch(batch_id))["status"] == Status.VALIDATING:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.2)
        report["index"] = {"seconds": round(time.monotonic() - began_s, 1), "indexer_mib": round(gauge.indexer_mib, 1)}
        report["index"] |= _cpu_s(indexing.cpu_s)
        moment("indexed")
        began_s = time.monotonic()
        with meter.window() as feeding:
            await _feed(client, batch_id, gauge, until_s=began_s + feed_s, moment=moment, count=count)
        fed_s, fed = time.monotonic() - began_s, gauge.done
        report["feed"] = {
            "lines": fed,
            "seconds": round(fed_s, 1),
            "lines_per_s": round(fed / fed_s, 1),
            "cpu_ms_per_line": {n: round(1000 * s / fed, 2) for n, s in feeding.cpu_s.items() if n != OWN},
            "others_cores": round(feeding.others_cores, 2),
            "grown_mib": _grown(gauge, began_s, fed_s),
            "disk_mib": disk_mib(data),
        }
        moment("fed")
        began_s = time.monotonic()
        batch = await client.batch(batch_id)
        if batch["status"] not in OVER:
            await client.cancel(batch_id)
            while (batch := await client.batch(batch_id))["status"] not in OVER:  # noqa: ASYNC110  # likewise
                await asyncio.sleep(0.2)
            report["give_up"] = {"lines": count - fed, "seconds": round(time.monotonic() - began_s, 1)}
            report["give_up"]["mib"] = gauge.peaks(began_s, time.monotonic())["gateway"]
            moment("given up")
        began_s = time.monotonic()
        report["end"] = {"status": batch["status"], **batch["request_counts"], **await _check(client, batch, count)}
        report["end"]["read_s"] = round(time.monotonic() - began_s, 1)
        moment("read")
        report["end"]["disk_mib"] = disk_mib(data)
        sampling.cancel()
        await client.close()
        return {**report, "mib": moments}


async def _feed(
    client: Client, batch_id: str, gauge: Gauge, *, until_s: float, moment: Callable[[str], None], count: int
) -> None:
    """Wait until all lines are done or the time is over; report at ten points."""
    first_s, reported = time.monotonic(), 1
    while time.monotonic() < until_s:
        batch = await client.batch(batch_id)
        gauge.done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
        if batch["status"] in OVER:
            return
        passed = max(gauge.done / count, (time.monotonic() - first_s) / (until_s - first_s))
        if passed >= reported / 10:
            moment(f"{reported * 10} %")
            reported += 1
        await asyncio.sleep(1.0)


def _cpu_s(used: dict[str, float]) -> dict[str, Any]:
    return {"cpu_s": {name: round(seconds, 1) for name, seconds in used.items() if name != OWN}}


def _grown(gauge: Gauge, began_s: float, fed_s: float) -> dict[str, float]:
    early = gauge.peaks(began_s + 0.2 * fed_s, began_s + 0.4 * fed_s)
    late = gauge.peaks(began_s + 0.8 * fed_s, began_s + fed_s)
    return {name: round(late[name] - early[name], 1) for name in early}


async def _check(client: Client, batch: dict[str, Any], count: int) -> dict[str, int]:
    """Read both files; return the number of lines, and of missing and repeated ones."""
    seen = bytearray(count)
    lines = 0
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        async for line in client.lines(file_id):
            lines += 1
            number = int(json.loads(line)["custom_id"].removeprefix("line-"))
            seen[number] = min(2, seen[number] + 1)
    return {"lines": lines, "missing": seen.count(0), "repeated": seen.count(2)}


async def main(arguments: argparse.Namespace) -> None:
    report: dict[str, Any] = {"benchmark": "batch_million", **machine()}
    with tempfile.TemporaryDirectory(prefix="spillway-million-") as folder:
        report |= await measure(Path(folder), arguments.lines, arguments.feed_s)
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--feed-s", type=float, default=600.0)
    arguments = parser.parse_args()
    # asyncio shuts down cleanly on SIGINT, even where a shell ignores it for this process; SIGTERM must do the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    uvloop.run(main(arguments))
