"""A batch of lines that fills every pool, beside interactive requests: as ``shares.batch``, but fed by the gateway."""

import asyncio
import json
import time
from typing import Final

import openai
from openai.types import Batch

from gateway.batches.store import OVER
from tests.chaos.load_scenarios.callers import ttfts_ms
from tests.chaos.load_scenarios.plan import Ceiling, Stage, expect
from tests.chaos.load_scenarios.shares import ALONE_S, BEFORE_PER_S, BUSY, FEW_TOKENS, MIN_FLOOD, QUIET, TOKENS
from tests.chaos.report import percentile
from tests.chaos.system import MODEL

PATH: Final = "/v1/chat/completions"
SPARE = 2.0  # times the lines that the pools could answer meanwhile
BEGUN_LIMIT_S = 60.0
POLL_S = 0.1


async def batch_beside(stage: Stage) -> None:
    """Interactive requests alone, then beside a batch that is cancelled in the end."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    ceiling = Ceiling(system.shape, TOKENS)
    idle = await callers.offer(BEFORE_PER_S, min(ALONE_S, plan.seconds), tokens=FEW_TOKENS, tenant=QUIET)
    report.extras["ttft_ms_p95_idle"] = idle_ms = percentile(ttfts_ms(idle), 95) or 0.0
    base_url = f"http://127.0.0.1:{system.port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=system.tenant_keys[BUSY]) as client:
        count = round(SPARE * ceiling.requests_per_s * (plan.seconds + BEGUN_LIMIT_S))
        batch = await _begun(client, b"".join(_line(number) for number in range(count)))
        await asyncio.sleep(ceiling.service_s)
        first_s, first = time.monotonic(), _done(await client.batches.retrieve(batch.id))
        interactive = await callers.offer(BEFORE_PER_S, plan.seconds, tokens=FEW_TOKENS, tenant=QUIET)
        done, passed_s = _done(await client.batches.retrieve(batch.id)) - first, time.monotonic() - first_s
        await client.batches.cancel(batch.id)
        while (batch := await client.batches.retrieve(batch.id)).status not in OVER:
            await asyncio.sleep(POLL_S)
    rate = done * TOKENS / passed_s
    report.extras |= {"flood_tokens_per_s": round(rate, 1), "capacity_tokens_per_s": ceiling.tokens_per_s}
    expect(report, "capacity_over_flood", ceiling.tokens_per_s / max(rate, 1.0), at_most=plan.slack / MIN_FLOOD)
    bound_ms = plan.slack * (1.5 * idle_ms + system.shape.inter_token_s * 1000)
    expect(report, "interactive_ttft_ms_p95", percentile(ttfts_ms(interactive), 95), at_most=bound_ms)
    counts = batch.request_counts
    if batch.status != "cancelled" or counts is None or counts.completed + counts.failed != count:
        report.offend(f"the batch of {count} lines is {batch.status} with {counts}")


def _line(number: int) -> bytes:
    message = {"role": "user", "content": f"Line {number}: what is there to say? [[tokens={TOKENS}]]"}
    body = {"model": MODEL, "max_tokens": TOKENS, "messages": [message]}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body}).encode() + b"\n"


async def _begun(client: openai.AsyncOpenAI, lines: bytes) -> Batch:
    """Create a batch, and wait until its first lines are done. Raises TimeoutError."""
    file = await client.files.create(file=("lines.jsonl", lines), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
    async with asyncio.timeout(BEGUN_LIMIT_S):
        while not _done(batch):
            await asyncio.sleep(POLL_S)
            batch = await client.batches.retrieve(batch.id)
    return batch


def _done(batch: Batch) -> int:
    return 0 if batch.request_counts is None else batch.request_counts.completed
