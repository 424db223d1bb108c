"""The waterfall of a request's attempts: waiting, prefill and decode of each, with its worker."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from console.dashboard import formats
from console.dashboard.view import View
from ledger.queries.log import RequestHistory, Row

ROW_PX: Final = 46
TOP_PX: Final = 22  # for the axis
TICKS: Final = 4
COUNTED_BY: Final[dict[str, str]] = {
    "engine": "the engine",
    "provider": "the provider",
    "estimate": "estimated",
}
LINKED: Final = {"Model": "model", "Key": "key", "Team": "team", "Last pool": "pool"}  # facts that lead to requests


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of an attempt; ``x`` and ``width`` in percent of the request's time."""

    kind: str  # the CSS class p-…
    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One attempt."""

    y: int
    label: str
    phases: Sequence[Phase]
    attempt: Row


@dataclass(frozen=True, slots=True)
class Waterfall:
    """All attempts on one axis, from when the request was received."""

    bars: Sequence[Bar]
    ticks: Sequence[tuple[float, str]]
    height: int
    summary: str


def waterfall(history: RequestHistory) -> Waterfall:
    """Draw a request's attempts. Workers' clocks may differ from ours: earlier begins are moved to the start."""
    spans = [(attempt, *_span(attempt, _origin(history))) for attempt in history.attempts]
    whole_ms = max([history.request["total_ms"] if history.request else 0.0, 1.0, *(end for _, _, _, end in spans)])
    bars = [
        Bar(
            TOP_PX + index * ROW_PX,
            f"Attempt {attempt['attempt']} · {attempt['worker_id']} · {formats.duration(end - start)}",
            _phases(attempt, start, pulled, whole_ms),
            attempt,
        )
        for index, (attempt, start, pulled, end) in enumerate(spans)
    ]
    ticks = [(round(100 * tick / TICKS, 2), formats.duration(whole_ms * tick / TICKS)) for tick in range(TICKS + 1)]
    summary = "; ".join(
        f"attempt {bar.attempt['attempt']} on {bar.attempt['worker_id']}: "
        + ", ".join(phase.title for phase in bar.phases)
        + f", {bar.attempt['outcome']}"
        for bar in bars
    )
    return Waterfall(bars, ticks, TOP_PX + len(bars) * ROW_PX + 4, summary or "no attempt")


def _origin(history: RequestHistory) -> int:
    if history.request is not None:
        return int(history.request["received_unix_ms"])
    return min(int(attempt["started_unix_ms"] - attempt["queue_ms"]) for attempt in history.attempts)


def _span(attempt: Row, origin_unix_ms: int) -> tuple[float, float, float]:
    """Return when an attempt was queued, pulled and ended, in ms since the request was received."""
    pulled = attempt["started_unix_ms"] - origin_unix_ms
    start = max(0.0, pulled - attempt["queue_ms"])
    pulled = max(start, pulled)
    return start, pulled, pulled + attempt["total_ms"]


def _phases(attempt: Row, start: float, pulled: float, whole_ms: float) -> list[Phase]:
    lengths = [("queue", "waited for a worker", pulled - start), *_engine_phases(attempt)]
    phases, at = [], start
    for kind, name, length in lengths:
        if length > 0:
            title = f"{name} {formats.duration(length)}"
            phases.append(Phase(kind, _percent(at, whole_ms), max(0.15, _percent(length, whole_ms)), title))
        at += length
    return phases


def _engine_phases(attempt: Row) -> list[tuple[str, str, float]]:
    """Return the phases between pull and end, from the engine's own timings where it reports them."""
    total, ttft = attempt["total_ms"], attempt["ttft_ms"]
    if ttft is None:
        kind = "lost" if attempt["outcome"] == "failed" else "none"
        return [(kind, "generated no token", total)]
    queued = min(attempt["engine_queue_ms"] or 0.0, ttft)
    decode = total - ttft
    return [
        ("engine", "waited in the engine", queued),
        ("prefill", "processed the prompt", ttft - queued),
        ("decode", "generated tokens", decode),
    ]


def _percent(part: float, whole: float) -> float:
    return round(min(100.0, 100 * part / whole), 3)


def facts(request: Row, names: dict[str, str], view: View) -> list[tuple[str, str, str]]:
    """Return the ledger's facts about a request, as labels, texts and links ("" for none)."""
    tokens = request["completion_tokens"]
    decode_ms = None if request["ttft_ms"] is None else request["total_ms"] - request["ttft_ms"]
    tpot_ms = decode_ms / (tokens - 1) if decode_ms is not None and tokens > 1 and request["outcome"] == "ok" else None
    team, charge = request["team_id"], request["charge_nano_usd"]
    tags: dict[str, str] = json.loads(request["tags"] or "{}")
    known = [
        ("Received", formats.moment(request["received_unix_ms"], view.zone)),
        ("Model", request["model"]),
        ("Endpoint", request["endpoint"]),
        ("Key", request["key_name"]),
        ("Team", names.get(team, team) or formats.NOTHING),
        ("HTTP status", str(request["http_status"]) if request["http_status"] else "unknown: the gateway died"),
        ("Error", request["error_code"] or formats.NOTHING),
        ("Finish reason", request["finish_reason"] or formats.NOTHING),
        (
            "Prompt tokens",
            f"{formats.count(request['prompt_tokens'])} ({formats.count(request['cached_tokens'])} cached)",
        ),
        ("Completion tokens", formats.count(tokens)),
        ("Tokens counted by", COUNTED_BY.get(request["counted_by"] or "engine", "unknown")),
        ("Queue wait", formats.duration(request["queue_ms"])),
        ("TTFT", formats.duration(request["ttft_ms"])),
        ("TPOT", formats.duration(tpot_ms)),
        ("End to end", formats.duration(request["total_ms"])),
        (
            "Last pool",
            " · ".join(filter(None, (request["pool"], request["provider"], request["region"]))) or formats.NOTHING,
        ),
        ("Preemptions", formats.count(request["preemptions"])),
        ("Charged", formats.charged(charge) if charge is not None or request["pool"] else formats.NOTHING),
        ("Gateway", request["gateway_id"]),
    ]
    links = links_of(view, model=request["model"], key=request["key_id"], team=team, pool=request["pool"])
    shown = [(label, text, links.get(LINKED.get(label, ""), "")) for label, text in known]
    return [*shown, *(("Tag", f"{name}={value}", tagged(view, name, value)) for name, value in tags.items())]


def tagged(view: View, name: str, value: str) -> str:
    """Return the link to the requests with a tag."""
    return f"/dashboard/requests?{view.query(tag=f'{name}:{value}', by=None, **{'and': None})}"


def links_of(view: View, **values: str | None) -> dict[str, str]:
    """Return links to the requests of these values around the same time, by dimension; none for an unknown value."""
    others = dict.fromkeys(view.where)
    return {
        dimension: f"/dashboard/requests?{view.query(**others | {dimension: value, 'by': None, 'and': None})}"
        for dimension, value in values.items()
        if value
    }
