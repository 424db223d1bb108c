"""The undisturbed answers of each make of engine, and their agreement, token by token.

A rescue may move an answer from one make to another, whose arithmetic rounds differently. Where all makes give the same
tokens, a disturbed answer must be exactly that one. Where they do not, it must begin with what they have in common, and
have as many tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.load import Call, Load
from tests.chaos.mix import Question
from tests.chaos.oracle import Answer, compare
from tests.chaos.report import LOGPROB_TOLERANCE, Report
from tests.chaos.system import System
from tests.chaos.watcher import Watcher

Ids = dict[int, list[int]]  # by choice


@dataclass
class Agreement:
    """The undisturbed answers by make and by question's number."""

    calls: dict[str, dict[int, Call]] = field(default_factory=dict)
    ids: dict[str, dict[int, Ids]] = field(default_factory=dict)

    def answers(self, number: int) -> list[Answer]:
        """Return the makes' answers to a question."""
        return [call.answer for calls in self.calls.values() if (call := calls[number]).answer is not None]

    def all_calls(self) -> list[Call]:
        """Return the calls of every make."""
        return [call for calls in self.calls.values() for call in calls.values()]

    def settled(self) -> dict[int, Answer]:
        """Return the answers that all makes give."""
        found = {number: self.answers(number) for number in next(iter(self.calls.values()))}
        return {
            number: first
            for number, (first, *others) in found.items()
            if not any(compare(first, other, LOGPROB_TOLERANCE) for other in others)
        }

    def summary(self) -> dict[str, str]:
        """Return the agreement of each pair of makes."""
        return {
            f"agreement_{one}_{other}": self._told(self.ids[one], self.ids[other])
            for one, other in itertools.combinations(self.ids, 2)
        }

    @staticmethod
    def _told(ours: dict[int, Ids], theirs: dict[int, Ids]) -> str:
        pairs = [(ids, theirs[number][index]) for number in ours for index, ids in ours[number].items()]
        same = sum(_shared(one, other) for one, other in pairs)
        equal, tokens = sum(one == other for one, other in pairs), sum(len(one) for one, _ in pairs)
        return f"{same} of {tokens} tokens before the first that differs, {equal} of {len(pairs)} answers whole"


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of tokens, or characters, before the first difference."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _ids_of(call: Call, watcher: Watcher) -> Ids:
    made = watcher.made[call.request_id or ""]
    return {index: made.token_ids(index) for index in range(call.question.choices)}


async def ask_each_make(system: System, load: Load, asked: Sequence[Question], callers: int) -> Agreement:
    """Ask everything of each make alone. An answer that is none stays in ``calls`` with its error."""
    agreement = Agreement()
    for pool in system.pools:
        make = system.engine_of(pool)
        if make in agreement.calls:
            continue
        await system.start_pool(pool)
        await load.wait_until_served(asked[0], system.gateway_ports)
        calls = await load.ask_all(asked, min(callers, len(asked)))
        agreement.calls[make] = {call.question.number: call for call in calls}
        agreement.ids[make] = {call.question.number: _ids_of(call, system.watcher) for call in calls if call.answer}
        await system.retire_pool(pool)
    return agreement


def judge_disputed(report: Report, calls: Sequence[Call], agreement: Agreement) -> None:
    """Hold answers about which the makes do not agree to what they have in common."""
    for call in calls:
        report.requests += 1
        if call.answer is None:
            report.errors += 1
            report.offend(f"error: {call.error}", call.request_id, str(call.question))
            continue
        undisturbed = agreement.answers(call.question.number)
        for index, choice in enumerate(call.answer.choices):
            first, *others = [answer.choices[index].text for answer in undisturbed]
            common = first[: min(_shared(first, other) for other in others)]
            if not choice.text.startswith(common):
                report.difference.changed += 1
                report.offend("it differs where all makes agree", call.request_id, f"{common!r}\n{choice.text!r}")
        counts = [answer.usage for answer in undisturbed]
        if call.answer.usage not in counts and all(usage == counts[0] for usage in counts):
            report.difference.changed += 1
            report.offend("it has another number of tokens", call.request_id, f"{counts[0]}\n{call.answer.usage}")
