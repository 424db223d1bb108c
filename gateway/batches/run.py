"""Runs a batch from its input file to its results, on the gateway that holds its lease."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from db.set_aside import SetAside
from gateway.batches.asking import Answer, Asking, Verdict, verdict_of, wait_s
from gateway.batches.files import FileGone, Files
from gateway.batches.index import Index, make_index
from gateway.batches.indexer import IndexReport, IndexTask
from gateway.batches.lines import (
    CANCELLED,
    EXPIRED,
    REVOKED,
    Line,
    LineError,
    LineFailure,
    decode_line,
    decode_model,
    failure_line,
    response_line,
)
from gateway.batches.results import Results
from gateway.batches.room import OpenLines, Window
from gateway.batches.series import BatchSeries
from gateway.batches.store import ANTHROPIC, Batch, Batches, Counts, Status
from gateway.settings import BatchSettings
from protocol.nats.clock import unix_now_ms
from protocol.process import backoff_s, wait_for
from protocol.subjects import queue_of

log = logging.getLogger(__name__)


# --- run --------------------------------------------------------------------------------------------------------------

LONGEST_BACKOFF_S: Final = 30.0  # maximum wait between attempts of a failing line


class Stop(Enum):
    """Why a batch stops opening lines."""

    CANCELLED = "canceled by the client"
    EXPIRED = "its completion window has expired"
    REVOKED = "its API key is no longer accepted"
    LOST = "taken over by another gateway"
    LEAVING = "this gateway is shutting down"


_FAILURES: Final = {
    Stop.CANCELLED: LineFailure(CANCELLED, "The batch was canceled before this request was answered."),
    Stop.EXPIRED: LineFailure(EXPIRED, "This request could not be answered before the completion window expired."),
    Stop.REVOKED: LineFailure(REVOKED, "The API key of the batch is no longer accepted."),
}
SET_ASIDE: Final = "set_aside"  # error codes of batches
FILE_GONE: Final = "input_file_deleted"
_ENDS: Final = {Stop.CANCELLED: Status.CANCELLED, Stop.EXPIRED: Status.EXPIRED, Stop.REVOKED: Status.FAILED}


class FeederDeps(Struct, frozen=True):
    """Dependencies of feeding batches."""

    settings: BatchSettings
    keys: KeyRing
    files: Files
    batches: Batches
    asking: Asking
    models: Mapping[str, str]  # the configured model of each name and alias
    room: OpenLines
    series: BatchSeries
    set_aside: SetAside
    folder: Path  # for indexes


class BatchRun:
    """Feeds a batch. Raises Lost if another gateway has taken it over, and errors of SQL and the storage."""

    def __init__(self, deps: FeederDeps, batch: Batch) -> None:
        """``batch``: as read when it was taken."""
        self.batch = batch
        self._deps = deps
        self._window = Window()
        self._stop: Stop | None = None
        self._gone = asyncio.Event()  # set to end open lines
        self._wake = asyncio.Event()  # wakes waiters to check ``_stop``
        self._not_before_s = 0.0  # earliest time to open a line (monotonic clock)
        self._open: set[asyncio.Task[None]] = set()
        self.left_lines = 0  # incomplete lines, including open ones

    def stop(self, why: Stop) -> None:
        """Open no more lines, and cancel open ones unless the gateway is shutting down."""
        self._stop = self._stop or why
        self._wake.set()
        if why is not Stop.LEAVING:
            self._gone.set()

    @property
    def open_lines(self) -> int:
        """Number of open lines."""
        return len(self._open)

    def _committed(self, counts: Counts) -> None:
        self.left_lines -= counts.completed + counts.failed
        self._deps.series.committed(counts)

    @property
    def _principal(self) -> Principal | None:
        principal = self._deps.keys.holder_of(self.batch.key_id)
        return None if principal is None or principal.has_expired(unix_now_ms()) else principal

    async def run(self) -> bool:
        """Feed the batch to its end; False: it has not ended, and another gateway continues it."""
        principal = self._principal
        if principal is None:
            if self._deps.keys.may_be_old:
                return False
            self.stop(Stop.REVOKED)
        try:
            report = await self._index(principal)
        except FileGone:
            await self._end(self._status_set_aside, [LineError(FILE_GONE, "The input file has been deleted.")])
            return True
        if report is None:  # the batch is stopped
            if self._stop is Stop.CANCELLED:
                await self._end(Status.CANCELLED)
            return self._stop is Stop.CANCELLED
        if report.errors:
            await self._end(Status.FAILED, report.errors)
            return True
        with contextlib.closing(Index(self._index_path)) as index, self._deps.room.batch():
            await self._deps.batches.start(self.batch, report.total, report.models)
            return await self._run(index, report.total)

    async def set_aside(self, tries: int, reason: str) -> None:
        """End the batch as failed after repeated failures. Committed results are kept."""
        message = (
            f"The batch failed {tries} times for the same reason and was given up: {reason}. Completed lines are kept."
        )
        await self._end(self._status_set_aside, [LineError(SET_ASIDE, message)])
        self._deps.set_aside.note("batch", self.batch.id, self.batch.tenant, reason)

    @property
    def _status_set_aside(self) -> Status:
        return Status.FAILED if self._stop is None else _ENDS.get(self._stop, Status.FAILED)

    @property
    def is_leaving(self) -> bool:
        """True if it stops here and another gateway continues it."""
        return self._stop in {Stop.LEAVING, Stop.LOST}

    @property
    def is_ending(self) -> bool:
        """True if no more lines are to be answered, and only its end is missing."""
        return self._stop in _ENDS

    @property
    def _index_path(self) -> Path:
        return self._deps.folder / f"{self.batch.id}.{self.batch.epoch}.index"

    async def _index(self, principal: Principal | None) -> IndexReport | None:
        """Index the lines; None: the batch is stopped. ``principal``: None: no line will run."""
        settings, models = self._deps.settings, self._deps.models
        await asyncio.to_thread(self._make_room)
        any_model = principal is None or self.batch.surface == ANTHROPIC
        task = IndexTask(
            str(self._index_path),
            self.batch.endpoint,
            {
                name: model
                for name, model in models.items()
                if principal is None or any_model or principal.may_use(model)
            },
            settings.max_lines,
            settings.max_line_bytes,
            any_model,
        )
        if self.is_leaving:
            return None
        indexing = asyncio.create_task(make_index(task, self._deps.files.content(self.batch.input_file_id)))
        stopping = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({indexing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop is Stop.CANCELLED and self.batch.in_progress_unix_ms is None:
                await asyncio.wait({indexing}, timeout=self._deps.settings.grace_s)
                return await indexing if indexing.done() else None
            return None if self.is_leaving else await indexing
        finally:
            stopping.cancel()
            indexing.cancel()
            await asyncio.gather(stopping, indexing, return_exceptions=True)

    def _make_room(self) -> None:
        """Delete indexes of earlier epochs, left by gateways that died before opening them."""
        self._deps.folder.mkdir(parents=True, exist_ok=True)
        for path in self._deps.folder.glob(f"{self.batch.id}.*"):
            path.unlink(missing_ok=True)

    async def _run(self, index: Index, total: int) -> bool:
        deps = self._deps
        done, number = await deps.batches.done(self.batch)
        self.left_lines = total - done.count
        results = Results(
            deps.batches,
            deps.files.storage,
            self.batch,
            next_number=number,
            commit_s=deps.settings.commit_s,
            committed=self._committed,
            give_up=lambda: self._stop is Stop.LOST,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(results.run())
            async for line_number, text in index.lines(done):
                if not await self._may_open(text, results):
                    break
                task = group.create_task(self._run_line(line_number, text, results))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            while self._open:
                has_gone = self._gone.is_set()
                _, open_still = await asyncio.wait(self._open, timeout=self._deps.settings.grace_s)
                for task in open_still if has_gone else ():
                    task.cancel()
            results.end()
        done, _ = await deps.batches.done(self.batch)
        return await self._finish(index, results, complete=done.count == total)

    async def _may_open(self, text: bytes, results: Results) -> bool:
        """Wait until another line can be opened; False: stop."""
        room, window, size = self._deps.room, self._window, len(text)
        name = decode_model(text).body.model
        model = self._deps.models.get(name, name)
        while self._stop is None:
            principal = self._principal
            if principal is None and not self._deps.keys.may_be_old:
                self.stop(Stop.REVOKED)
                break
            if principal is not None and results.has_room and time.monotonic() >= self._not_before_s:
                queue = queue_of(model, trusted=principal.trusted_only)
                if room.is_contended(queue):
                    window.shrink()
                elif len(self._open) < min(window.limit, room.share) and room.has_room(queue, size):
                    return True
            await room.wait()
        return False

    # --- one line -----------------------------------------------------------------------------------------------------

    async def _run_line(self, number: int, text: bytes, results: Results) -> None:
        line = decode_line(text)
        with self._deps.room.line(len(text)):
            answer = await self._answer(line)
        if answer is None:
            return
        if answer.error is None:
            self._window.grow(self._deps.room.share)
        respond = partial(response_line, status=answer.status, request_id=answer.request_id, body=answer.body)
        results.add(number, respond(self.batch.id, number, line.custom_id), answer.counts)

    async def _answer(self, line: Line) -> Answer | None:
        """Retry until there is a final answer; None: the batch stops."""
        tries = 0
        for backoff in backoff_s(LONGEST_BACKOFF_S):
            answer = await self._ask(line)
            if answer is None:
                return None
            if answer.error is None:
                return answer
            verdict = verdict_of(answer.error)
            if verdict is Verdict.FAILED:
                return answer
            if verdict is Verdict.REVOKED:
                self.stop(Stop.REVOKED)
                return None
            tries += verdict is Verdict.AGAIN
            if tries >= self._deps.settings.max_line_tries:
                return answer
            pause_s = backoff
            if verdict is Verdict.REFUSED:
                pause_s = wait_s(answer.error)
                self._window.shrink()
                self._not_before_s = max(self._not_before_s, time.monotonic() + pause_s)
            if self._stop is not None or await wait_for(self._wake, pause_s):
                return None
        raise AssertionError("unreachable")

    async def _ask(self, line: Line) -> Answer | None:
        principal = self._principal
        left_ms = self.batch.expires_unix_ms - unix_now_ms()
        if principal is None or left_ms <= 0:
            return None
        return await self._deps.asking.ask(
            self.batch.endpoint, bytes(line.body), principal, limit_s=left_ms / 1000, gone=self._gone
        )

    # --- its end ------------------------------------------------------------------------------------------------------

    async def _finish(self, index: Index, results: Results, *, complete: bool) -> bool:
        stop = self._stop
        if complete:
            await self._deps.batches.finalizing(self.batch)
            await self._end(Status.CANCELLED if stop is Stop.CANCELLED else Status.COMPLETED)
            return True
        if stop is None or stop not in _ENDS or (stop is Stop.REVOKED and self._deps.keys.may_be_old):
            return False
        is_revoked = stop is Stop.REVOKED
        await self._give_up(index, results, _FAILURES[stop], Counts(failed=1, given_up=0 if is_revoked else 1))
        await self._end(_ENDS[stop], [self._revocation] if is_revoked else None)
        return True

    async def _give_up(self, index: Index, results: Results, why: LineFailure, counts: Counts) -> None:
        """Write the reason for every incomplete line to the error file."""
        done, _ = await self._deps.batches.done(self.batch)
        async for number, text in index.lines(done):
            failure = failure_line(self.batch.id, number, decode_line(text).custom_id, why)
            results.add(number, failure, counts)
            if results.is_full:
                await results.commit()
        await results.commit()

    @property
    def _revocation(self) -> LineError:
        message = f"The API key '{self.batch.key_name}' of this batch is no longer accepted. Completed lines are kept."
        return LineError(REVOKED, message)

    async def _end(self, status: Status, errors: list[LineError] | None = None) -> None:
        deps = self._deps
        await deps.batches.end(self.batch, status, deps.settings.file_ttl_s, errors or ())
        for file_id in self.batch.result_ids:  # parts left by gateways that died before committing them
            known = await deps.batches.objects(file_id)
            for name in await deps.files.storage.names(f"{file_id}/"):
                if name not in known:
                    await deps.files.storage.delete(name)
