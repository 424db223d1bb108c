"""A batch of lines over two gateways, while workers, gateways and queue server are killed again and again.

It is uploaded, created and followed as a client does it, through the load balancer. Each line is a question that has
been asked once undisturbed; every hundredth is one that no gateway accepts. A strike comes whenever another part of the
lines is done, the first one while they are validated: the faults meet the same stages however fast the machine is.

In the end every ``custom_id`` stands once in the two result files, with the undisturbed answer; the counts are those of
the files; no part and no index is left behind. Each request that a gateway accepted for it has one ledger row, but
those that died with their gateway and their worker before anybody had an answer. Rows beyond those of the answers are
of lines that ran again: only a gateway that died or lost the batch makes a line do so.
"""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import openai
from openai.types import Batch
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.http_client import Exchange
from db.tables import BatchRow, FilePartRow, RequestRow
from gateway.batches.store import OVER
from ledger.check import check_rollups
from protocol.errors import ErrorCode
from spillway.children import Child
from tests.chaos.ledger import settled_rows
from tests.chaos.load import Load
from tests.chaos.load_scenarios.plan import Stage
from tests.chaos.mix import Question, questions
from tests.chaos.oracle import Answer, BadAnswer, compare, read
from tests.chaos.report import Report
from tests.chaos.system import MODEL, Shape, System

PATH: Final = "/v1/chat/completions"
DISTINCT = 100  # different questions, at most
ASKED_TIMES = 5  # each of them, at least
TOKENS = (20, 80)
WRONG_EVERY = 100
UNDISTURBED_CALLERS = 48
AWAY_S = (0.2, 2.0)
BALANCED_LIMIT_S = 60.0
HOLDER_LIMIT_S = 60.0  # until somebody who is alive holds it: the lease of one that was killed must end first
STUCK_LIMIT_S = 180.0  # without one more line done
LAST_STRIKE = 0.95  # of the lines are done then
POLL_S = 0.2
CLIENT_RETRIES = 60  # of the official client: while everything is killed at once nobody answers it
# An answer takes five seconds: 256 are on their way, and much is lost with whoever is killed.
SHAPE = Shape(workers=4, gateways=2, postgres=True, inter_token_s=0.1)
KILLS: Mapping[str, int] = {"worker": 12, "feeder": 4, "gateway": 2, "queue": 4, "ledger": 2, "power": 2}


# --- what is asked, and how it stands ---------------------------------------------------------------------------------


