"""LiteLLM's own batch runner, for servers without a batch API, in a process that the benchmark can kill.

The proxy runs such batches only with PostgreSQL behind Prisma ("LiteLLM-executed batches need a database: set
DATABASE_URL"), whose engines are binaries from Prisma's own site that its package does not include. So the runner
itself (``litellm.proxy.batches_endpoints.litellm_executed_batches``) runs here, unchanged, with LiteLLM's router, and
its tables are replaced by files below ``--store``. The proxy's check on each retrieval of a batch runs once a second: a
batch whose runner has been silent for 180 s fails as ``runner_lost``, "resubmit the batch". Its client then does that.
The process ends with the batch; ``batch.json`` has the result.

Runs in LiteLLM's environment (``litellm.py``) and imports nothing of Spillway:

    python -m benchmarks.peers.litellm_batch --store FOLDER --ports 9100,9101
"""

import argparse
import asyncio
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from litellm import Router
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.batches_endpoints import litellm_executed_batches as executed
from litellm.types.utils import LiteLLMBatch

MODEL = "scripted"
PATH = "/v1/chat/completions"
POLL_S = 1.0


class Store:
    """The tables of managed objects and files, for one batch at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._row = folder / "batch.json"

    def row(self) -> dict[str, Any] | None:
        """Return the batch's row."""
        return json.loads(self._row.read_text()) if self._row.exists() else None

    def write(self, batch: LiteLLMBatch) -> None:
        """Write the row with its update time."""
        unfinished = self._row.with_suffix(".part")
        now = datetime.now(UTC).isoformat()
        unfinished.write_text(json.dumps({"batch": batch.model_dump(mode="json"), "updated_at": now}))
        unfinished.replace(self._row)

    def forget(self) -> None:
        """Move the row aside: its client submits the batch again."""
        number = next(n for n in itertools.count(1) if not (self._folder / f"lost-{n}.json").exists())
        self._row.rename(self._folder / f"lost-{number}.json")

    # --- interface of LiteLLM's tables --------------------------------------------------------------------------------

    def get_unified_batch_id(self, batch_id: str, model_id: str) -> str:
        """Return an id."""
        return f"{batch_id}-{model_id}"

    async def get_unified_file_id(self, file_id: str, **_: object) -> SimpleNamespace:
        """Return the path of the lines."""
        return SimpleNamespace(storage_backend="files", storage_url=file_id)

    async def store_unified_object_id(self, *, file_object: LiteLLMBatch, **_: object) -> None:
        """Create the row."""
        self.write(file_object)

    async def load_batch(self, _batch_id: str) -> LiteLLMBatch | None:
        """Load the batch."""
        row = self.row()
        return None if row is None else LiteLLMBatch.model_validate(row["batch"])

    async def load_status(self, batch_id: str) -> str | None:
        """Load the batch's status."""
        batch = await self.load_batch(batch_id)
        return None if batch is None else batch.status

    async def compare_and_set(self, batch: LiteLLMBatch, unchanged: dict[str, Any], _updated_by: object) -> bool:
        """Replace the row if it is as expected."""
        row = self.row()
        if row is None or row["batch"]["status"] != unchanged["status"]:
            return False
        if "updated_at" in unchanged and datetime.fromisoformat(row["updated_at"]) >= unchanged["updated_at"]["lt"]:
            return False
        self.write(batch)
        return True

    async def touch(self, batch_id: str, _updated_by: object) -> None:
        """Record that the runner is alive."""
        batch = await self.load_batch(batch_id)
        if batch is not None:
            self.write(batch)

    async def download_file(self, name: str) -> bytes:
        """Read the lines."""
        return (self._folder / name).read_bytes()

    async def upload(self, *, file_data: dict[str, Any], **_: object) -> SimpleNamespace:
        """Write a result file."""
        kind = "output" if "output" in file_data["filename"] else "error"
        (self._folder / f"{kind}.jsonl").write_bytes(file_data["content"])
        return SimpleNamespace(id=f"{kind}.jsonl")


def make_runner(store: Store, ports: list[int]) -> executed.LiteLLMExecutedBatchRunner:
    """Make the runner with a router configured as in ``litellm.FAILOVER_CONFIG``."""
    deployments = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"hosted_vllm/{MODEL}",
                "api_base": f"http://127.0.0.1:{port}/v1",
                "api_key": "none",
            },
        }
        for port in ports
    ]
    return executed.LiteLLMExecutedBatchRunner(
        llm_router=Router(model_list=deployments, num_retries=3, timeout=600),
        prisma_client=None,
        managed_files=store,
        batches=store,
        proxy_logging_obj=None,
        general_settings={},
        storage_backend_factory=lambda *_, **__: store,
        upload_result_file=store.upload,
    )


async def main(folder: Path, ports: list[int]) -> None:
    """Act as proxy and client until the batch has ended."""
    store, user = Store(folder), UserAPIKeyAuth()
    runner = make_runner(store, ports)
    while True:
        row = store.row()
        if row is None:
            request = {"endpoint": PATH, "input_file_id": "lines.jsonl", "completion_window": "24h"}
            await runner.create(request, "lines.jsonl", MODEL, "hosted_vllm", user, None)
            continue
        batch = LiteLLMBatch.model_validate(row["batch"])
        if executed.executed_batch_runner_lost(batch.status, datetime.fromisoformat(row["updated_at"])):
            batch = await runner.fail_abandoned(batch, user)
        if batch.status == "failed" and batch.errors and batch.errors.data[0].code == "runner_lost":
            store.forget()
        elif batch.status in executed.TERMINAL_BATCH_STATUSES:
            return
        await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--ports", required=True)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.store, [int(port) for port in arguments.ports.split(",")]))
