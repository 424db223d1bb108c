"""The same text means the same weights: who may go on with a request when a model's workers are changed for others.

What is made already goes on only with the weights that have made it, and a prompt's token ids only to their tokenizer
(``Job.revision``; workers leave to others what is not theirs). Where nobody who may take a request is alive, and others
run its model, one that has told its caller nothing starts again; a stream that has begun waits a little, as its worker
may come back, and then ends with an error: it never goes on with other weights.
"""

from collections.abc import Iterable
from typing import Final

from gateway.dispatch.mailbox import Failure
from gateway.dispatch.request import OpenRequest
from gateway.dispatch.states import State
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.messages import Heartbeat, Revision

TOKENIZER_WAIT_S: Final = 5.0  # longer than it takes from a card to the first heartbeat of the worker that published it


class LiveRevisions:
    """What the live workers run, by model. Hosted ones aside: nobody waits for them."""

    def __init__(self, beats: Iterable[Heartbeat]) -> None:
        self._by_model: dict[str, set[Revision]] = {}
        for beat in beats:
            if not beat.draining and beat.tier != subjects.HOSTED_TIER:
                for model in beat.models:
                    self._by_model.setdefault(model, set()).add(beat.revisions.get(model, Revision()))

    def is_changed(self, request: OpenRequest) -> bool:
        """Whether workers run its model, and none of them may take it."""
        if request.current.hosted is not None:
            return False
        live = self._by_model.get(request.admission.model, ())
        held, tokenizer = request.choices.revision, request.admission.tokenizer
        if any(own.tokenizer == tokenizer and (not held or own.weights == held) for own in live):
            return False  # the usual case, at once
        return bool(live) and not any(_agree(needed_revision(request), own) for own in live)


def needed_revision(request: OpenRequest) -> Revision:
    """What a worker must run to take the request's next attempt."""
    return Revision(request.choices.revision if request.choices.hold_something else "", request.admission.tokenizer)


def revisions_agree(needed: Revision, beat: Heartbeat, model: str) -> bool:
    """Whether a worker may take what needs this revision."""
    return _agree(needed, beat.revisions.get(model, Revision()))


def _agree(needed: Revision, own: Revision) -> bool:
    is_same = needed.weights == own.weights or not (needed.weights and own.weights)
    return is_same and (needed.tokenizer == own.tokenizer or not (needed.tokenizer and own.tokenizer))


def go_on_without(request: OpenRequest, revision_wait_s: float, now_s: float) -> None:
    """Nobody who runs a waiting request's model may take it: start it again, wait, or end it."""
    if request.state is not State.QUEUED:
        return
    waited_s = now_s - request.current.queued_s
    if not request.choices.hold_something:
        if waited_s >= TOKENIZER_WAIT_S:
            message = "the model's tokenizer was changed while the request waited for a worker: send it again"
            request.fail(Failure(ErrorCode.MODEL_CHANGED, message), now_s)
    elif not request.admission.stream:
        request.choices.clear()
        request.current.tokens_before = 0
        request.mailbox.drop(request.request_id)
        message = "nobody runs the weights any more that had made a part of the answer"
        request.job_vanished(request.attempt, now_s, Failure(ErrorCode.MODEL_CHANGED, message))
    elif waited_s >= revision_wait_s:
        message = "the model was changed during the answer, and nobody runs any more what had begun it"
        request.fail(Failure(ErrorCode.MODEL_CHANGED, message), now_s)