@dataclass
class Lines:
    """The lines of the batch: what each asks, and what is answered undisturbed."""

    oracle: list[tuple[Question, Answer]]
    count: int

    def is_wrong(self, number: int) -> bool:
        """Whether no gateway accepts this line."""
        return number % WRONG_EVERY == WRONG_EVERY - 1

    def asked(self, number: int) -> tuple[Question, Answer]:
        """The question of a line, and its answer."""
        return self.oracle[number % len(self.oracle)]

    @property
    def content(self) -> bytes:
        """The file."""
        return b"".join(json.dumps(self._line(number)).encode() + b"\n" for number in range(self.count))

    def _line(self, number: int) -> dict[str, Any]:
        question, _ = self.asked(number)
        body = {**question.body, "temperature": 9} if self.is_wrong(number) else question.body
        return {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": body}


@dataclass
class Follower:
    """A client that asks again and again how far its batch is."""

    client: openai.AsyncOpenAI
    batch: Batch
    report: Report
    longest_pause_s: float = 0.0  # between two looks that saw more lines done
    _more: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def done(self) -> int:
        """The lines that are done, as far as it has been told."""
        counts = self.batch.request_counts
        return 0 if counts is None else counts.completed + counts.failed

    async def run(self) -> None:
        """Ask until it is over. Raises AssertionError where it is stuck."""
        moved_s = time.monotonic()
        while self.batch.status not in OVER:
            await asyncio.sleep(POLL_S)
            before, self.batch = self.done, await self.client.batches.retrieve(self.batch.id)
            now_s = time.monotonic()
            if self.done < before:
                self.report.offend(f"{before} lines were done, and then {self.done}")
            if self.done != before:
                self.longest_pause_s, moved_s = max(self.longest_pause_s, now_s - moved_s), now_s
            assert now_s < moved_s + STUCK_LIMIT_S, f"{self.done} lines are done, and no more of {self.batch}"
            async with self._more:
                self._more.notify_all()

    async def until(self, lines: float) -> bool:
        """Wait until so many lines are done; False: it is over."""
        async with self._more:
            await self._more.wait_for(lambda: self.done >= lines or self.batch.status in OVER)
        return self.batch.status not in OVER


# --- the strikes ------------------------------------------------------------------------------------------------------


@dataclass
class Striker:
    """Kills, and starts again. ``killed``: the process ids of gateways."""

    system: System
    rng: random.Random
    batch_id: str
    killed: set[int] = field(default_factory=set)
    feeders_killed: int = 0

    async def worker(self) -> None:
        """SIGKILL a worker, a busy one if there is any. The farm replaces it."""
        watcher, live = self.system.watcher, self.system.farm.live
        heard = [worker for worker_id, worker in sorted(live.items()) if watcher.has_beaten(worker_id)]
        busy = [worker for worker in heard if watcher.beat_of(worker.worker_id).running]
        if victims := busy or heard:
            self.rng.choice(victims).send(signal.SIGKILL)

    async def feeder(self) -> None:
        """SIGKILL the gateway that feeds the batch."""
        self.feeders_killed += 1
        await self._kill(await self._holder())

    async def gateway(self) -> None:
        """SIGKILL a gateway that does not feed it."""
        holder = await self._holder()
        await self._kill(self.rng.choice([gateway for gateway in self.system.gateways if gateway is not holder]))

    async def queue(self) -> None:
        """SIGKILL the only queue server: its memory streams are gone."""
        server = self.system.queue_servers[0]
        server.kill()
        await self._pause()
        await asyncio.to_thread(server.start)

    async def ledger(self) -> None:
        """SIGKILL the ledger writer."""
        await self.system.kill(self.system.ledger)
        await self._pause()
        await self.system.restart(self.system.ledger)

    async def power(self) -> None:
        """SIGKILL everything at once, the database included."""
        self.feeders_killed += 1
        self.killed |= {gateway.pid for gateway in self.system.gateways}
        await self.system.cut_power()
        await self._pause()
        await self.system.restore_power(BALANCED_LIMIT_S)

    def has_killed(self, gateway_id: str) -> bool:
        """Whether this is the id of a gateway that was killed."""
        return any(f"-{pid}-" in gateway_id for pid in self.killed)

    async def _kill(self, gateway: Child) -> None:
        self.killed.add(gateway.pid)
        await self.system.kill(gateway)
        await self._pause()
        await self.system.restart(gateway)

    async def _holder(self) -> Child:
        """Wait until the batch is held by a gateway that lives. Raises TimeoutError."""
        holder = select(BatchRow.holder).where(BatchRow.id == self.batch_id)
        async with asyncio.timeout(HOLDER_LIMIT_S):
            while True:
                with contextlib.suppress(SQLAlchemyError):
                    async with self.system.database.connect() as connection:
                        gateway_id = (await connection.execute(holder)).scalar_one() or ""
                    for gateway in self.system.gateways:
                        if f"-{gateway.pid}-" in gateway_id:
                            return gateway
                await asyncio.sleep(0.02)

    async def _pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(*AWAY_S))


def schedule(kills: Mapping[str, int], rng: random.Random) -> list[str]:
    """The strikes in their order: the first meets the gateway that validates the lines."""
    kinds = list(Counter(kills).elements())
    kinds.remove("feeder")
    rng.shuffle(kinds)
    return ["feeder", *kinds]


# --- the scenario -----------------------------------------------------------------------------------------------------


