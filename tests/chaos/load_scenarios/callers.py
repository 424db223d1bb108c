"""Open-loop callers: each request at its time, whatever became of the earlier ones, and every answer looked at."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from benchmarks.http_client import Exchange, ReadTimeouts, exchange, post_request
from benchmarks.scripted_answers import ScriptedAnswers
from benchmarks.stream_answer import Answer, read
from protocol.job import decode_job
from tests.chaos.ledger import settled_rows
from tests.chaos.mix import SUBJECTS
from tests.chaos.report import Report
from tests.chaos.system import MODEL, System
from tests.chaos.watcher import JOB_SUBJECTS
from tests.waiting import HANGS_S

PATH = "/v1/chat/completions"
READY_LIMIT_S = HANGS_S
READY_POLL_S = 0.1
TIMEOUTS = ReadTimeouts(idle_s=60.0, total_s=900.0)
_TOKEN = re.compile(r" \w+|\.")  # the scripted engine's tokens are words and full stops


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and everything that came back."""

    tenant: str
    prompt: str
    tokens: int
    record: Exchange
    answer: Answer
    rest: Mapping[str, Any] = field(default_factory=dict)  # of the body

    @property
    def request_id(self) -> str | None:
        return self.record.headers.get("x-request-id")

    @property
    def was_left(self) -> bool:
        """True if the client disconnected."""
        return self.record.ending == "left"

    @property
    def ttft_s(self) -> float:
        """From due to the first token; infinite if there was none."""
        return self.answer.texts[0][0] - self.record.due_s if self.answer.texts else float("inf")


