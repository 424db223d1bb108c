"""Loads, measurements, and the standard latency and throughput figures computed from them.

A load submits `batch` requests at the same time. Each has `prompt_tokens` random tokens, which are in no cache, and
generates `new_tokens` tokens with greedy sampling. The columns are those of llama.cpp's batched-bench, with the
definitions of docs/GLOSSARY.md:

    prefill   from submission to the last request's first token
    decode    from there to the last token
    TTFT      of a request: from submission to its first token (waiting for a slot included)
    TPOT      of a request: (last token - first token) / (tokens - 1)
    ITL       one gap between a request's neighboring pieces (tokens that arrive together are one piece)
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

WARM_UP_TOKENS: Final = 4


class BenchError(Exception):
    """The target cannot be reached, or failed; the message says what to do."""


class LoadRefused(Exception):
    """The target cannot run a load of this size; the message is the reason."""


class TimeBudgetExceeded(LoadRefused):
    """The time budget is used up; completed rounds of the load count."""


@dataclass(frozen=True, slots=True)
class Load:
    """The size of one load."""

    prompt_tokens: int  # of each request
    batch: int  # concurrent requests
    new_tokens: int  # of each request


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request that arrived together."""

    at_s: float  # since the load was submitted
    tokens: float  # if only the sum over all pieces is known, each piece gets an equal share


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: at least one piece."""

    prompt_tokens: int
    pieces: Sequence[Piece]

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.pieces[0].at_s

    @property
    def tokens(self) -> float:
        """Number of new tokens."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None below two tokens."""
        return None if self.tokens < 2 else (self.pieces[-1].at_s - self.ttft_s) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the gaps between neighboring pieces."""
        return [later.at_s - earlier.at_s for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


class Target(Protocol):
    """A system to measure: an engine in this process, or an endpoint."""

    def run(self, load: Load, seed: int) -> list[Answer]:
        """Run one load; ``seed`` determines its prompts. Raises LoadRefused, TimeBudgetExceeded or BenchError."""
        ...

    def environment(self) -> dict[str, Any]:
        """Return the conditions of the measurement, for the report."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one load. Times and rates are medians of the rounds; percentiles are of all their requests."""

    prompt_tokens: int
    batch: int
    new_tokens: int
    prefill_s: float
    prefill_tokens_per_s: float  # prompt tokens / prefill
    decode_s: float
    decode_tokens_per_s: float | None  # tokens that arrived during decode / decode; None: all came with the prefill
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float | None  # None below two tokens
    tpot_p99_ms: float | None
    itl_p99_ms: float | None
    total_s: float
    total_tokens_per_s: float  # (prompt tokens + new tokens) / total
    counted_prompt_tokens: float  # mean per request, as counted by the engine or endpoint
    counted_new_tokens: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """A load that was not measured."""

    prompt_tokens: int
    batch: int
    new_tokens: int
    reason: str


def measure(
    target: Target, loads: Sequence[Load], rounds: int, advance: Callable[[], None] = lambda: None
) -> Iterator[Row | Skipped]:
    """Yield each load's outcome as soon as it is known; call ``advance`` after every round, including skipped ones.

    As a warm-up, each batch size is first run once with the shortest prompt and a few tokens: kernels are selected and
    memory is touched. Raises BenchError.
    """
    shortest = min(load.prompt_tokens for load in loads)
    for number, batch in enumerate(sorted({load.batch for load in loads})):
        try:
            target.run(Load(shortest, batch, WARM_UP_TOKENS), seed=-1 - number)
        except LoadRefused:
            continue  # reported by its own row
    for number, load in enumerate(loads):
        found: list[list[Answer]] = []
        try:
            for round_ in range(rounds):
                found.append(target.run(load, seed=number * rounds + round_))
                advance()
        except LoadRefused as refusal:
            for _ in range(rounds - len(found)):
                advance()
            if not found or not isinstance(refusal, TimeBudgetExceeded):
                yield Skipped(load.prompt_tokens, load.batch, load.new_tokens, str(refusal))
                continue
        yield figures(load, found)


def figures(load: Load, rounds: Sequence[Sequence[Answer]]) -> Row:
    """Compute a load's row from the answers of its rounds."""
    spans = [_spans(answers) for answers in rounds]
    all_answers = [answer for answers in rounds for answer in answers]
    ttfts = [answer.ttft_s for answer in all_answers]
    tpots = [tpot for answer in all_answers if (tpot := answer.tpot_s) is not None]
    gaps = [gap for answer in all_answers for gap in answer.gaps_s]
    decode_rates = [span.decode_tokens / span.decode_s for span in spans if span.decode_s > 0]
    return Row(
        load.prompt_tokens,
        load.batch,
        load.new_tokens,
        prefill_s=statistics.median(span.prefill_s for span in spans),
        prefill_tokens_per_s=statistics.median(span.prompt_tokens / span.prefill_s for span in spans),
        decode_s=statistics.median(span.decode_s for span in spans),
        decode_tokens_per_s=statistics.median(decode_rates) if decode_rates else None,
        ttft_p50_ms=_in_ms(percentile(ttfts, 50)),
        ttft_p99_ms=_in_ms(percentile(ttfts, 99)),
        tpot_p50_ms=_in_ms(percentile(tpots, 50)) if tpots else None,
        tpot_p99_ms=_in_ms(percentile(tpots, 99)) if tpots else None,
        itl_p99_ms=_in_ms(percentile(gaps, 99)) if gaps else None,
        total_s=statistics.median(span.prefill_s + span.decode_s for span in spans),
        total_tokens_per_s=statistics.median(
            (span.prompt_tokens + span.new_tokens) / (span.prefill_s + span.decode_s) for span in spans
        ),
        counted_prompt_tokens=statistics.mean(answer.prompt_tokens for answer in all_answers),
        counted_new_tokens=statistics.mean(answer.tokens for answer in all_answers),
    )


@dataclass(frozen=True, slots=True)
class _Spans:
    """One round, divided into prefill and decode."""

    prefill_s: float
    decode_s: float
    prompt_tokens: int
    new_tokens: float
    decode_tokens: float


def _spans(answers: Sequence[Answer]) -> _Spans:
    prefill_s = max(answer.ttft_s for answer in answers)
    pieces = [piece for answer in answers for piece in answer.pieces]
    return _Spans(
        prefill_s=prefill_s,
        decode_s=max(piece.at_s for piece in pieces) - prefill_s,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        new_tokens=sum(piece.tokens for piece in pieces),
        decode_tokens=sum(piece.tokens for piece in pieces if piece.at_s > prefill_s),
    )


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest of the values that at least ``percent`` % of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def _in_ms(seconds: float) -> float:
    return 1000 * seconds
