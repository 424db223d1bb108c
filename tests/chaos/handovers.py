"""Answers held to the tokens that were made for them: what one attempt hands over, the next one goes on from.

Heard on the bus, as no caller and no gateway tells it: each attempt's job says which tokens it goes on from, and the
worker's frames say which it made. However far two makes of engine agree, the caller's text is that of these tokens,
each of them once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.text.detokenizer import TokenText
from pool_worker.engines.tokenizer_folder import TokenizerFolder
from spillway.config import DEMO_MODEL_PATH
from tests.chaos.load import Call
from tests.chaos.oracle import Answer, compare
from tests.chaos.report import Report
from tests.chaos.watcher import HandoverBroken, Made


def judge_handovers(report: Report, calls: Sequence[Call], made: Mapping[str, Made]) -> None:
    """Compare each answer with the text and the number of the tokens that were made for it."""
    tokens = TokenText(TokenizerFolder(DEMO_MODEL_PATH))
    for call in calls:
        heard = made.get(call.request_id or "")
        if call.answer is None or heard is None:
            continue
        try:
            expected = _expected(call.answer, heard, tokens)
        except HandoverBroken as error:
            report.difference.changed += 1
            report.offend("a handover is broken", call.request_id, str(error))
            continue
        found = compare(expected, call.answer)
        report.difference.add(found)
        if found:
            report.offend(f"it is not what was made: {found}", call.request_id, f"{expected}\n{call.answer}")
    answered = [call for call in calls if call.answer is not None]
    held = sum(call.request_id in made for call in answered)
    report.extras["answers_held_to_tokens_made"] = f"{held} of {len(answered)}"
    if held < len(answered):
        report.offend(f"of {len(answered) - held} answers nobody was heard making them")


def _expected(answer: Answer, made: Made, tokens: TokenText) -> Answer:
    """The answer as its tokens say; what a stop string ends may have more tokens than text."""
    ids = [made.token_ids(index) for index in range(len(answer.choices))]
    texts = [_text_of(tokens, made.prompt_ids, one) for one in ids]
    choices = [
        replace(told, text=text[: len(told.text)] if told.finish_reason == "stop" else text)
        for text, told in zip(texts, answer.choices, strict=True)
    ]
    usage = None if answer.usage is None else {**answer.usage, "completion_tokens": sum(map(len, ids))}
    return Answer(choices, usage)


def _text_of(tokens: TokenText, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    detokenizer = tokens.detokenizer(prompt_ids, skip_special_tokens=True)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])