class Callers:
    """Everybody who asks, and what they were told."""

    def __init__(self, system: System, seed: int) -> None:
        self.asked: list[Asked] = []
        self.started = 0
        self._system = system
        self._answers = ScriptedAnswers()
        self._rng = random.Random(f"callers {seed}")
        self.queued: dict[str, str] = {}  # the gateway of each request that was put into the queue
        self.accounted: set[str] = set()  # further requests, whose rows the scenario itself has judged
        self.died: set[str] = set()  # with their gateway, before anybody got an answer: they need no row

    async def listen(self) -> None:
        """Learn from the queue's own subjects what is put into it, also for those that do not wait for a head."""
        await self._system.bus.subscribe(JOB_SUBJECTS, self._on_job)

    async def _on_job(self, message: Msg) -> None:
        job = decode_job(message.data)
        self.queued[job.request_id] = job.reply_subject.split(".")[1]

    async def wait_until_served(self) -> None:
        """Ask until there is an answer: the model's card may still be on its way."""
        deadline_s = time.monotonic() + READY_LIMIT_S
        while (await self.ask(tokens=1)).record.status != 200:
            assert time.monotonic() < deadline_s, f"not served within {READY_LIMIT_S:g} s: {self.asked[-1].record}"
            await asyncio.sleep(READY_POLL_S)
        self.asked = [asked for asked in self.asked if asked.record.status == 200]

    async def ask(
        self,
        *,
        tokens: int,
        tenant: str = "",
        rest: Mapping[str, Any] | None = None,
        wish: str = "",
        due_s: float | None = None,
        leave: asyncio.Event | None = None,
        on_piece: Callable[[Exchange], None] | None = None,
    ) -> Asked:
        """Ask one question and wait for the end of its answer.

        ``rest``: further fields of the body; ``wish`` goes to the scripted engine.
        """
        self.started += 1
        prompt = f"Question {self.started}: what of {self._rng.choice(SUBJECTS)}? [[tokens={tokens}]]{wish}"
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **(rest or {}),
        }
        key = self._system.tenant_keys[tenant] if tenant else self._system.api_key
        request = post_request(PATH, key, body)
        record = None if due_s is None else Exchange(due_s)
        record = await exchange(self._system.port, request, TIMEOUTS, record=record, leave=leave, on_piece=on_piece)
        asked = Asked(tenant, prompt, tokens, record, read(record), rest or {})
        self.asked.append(asked)
        return asked

    async def offer(self, rate_per_s: float, seconds: float, *, tokens: int, **how: Any) -> list[Asked]:
        """Ask so many questions a second for so long; returns when all have their ends."""
        first_s = time.monotonic()
        tasks = []
        for number in range(round(rate_per_s * seconds)):
            due_s = first_s + number / rate_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(tokens=tokens, due_s=due_s, **how)))
        return list(await asyncio.gather(*tasks))

    async def reckon(self, report: Report) -> None:
        """Judge every answer, and the ledger: what must hold in all scenarios."""
        for asked in self.asked:
            self._judge(report, asked)
        await self._judge_ledger(report)

    def _judge(self, report: Report, asked: Asked) -> None:
        report.requests += 1
        expected = self._answers.text(asked.prompt, asked.tokens)
        if asked.was_left:
            if not expected.startswith(asked.answer.text):
                report.difference.changed += 1
                report.offend("what came before the caller left is not what it should be", asked.request_id)
            return
        if asked.record.ending != "whole" or asked.record.status != 200 or not asked.answer.is_done:
            report.errors += 1
            tail = b"".join(piece for _, piece in asked.record.pieces)[-300:]
            report.offend(f"no answer: {asked.record.ending} {asked.record.status} {tail!r}", asked.request_id)
            return
        given, wanted = tokens_of(asked.answer.text), tokens_of(expected)
        if asked.answer.text != expected:
            report.difference.lost += max(0, len(wanted) - len(given))
            report.difference.repeated += max(0, len(given) - len(wanted))
            report.difference.changed += len(given) == len(wanted)
            report.offend("another answer than the undisturbed one", asked.request_id, f"{wanted}\n{given}")
            return
        report.first_token_ms.append(asked.ttft_s * 1000)
        if asked.answer.completion_tokens != asked.tokens:
            report.miscounted += 1
            report.offend(f"usage says {asked.answer.completion_tokens} of {asked.tokens} tokens", asked.request_id)

    async def _judge_ledger(self, report: Report) -> None:
        """One row per admitted request: those whose head a caller has seen, and those that were put into the queue."""
        by_id = {asked.request_id: asked for asked in self.asked if asked.request_id and asked.record.status == 200}
        admitted = (by_id.keys() | self.queued.keys() | self.accounted) - self.died
        rows = {row.request_id: row for row in await settled_rows(self._system.database, admitted)}
        admitted |= self.died & rows.keys()
        report.attempts_max = max((row.attempts for row in rows.values()), default=0)
        report.accepted, report.ledger_rows = len(admitted), len(rows)
        report.extras["left_before_queued"] = len(rows.keys() - admitted)  # rows without a token, for completeness
        for request_id in admitted - rows.keys():
            report.unrecorded += 1
            report.offend("no ledger row", request_id)
        for request_id, row in rows.items():
            asked = by_id.get(request_id)
            if asked is not None and not _is_billed_right(asked, row.completion_tokens):
                report.miscounted += 1
                report.double_billed += row.completion_tokens > asked.tokens
                report.offend(f"{row.completion_tokens} tokens billed of {asked.tokens}", request_id)
            elif request_id not in admitted and row.completion_tokens:
                report.double_billed += 1
                report.offend("a ledger row of nobody", request_id)


def _is_billed_right(asked: Asked, billed: int) -> bool:
    """Exactly the answer; of one that was left, no fewer than the caller saw and no more than there could be."""
    if asked.was_left:
        return len(tokens_of(asked.answer.text)) <= billed <= asked.tokens
    return billed == asked.tokens


def tokens_of(text: str) -> list[str]:
    """Take a scripted text apart into its tokens."""
    return _TOKEN.findall(text)


def served_tokens(asked: Iterable[Asked], from_s: float, until_s: float) -> Counter[str]:
    """Tokens that callers got within a window of time, by tenant."""
    served: Counter[str] = Counter()
    for one in asked:
        served[one.tenant] += sum(
            len(tokens_of(text)) for arrived_s, text in one.answer.texts if from_s <= arrived_s < until_s
        )
    return served


def ttfts_ms(asked: Sequence[Asked]) -> list[float]:
    """Times to first token in ms."""
    return [one.ttft_s * 1000 for one in asked]
