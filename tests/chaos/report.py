"""Figures of one run, and whether every promise was kept."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.http_client import Exchange
from tests.chaos.background import has_begun
from tests.chaos.ledger import LedgerRow
from tests.chaos.load import Call
from tests.chaos.oracle import Answer, Difference, compare
from tests.chaos.strikes import Ending, Strike
from tests.chaos.watcher import Watcher

PAUSE_WINDOW_S = 10.0  # after a fault is mended, a pause still counts as its consequence
LOGPROB_TOLERANCE = 1e-3  # a real engine's sums depend on who shares its batch


@dataclass(frozen=True, slots=True)
class Offence:
    """A broken promise, with what a person needs to look into it."""

    what: str
    request_id: str | None = None
    details: str = ""


@dataclass
class Report:
    """Everything that a run found out."""

    scenario: str
    seed: int
    faults: int
    requests: int = 0
    errors: int = 0
    difference: Difference = field(default_factory=Difference)
    gaps_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by kind of fault
    strikes_that_moved: int = 0  # at least one stream to another worker
    first_token_ms: list[float] = field(default_factory=list)  # of every stream: what those saw who came meanwhile
    accepted: int = 0
    ledger_rows: int = 0
    unrecorded: int = 0  # accepted requests without a row
    miscounted: int = 0  # rows with other tokens than the undisturbed answer
    double_billed: int = 0
    orphans: int = 0
    cut: int = 0  # requests that a killed gateway took along; their callers asked again
    poisoned: int = 0
    dead_letters: int = 0
    attempts_max: int = 0
    duration_s: float = 0.0
    extras: dict[str, Any] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)  # of requests at which a server misbehaved
    unwished: set[int] = field(default_factory=set)  # indexes into ``endings``: not as the caller would wish
    offences: list[Offence] = field(default_factory=list)

    def offend(self, what: str, request_id: str | None = None, details: str = "") -> None:
        self.offences.append(Offence(what, request_id, details))

    @property
    def kept(self) -> bool:
        """True if every promise was kept."""
        return not self.offences

    def line(self) -> str:
        """The one JSON line that ends the output."""
        gaps = [gap for kind in self.gaps_ms.values() for gap in kind]
        return json.dumps(
            {
                "scenario": self.scenario,
                "seed": self.seed,
                "faults": self.faults,
                "requests": self.requests,
                "errors": self.errors,
                "lost": self.difference.lost,
                "repeated": self.difference.repeated,
                "changed": self.difference.changed,
                "gap_ms_p50": percentile(gaps, 50),
                "gap_ms_p99": percentile(gaps, 99),
                "gap_ms_max": percentile(gaps, 100),
                "gaps": len(gaps),
                "strikes_that_moved": self.strikes_that_moved,
                "first_token_ms_p50": percentile(self.first_token_ms, 50),
                "first_token_ms_max": percentile(self.first_token_ms, 100),
                "accepted": self.accepted,
                "ledger_rows": self.ledger_rows,
                "double_billed": self.double_billed,
                "unrecorded": self.unrecorded,
                "miscounted": self.miscounted,
                "orphans": self.orphans,
                "cut": self.cut,
                "dead_letters": self.dead_letters,
                "attempts_max": self.attempts_max,
                "duration_s": round(self.duration_s, 1),
                "broken": len(self.offences),
                **{name: _for_json(value) for name, value in self.extras.items()},
            }
        )

    def show(self, console: Console) -> None:
        """Print the gaps by kind of fault, the scenario's own figures, and the first offences."""
        table = Table("fault", "gaps", "p50 ms", "p99 ms", "max ms", title=f"{self.scenario}, seed {self.seed}")
        for kind, gaps in sorted(self.gaps_ms.items()):
            table.add_row(kind, str(len(gaps)), *(str(percentile(gaps, p)) for p in (50, 99, 100)))
        if self.gaps_ms:
            console.print(table)
        if self.endings:
            console.print(self._endings_table())
        console.print(
            f"{self.scenario}: {self.requests} requests, {self.errors} errors, {self.ledger_rows} ledger rows"
        )
        for name, value in self.extras.items():
            console.print(f"  {name:<32} {value}", markup=False)
        for offence in self.offences[:5]:
            console.print(f"BROKEN: {offence.what} {offence.request_id or ''}\n{offence.details}", markup=False)
        if len(self.offences) > 5:
            console.print(f"… and {len(self.offences) - 5} more")

    def _endings_table(self) -> Table:
        table = Table("the server", "does", "the caller wishes", "as wished", "max ms", title="what servers do wrong")
        for wrong in dict.fromkeys(ending.wrong for ending in self.endings):
            numbers = [number for number, ending in enumerate(self.endings) if ending.wrong is wrong]
            wished = f"{sum(number not in self.unwished for number in numbers)} of {len(numbers)}"
            longest_ms = percentile([_ended_ms(self.endings[number]) for number in numbers], 100)
            table.add_row(
                wrong.name, wrong.does, f"an {wrong.wishes}".replace("an own", "its own"), wished, str(longest_ms)
            )
        return table


