"""Frames that are lost, repeated or late change no answer."""

import random
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch import attempt as attempts_module
from gateway.dispatch.lifecycle import OpenRequest, State
from protocol.job import Frame, Tokens
from tests.unit.gateway.dispatch.opened_requests import (
    RecordedActions,
    accepted,
    finished,
    lose_worker,
    open_request,
    tokens,
)


@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.6), n=st.integers(1, 3), length=st.integers(1, 15))
@settings(max_examples=150)
def test_whatever_is_lost_or_repeated_the_text_comes_out_once(seed: int, loss: float, n: int, length: int) -> None:
    """Workers die, frames get lost and come twice; the caller's text is that of an undisturbed run."""
    with mock.patch.object(attempts_module, "MAX_FREE_FAILURES", 10_000):
        _disturb_until_it_ends(seed, loss, n, length)


def _disturb_until_it_ends(seed: int, loss: float, n: int, length: int) -> None:
    dice = random.Random(seed)
    request, actions = open_request(n=n, max_attempts=1000, first_token_s=1e7, inter_token_s=1e7, total_s=1e7)
    wanted = [[f"{index}.{k} " for k in range(length)] for index in range(n)]
    now_s = 0.0
    while request.state is not State.ENDED:
        attempt = request.attempt
        now_s = _run_attempt(request, actions, _frames_of_attempt(request, wanted, dice), dice, loss, now_s)
        if request.attempt == attempt and request.state is State.QUEUED:
            request.job_vanished(attempt, now_s)
        elif request.attempt == attempt and request.state is State.RUNNING:
            lose_worker(request, now_s)
    texts = [""] * n
    for event in request.mailbox._events:
        if isinstance(event, Tokens):
            texts[event.index] += event.text
    assert texts == ["".join(words) for words in wanted]
    assert request.completion_tokens == n * length
    assert actions.ends == 1


def _frames_of_attempt(request: OpenRequest, wanted: list[list[str]], dice: random.Random) -> list[Frame]:
    attempt = request.attempt
    frames: list[Frame] = [accepted(attempt)]
    left = []
    for index, words in enumerate(wanted):
        choice = request.choices[index]
        held = len(choice.token_ids)
        left.append([] if choice.finish_reason else list(enumerate(words))[held:])
    while any(left):
        index = dice.choice([i for i, words in enumerate(left) if words])
        number, word = left[index].pop(0)
        reason = "stop" if number == len(wanted[index]) - 1 else None
        frames.append(tokens(len(frames), word, (number,), attempt, index=index, finish_reason=reason))
    return [*frames, finished(len(frames), attempt)]


def _run_attempt(
    request: OpenRequest, actions: RecordedActions, sent: list[Frame], dice: random.Random, loss: float, now_s: float
) -> float:
    attempt, worker = request.attempt, f"w{request.attempt}"
    dies_after = dice.randrange(len(sent)) if dice.random() < loss else len(sent)
    for seq, frame in enumerate(sent[:dies_after]):
        now_s += 0.5
        if dice.random() >= loss:
            request.on_frame(worker, frame, now_s)
        if dice.random() < loss:
            request.on_frame(worker, sent[dice.randrange(seq + 1)], now_s)
        if actions.asked and actions.asked[-1][1] == attempt and dice.random() >= loss:
            for again in sent[actions.asked[-1][2] : seq + 1]:
                request.on_frame(worker, again, now_s)
    return now_s