def play(kills: Mapping[str, int]) -> Callable[[Stage], Coroutine[Any, Any, None]]:
    """The scenario with so many strikes of each kind; ``plan.count`` is how many lines the batch has."""

    async def play_it(stage: Stage) -> None:
        system, plan, report = stage.system, stage.plan, stage.report
        load = Load(system.port, system.api_key, lambda: float("-inf"))
        distinct = min(DISTINCT, plan.count // ASKED_TIMES)
        lines = Lines(await _undisturbed(load, plan.seed, distinct), plan.count)
        base_url = f"http://127.0.0.1:{system.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=system.api_key, max_retries=CLIENT_RETRIES) as client:
            began_s = time.monotonic()
            file = await client.files.create(file=("lines.jsonl", lines.content), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")
            follower = Follower(client, batch, report)
            striker = Striker(system, random.Random(f"strikes {plan.seed}"), batch.id)
            await _strike_all(follower, striker, schedule(kills, striker.rng), report, plan.count)
            report.extras |= {
                "lines_per_s": round(plan.count / (time.monotonic() - began_s), 1),
                "longest_pause_s": round(follower.longest_pause_s, 1),
                "batch_status": follower.batch.status,
            }
            answered = await _judge_files(follower, lines, report)
        await _judge_rows(stage, striker, answered, {call.request_id or "" for call in load.calls})
        await _judge_remains(system, batch.id, report)

    return play_it


async def _undisturbed(load: Load, seed: int, distinct: int) -> list[tuple[Question, Answer]]:
    asked = questions(seed, 2 * distinct, MODEL, scripted=True, tokens=TOKENS, surfaces=False)
    whole = [_not_streamed(question) for question in asked if question.path == PATH][:distinct]
    calls = await load.ask_all(whole, UNDISTURBED_CALLERS)
    assert all(call.answer for call in calls), next(call.error for call in calls if call.error)
    return [(call.question, call.answer) for call in calls if call.answer]


def _not_streamed(question: Question) -> Question:
    body = {name: value for name, value in question.body.items() if name not in {"stream", "stream_options"}}
    return Question(question.number, question.path, body)


async def _strike_all(follower: Follower, striker: Striker, kinds: Sequence[str], report: Report, count: int) -> None:
    """Strike at even parts of the lines; returns when the batch is over."""
    struck: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        group.create_task(follower.run())
        for number, kind in enumerate(kinds):
            if not await follower.until(count * LAST_STRIKE * number / len(kinds)):
                report.offend(f"the batch was over before strike {number} of {len(kinds)}")
                break
            await getattr(striker, kind)()
            struck[kind] += 1
    report.faults += struck.total()
    report.extras["kills"] = dict(struck)


# --- what came of it --------------------------------------------------------------------------------------------------


async def _judge_files(follower: Follower, lines: Lines, report: Report) -> dict[str, int]:
    """Judge batch and files; returns the completion tokens of each answer by its request's id."""
    batch, client = follower.batch, follower.client
    wrong = sum(map(lines.is_wrong, range(lines.count)))
    told = None if batch.request_counts is None else batch.request_counts.model_dump()
    report.requests += lines.count
    if (batch.status, told) != (
        "completed",
        {"total": lines.count, "completed": lines.count - wrong, "failed": wrong},
    ):
        report.offend(f"the batch is {batch.status} with {told}, {batch.errors}")
    results = [await _result_lines(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
    seen = Counter(line["custom_id"] for file in results for line in file)
    wanted = {f"line-{number}" for number in range(lines.count)}
    report.errors += len(wanted - seen.keys())
    report.difference.lost += len(wanted - seen.keys())
    report.difference.repeated += seen.total() - len(seen)
    if seen != Counter(wanted):
        report.offend(f"{len(wanted - seen.keys())} lines are nowhere, {len(seen.keys() - wanted)} are nobody's")
        report.offend(f"{seen.total() - len(seen)} lines are there again: {seen.most_common(3)}")
    answered: dict[str, int] = {}
    for is_error, file in enumerate(results):
        for line in file:
            _judge_line(line, lines, report, answered, is_error=bool(is_error))
    usage = None if batch.usage is None else batch.usage.output_tokens
    if usage != sum(answered.values()):
        report.offend(f"the batch says {usage} tokens, its answers {sum(answered.values())}")
    return answered


async def _result_lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(text) for text in (await client.files.content(file_id)).content.splitlines()]


def _judge_line(
    line: dict[str, Any], lines: Lines, report: Report, answered: dict[str, int], *, is_error: bool
) -> None:
    number = int(line["custom_id"].removeprefix("line-"))
    response = line["response"] or {}
    request_id, status = str(response.get("request_id")), response.get("status_code")
    if lines.is_wrong(number) or is_error:
        if not (is_error and lines.is_wrong(number) and status == 400):
            report.errors += not lines.is_wrong(number)
            report.offend(f"{line['custom_id']} ended otherwise", request_id, str(line)[:500])
        return
    if request_id in answered:
        report.offend("one request answers two lines", request_id)
    question, expected = lines.asked(number)
    reply = Exchange(0.0, "whole", status or 0, pieces=[(0.0, json.dumps(response["body"]).encode())])
    try:
        given = read(question, reply)
    except BadAnswer as error:
        report.errors += 1
        report.offend(str(error), request_id)
        return
    if found := compare(expected, given):
        report.difference.add(found)
        report.offend(str(found), request_id, str(question))
    answered[request_id] = (given.usage or {})["completion_tokens"]


async def _judge_rows(stage: Stage, striker: Striker, answered: Mapping[str, int], before: set[str]) -> None:
    """One row with the right tokens for each answer; each row beyond those is of a line that ran again."""
    system, report = stage.system, stage.report
    await settled_rows(system.database, answered.keys() | before)
    told = (RequestRow.outcome, RequestRow.error_code, RequestRow.completion_tokens)
    columns = (RequestRow.request_id, RequestRow.gateway_id, *told)
    async with system.database.connect() as connection:
        rows = (await connection.execute(select(*columns))).all()
        epochs = (await connection.execute(select(BatchRow.epoch).where(BatchRow.id == striker.batch_id))).scalar_one()
    if len({row.request_id for row in rows}) != len(rows):  # PostgreSQL's key has the time in it
        report.offend("requests have a second row")
    own = before | {asked.request_id for asked in stage.callers.asked}
    beyond: Counter[str] = Counter()
    for row in rows:
        tokens = answered.get(row.request_id)
        # The record of an answer may die with its gateway: then it counts as cut.
        outcome = "failed" if row.error_code == ErrorCode.GATEWAY_LOST else "ok"
        if tokens is not None and (row.outcome, row.completion_tokens) != (outcome, tokens):
            report.miscounted += 1
            report.offend(f"{row.outcome} with {row.completion_tokens} of {tokens} tokens", row.request_id)
        if tokens is None and row.request_id not in own:
            beyond["of_dead_gateways" if striker.has_killed(row.gateway_id) else f"{row.outcome}_of_live_ones"] += 1
    lost = epochs - 1 - striker.feeders_killed  # times that a gateway lost the batch which was not killed
    if beyond["ok_of_live_ones"] and lost <= 0:
        report.offend(f"{beyond['ok_of_live_ones']} answers were thrown away by a gateway that lived")
    report.extras |= {"epochs": epochs, "rows_beyond": dict(beyond)}
    stage.callers.accounted |= {row.request_id for row in rows} | answered.keys() | before
    of_dead = {id_ for id_, gateway_id in stage.callers.queued.items() if striker.has_killed(gateway_id)}
    stage.callers.died |= of_dead - answered.keys()
    report.extras["died_unanswered"] = len(of_dead - {row.request_id for row in rows})
    for day in await check_rollups(system.database):
        if day.wrong:
            report.offend(f"{day.wrong} rollups are not what the rows add up to")


async def _judge_remains(system: System, batch_id: str, report: Report) -> None:
    """Nothing is left behind but what SQL knows."""
    async with system.database.connect() as connection:
        known = set((await connection.execute(select(FilePartRow.object_name))).scalars())
    files = {
        str(path.relative_to(system.folder / "files"))
        for path in (system.folder / "files").rglob("*")
        if path.is_file()
    }
    indexes = [path.name for path in (system.folder / "batches").glob(f"{batch_id}*")]
    if files != known or indexes:
        report.offend(f"left behind: {sorted(files - known)[:5]} {indexes}; missing: {sorted(known - files)[:5]}")