def _ended_ms(ending: Ending) -> float:
    """From the fault to the end of the answer, or to the last that came of it."""
    ended_s = ending.call.reply.ended_s or max((arrived_s for arrived_s, _ in ending.call.reply.pieces), default=0.0)
    return max(0.0, ended_s - ending.struck_s) * 1000


def percentile(values: Sequence[float], per_cent: float) -> float | None:
    """The nearest-rank percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * per_cent / 100) - 1)], 1)


def _for_json(value: object) -> object:
    """JSON has no infinity: what never came is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- answers ----------------------------------------------------------------------------------------------------------


def judge_answers(report: Report, calls: Sequence[Call], oracle: dict[int, Answer], *, exact_logprobs: bool) -> None:
    """Compare every answer with the undisturbed one."""
    for call in calls:
        report.requests += 1
        if call.answer is None:
            report.errors += 1
            report.offend(f"error: {call.error}", call.request_id, str(call.question))
            continue
        expected = oracle[call.question.number]
        found = compare(expected, call.answer, 0.0 if exact_logprobs else LOGPROB_TOLERANCE)
        report.difference.add(found)
        if found:
            details = f"{call.question}\nexpected {_shown(expected)}\nactual   {_shown(call.answer)}"
            report.offend(str(found), call.request_id, details)


def _shown(answer: Answer) -> str:
    return f"{[(c.text, c.finish_reason, c.tokens) for c in answer.choices]} usage {answer.usage}"


def judge_endings(report: Report, endings: Sequence[Ending], oracle: dict[int, Answer]) -> None:
    """Check that a server's fault ends acceptably: in the answer, or immediately in the client's own error."""
    report.endings = list(endings)
    if not endings:
        return
    for number, ending in enumerate(endings):
        if ending.wrong.wishes == "own error":
            is_told = ending.call.answer is None and ending.wrong.told.encode() in ending.call.reply.body
            is_wished = is_told and ending.asked_times == 1  # asked again elsewhere, or there, it would not be at once
        else:
            expected, answer = oracle.get(ending.call.question.number), ending.call.answer
            is_wished = answer is not None and (expected is None or not compare(expected, answer, LOGPROB_TOLERANCE))
        if not is_wished:
            report.unwished.add(number)
            report.offend(f"{ending.kind} ended otherwise", ending.call.request_id, str(ending.call.error))
    listed = {ending.wrong for ending in endings if ending.wrong.listed}
    unwished = {report.endings[number].wrong for number in report.unwished}
    report.extras["listed_faults_ended_as_wished"] = f"{len(listed - unwished)} of {len(listed)}"


def judge_poisoned(report: Report, calls: Sequence[Call], dead_letters: int) -> None:
    """A job that kills every worker ends in an explicit error and in one dead letter."""
    report.poisoned, report.dead_letters = len(calls), dead_letters
    for call in calls:
        if call.error is None or "attempts_exhausted" not in call.error:
            report.offend(f"a poisonous job ended otherwise: {call.error or call.answer}", call.request_id)
    if dead_letters != len(calls):
        report.offend(f"{len(calls)} poisonous jobs left {dead_letters} dead letters")


# --- gaps -------------------------------------------------------------------------------------------------------------


def measure_gaps(report: Report, strikes: Sequence[Strike], calls: Sequence[Call], watcher: Watcher) -> None:
    """Find what the caller of each struck stream saw of the fault, and how long every stream took to begin."""
    for call in calls:
        if call.answer and call.answer.arrivals_s and call.replies[0].ending != "unreachable":
            report.first_token_ms.append((call.answer.arrivals_s[0] - call.replies[0].due_s) * 1000)
    by_id = {reply.request_id: call for call in calls for reply in call.replies}
    for strike in strikes:
        report.strikes_that_moved += any(
            strike.worker_id is not None and watcher.moved_at_s(request_id, strike.at_s, strike.worker_id) is not None
            for request_id in strike.streams
        )
        for request_id in strike.streams:
            struck = by_id.get(request_id)
            gap_s = None if struck is None else _gap_s(strike, request_id, struck.arrivals(), watcher)
            if gap_s is not None:
                report.gaps_ms[strike.kind].append(gap_s * 1000)


