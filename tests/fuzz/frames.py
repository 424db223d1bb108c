"""Frames of workers: what a step holds, what of it is plausible, and what the choices of a request take of it."""

from collections.abc import Sequence

import msgspec

from gateway.dispatch.choices import Choices, plausible_prompt, plausible_timings, why_implausible
from protocol import job as m
from protocol.errors import ProtocolError
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import ChatUsage, Deltas, Part, StepFrame, decode_step
from tests.fuzz.mutations import Form
from tests.unit.protocol.test_versions import FRAMES

FORM: Form = "msgpack"
WORKER = "w"
PROMPT_TOKENS = 7
MAX_TOKENS = 16
TOKENS_TO_SCORE = 4

_LOGPROBS = (TokenLogprob(5, "a", -0.5, b"a", ((6, "b", -1.0, b"b"),)),)
_MORE: list[m.Frame] = [
    m.Tokens("r", 1, 1, 1, (5,), "a", None, _LOGPROBS, (PromptLogprob(5, "a", -0.5, 1, ((6, "b", -1.0),)),)),
    Deltas("r", 1, 1, 0, (Part("text", "hi"), Part("call", "f", "c")), 2, "stop", ChatUsage("provider", 3, 2)),
    m.UnreadableFrame("r", 1, 2, "t", "why"),
]


def _step(frames: Sequence[m.Frame]) -> bytes:
    return m.encode(StepFrame(m.PROTOCOL_VERSION, WORKER, tuple(frames)))


SEEDS = [_step([frame]) for frame in [*FRAMES, *_MORE]] + [_step([*FRAMES, *_MORE])]


def run(payload: bytes) -> None:
    try:
        step = decode_step(payload, WORKER)
    except ProtocolError:
        return
    encoded = m.encode(step)
    assert m.encode(decode_step(encoded, WORKER)) == encoded
    choices = Choices(2, MAX_TOKENS, TOKENS_TO_SCORE)
    for frame in step.frames:
        _take(frame, choices)
    # What a request holds goes to the next worker.
    points = [m.ResumePoint(index, m.pack_token_ids(choices[index].token_ids), 0) for index in range(len(choices))]
    msgspec.msgpack.encode(points)
    assert choices.held_tokens() <= len(choices) * MAX_TOKENS
    assert choices.scored_tokens <= TOKENS_TO_SCORE


def _take(frame: m.Frame, choices: Choices) -> None:
    if isinstance(frame, m.Accepted):
        if why_implausible(frame) is None:
            choices.generated_by(frame)
    elif isinstance(frame, (m.Tokens, Deltas)):
        choices.take(frame)
    elif isinstance(frame, m.Vector):
        choices.add_vector(frame)
    elif isinstance(frame, m.Finished):
        timings = plausible_timings(frame.timings, 1.0)
        assert timings is None or timings.prefill_ms >= 0
        prompt_tokens, cached_tokens = plausible_prompt(frame, choices, PROMPT_TOKENS)
        assert 0 <= cached_tokens <= prompt_tokens
    elif isinstance(frame, m.Failed):
        choices.is_final(frame)
        plausible_timings(frame.timings, 1.0)
    elif isinstance(frame, m.UnreadableFrame):
        assert isinstance(frame.is_known, bool)
