"""How many streams of each kind of question were rescued in mid-answer, and in the middle of what they were."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.load import Call
from tests.chaos.played_answers import Place, places, timed_events
from tests.chaos.report import Report
from tests.chaos.strikes import Strike
from tests.chaos.watcher import Watcher


def judge_rescues(
    report: Report, strikes: Sequence[Strike], calls: Sequence[Call], watcher: Watcher, *, at_least: int
) -> None:
    """Count by the kind of question. Fewer rescued streams than ``at_least`` of any kind prove too little."""
    streams: dict[str, set[str | None]] = defaultdict(set)
    count_of: Counter[str] = Counter()
    in_json: Counter[str] = Counter()
    for strike, call in rescues(strikes, calls, watcher):
        streams[call.question.kind].add(call.request_id)
        count_of[call.question.kind] += 1
        in_json[call.question.kind] += was_in_json(strike, call)
    whole = Counter(call.question.kind for call in calls if call.answer is not None and _moved_whole(call, watcher))
    rescued = {kind: len(streams[kind]) for kind in sorted({call.question.kind for call in calls})}
    report.extras["streams_rescued"] = rescued
    report.extras["rescues_of_streams"] = _sorted(count_of)
    report.extras["rescues_in_arguments_or_json"] = _sorted(in_json)
    report.extras["whole_answers_moved"] = _sorted(whole)
    for kind, count in rescued.items():
        if count < at_least:
            report.offend(f"{count} streams of {kind} were rescued in mid-answer, and {at_least} should have been")


def rescues(strikes: Sequence[Strike], calls: Sequence[Call], watcher: Watcher) -> Iterator[tuple[Strike, Call]]:
    """Yield each stream that a strike hit in mid-answer and that has ended nevertheless, with the strike."""
    by_id = {call.request_id: call for call in calls if call.answer is not None}
    for strike in strikes:
        for request_id in strike.streams:
            call = by_id.get(request_id)
            if call is not None and _was_rescued(strike, request_id, call, watcher):
                yield strike, call


def _was_rescued(strike: Strike, request_id: str, call: Call, watcher: Watcher) -> bool:
    """Report whether the stream had content before the strike, and more after it from another worker."""
    if strike.worker_id is None or watcher.moved_at_s(request_id, strike.at_s, strike.worker_id) is None:
        return False
    arrivals_s = call.arrivals()
    return bool(arrivals_s) and arrivals_s[0] <= strike.at_s < arrivals_s[-1]


def was_in_json(strike: Strike, call: Call) -> bool:
    """Report whether any choice had just brought, and then went on with, the same call's arguments or JSON text."""
    last: dict[int, Place] = {}
    following: dict[int, Place] = {}
    for arrived_s, event in timed_events(call.reply):
        for place in places(event):
            if arrived_s <= strike.at_s:
                last[place[0]] = place
            else:
                following.setdefault(place[0], place)
    kind = "text" if "json" in call.question.kind else "call"
    return any(place[1] == kind and following.get(choice) == place for choice, place in last.items())


def _moved_whole(call: Call, watcher: Watcher) -> bool:
    """Report whether an answer that is not streamed was made by more than one worker."""
    runs = watcher.runs.get(call.request_id or "", ())
    return not call.question.streams and len({run.worker_id for run in runs}) > 1


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