def _gap_s(strike: Strike, request_id: str, arrivals_s: list[float], watcher: Watcher) -> float | None:
    if strike.worker_id is None:
        return longest_pause_s(arrivals_s, strike.at_s, strike.mended_s or strike.at_s)
    moved_s = watcher.moved_at_s(request_id, strike.at_s, strike.worker_id)
    if moved_s is None:  # its worker went on with it, or all had been sent
        return longest_pause_s(arrivals_s, strike.at_s, strike.mended_s or strike.at_s) if strike.may_stay else None
    after = [arrived_s for arrived_s in arrivals_s if arrived_s >= moved_s]
    return after[0] - strike.at_s if after else None


def longest_pause_s(arrivals_s: list[float], from_s: float, until_s: float) -> float | None:
    """Return the longest time between two arrivals that overlaps a fault, or comes soon after it; None without any."""
    pauses = [
        later - earlier
        for earlier, later in itertools.pairwise(arrivals_s)
        if later > from_s and earlier < until_s + PAUSE_WINDOW_S
    ]
    return max(pauses, default=None)


def judge_gaps(report: Report, limits_ms: Mapping[str, Mapping[float, float]]) -> None:
    """Hold the gaps to their bounds, given by kind of fault and percentile; without a gap nothing has been proven."""
    for kind, bounds_ms in limits_ms.items():
        for per_cent, limit_ms in bounds_ms.items():
            gap_ms = percentile(report.gaps_ms.get(kind, ()), per_cent)
            if gap_ms is None:
                report.offend(f"{kind} struck no stream")
            elif gap_ms > limit_ms:
                report.offend(f"{per_cent:g} % of the gaps after {kind} must be {limit_ms:g} ms at most: {gap_ms:g} ms")


# --- ledger -----------------------------------------------------------------------------------------------------------


def accepted_ids(calls: Sequence[Call]) -> set[str]:
    """The requests that a gateway admitted: only those tell how often they were tried."""
    return {
        reply.request_id
        for call in calls
        for reply in call.replies
        if reply.request_id is not None and ("x-spillway-attempts" in reply.headers or has_begun(reply))
    }


def _told_of(calls: Sequence[Call], request_id: str) -> str:
    """Return what its caller got of a request."""
    replies = [reply for call in calls for reply in call.replies if reply.request_id == request_id]
    return "\n".join(
        f"HTTP {reply.status}, {reply.ending}, {len(reply.pieces)} pieces: {reply.body[:200]!r}" for reply in replies
    )


def cut_replies(calls: Sequence[Call]) -> list[Exchange]:
    """The replies that were cut off, and asked for again."""
    return [reply for call in calls for reply in call.replies[:-1] if reply.ending != "unreachable"]


def judge_ledger(
    report: Report,
    calls: Sequence[Call],
    rows: dict[str, LedgerRow],
    tokens_of: dict[int, int],
) -> None:
    """One row per accepted request, with the undisturbed answer's tokens."""
    report.cut = len(cut_replies(calls))
    accepted = accepted_ids(calls)
    report.accepted, report.ledger_rows = len(accepted), len(rows)
    report.attempts_max = max((row.attempts for row in rows.values()), default=0)
    for request_id in accepted - rows.keys():
        report.unrecorded += 1
        report.offend("no ledger row", request_id, _told_of(calls, request_id))
    nobodys = rows.keys() - accepted
    if len(nobodys) > report.cut:  # a reply that was cut before its head is nobody's to us
        report.double_billed += len(nobodys) - report.cut
        report.offend(f"{len(nobodys)} ledger rows of nobody", next(iter(nobodys)))
    for call in calls:
        row = rows.get(call.request_id or "")
        expected = tokens_of.get(call.question.number)
        if row is None or expected is None or call.answer is None or row.completion_tokens == expected:
            continue
        report.miscounted += 1
        report.double_billed += row.completion_tokens > expected
        report.offend(
            f"{row.completion_tokens} tokens billed instead of {expected}", row.request_id, str(call.question)
        )
