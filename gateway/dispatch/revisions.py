"""Revisions: which workers may continue a request when a model's workers are replaced.

A partial answer continues only with the weights that generated it, and token ids are valid only for their tokenizer
(``Job.revision``; workers leave other jobs to others). If no live worker may take a request, but others run its model,
a request that sent nothing to its client starts again. A stream that has begun waits a little, because its worker may
return, and then ends with an error: it never continues with other weights.
"""

import math
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from gateway.dispatch.lifecycle import OpenRequest, RequestState, State, answer_cut, drop_answer
from gateway.errors import Failure
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.job import NO_TOKENIZER, TAKES_MESSAGES, Heartbeat, Input, Revision

TOKENIZER_WAIT_S: Final = 5.0  # longer than from a model card to the first heartbeat of its worker


class ServingWorker(NamedTuple):
    """How a worker serves a model, from its heartbeat."""

    revision: Revision
    takes: Input
    continues: bool  # whether it resumes answers of other workers

    @classmethod
    def of(cls, beat: Heartbeat, model: str) -> "ServingWorker":
        """Return how the sender of a heartbeat serves a model."""
        return cls(beat.revisions.get(model, Revision()), beat.takes, beat.continues)

    def may_take(self, request: RequestState) -> bool:
        """Return whether the worker may run a request's next attempt and can continue the held output."""
        choices = request.choices
        if choices.has_output and not self.continues:
            return False
        if self.takes == TAKES_MESSAGES:
            reads = choices.packed_chat is not None and choices.takes_messages
        else:
            reads = choices.takes_ids
        return reads and _agree(needed_revision(request), self.revision)


class LiveRevisions:
    """The revisions of live workers by queue, without hosted ones unless there are no others."""

    def __init__(self, beats: Iterable[Heartbeat], only_hosted: Collection[str] = ()) -> None:
        """``only_hosted``: models that only hosted pools serve."""
        self._by_queue: dict[str, set[ServingWorker]] = {}
        self._all: dict[str, set[ServingWorker]] = {}  # hosted ones, too
        # The shortest wait that servers ask for, by queue and provider ("": own). 0 for broken ones: they may recover.
        self._waits_s: dict[tuple[str, str], float] = {}
        for beat in beats:
            is_hosted = beat.tier == subjects.HOSTED_TIER
            wait_s = 0.0 if beat.paused is None else beat.paused.wait_ms / 1000
            for model, queue in () if beat.draining else zip(beat.models, beat.queues, strict=True):
                taker = ServingWorker.of(beat, model)
                self._all.setdefault(queue, set()).add(taker)
                servers = queue, beat.provider if is_hosted else ""
                self._waits_s[servers] = min(wait_s, self._waits_s.get(servers, math.inf))
                if not is_hosted or model in only_hosted:
                    self._by_queue.setdefault(queue, set()).add(taker)

    def look(self, request: OpenRequest, revision_wait_s: float, now_s: float) -> None:
        """End or restart a waiting request that no live worker may take in time."""
        self._refuse_if_late(request, now_s)
        if request.state is State.QUEUED and self.is_changed(request):
            restart_or_fail(request, revision_wait_s, now_s, is_cut=self.is_cut(request))

    def _refuse_if_late(self, request: OpenRequest, now_s: float) -> None:
        """End a waiting request if its model's servers all ask to wait longer than it may wait."""
        queue = request.admission.queue
        wait_s = min(self._waits_s.get((queue, one), math.inf) for one in ("", *request.admission.hosted))
        if 0 < wait_s < math.inf and now_s + wait_s > request.queue_deadline_s:
            message = f"The servers of this model ask to wait {wait_s:.0f} s, longer than the request may wait."
            request.fail(Failure(ErrorCode.WAIT_TOO_LONG, message, retry_after_s=math.ceil(wait_s)), now_s)

    def is_changed(self, request: OpenRequest) -> bool:
        """Return whether workers run the request's model, but none of them may take it."""
        if request.current.hosted is not None:
            return False
        live = self._by_queue.get(request.admission.queue, ())
        held, tokenizer, choices = request.choices.revision, request.admission.tokenizer, request.choices
        if choices.takes_ids and any(
            own.continues
            and own.takes != TAKES_MESSAGES
            and own.revision.tokenizer == tokenizer
            and (not held or own.revision.weights == held)
            for own in live
        ):
            return False  # the usual case, checked first
        if tokenizer == NO_TOKENIZER and not choices.has_output:
            return False  # the request was never for workers that take token ids
        return bool(live) and not any(own.may_take(request) for own in live)

    def is_cut(self, request: OpenRequest) -> bool:
        """Return whether a worker runs the weights that began the answer, but cannot continue it."""
        held = request.choices.revision if request.choices.has_output else ""
        live = self._all.get(request.admission.queue, ())
        return bool(held) and any(own.revision.weights == held and not own.may_take(request) for own in live)


def needed_revision(request: RequestState) -> Revision:
    """Return the revision that a worker must run to take the request's next attempt."""
    choices = request.choices
    tokenizer = request.admission.tokenizer if choices.takes_ids else NO_TOKENIZER
    return Revision(choices.revision if choices.has_output else "", tokenizer)


def takers_of(request: RequestState, beats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """Return the workers that could run a request's next attempt, including those of hosted pools it may use."""
    admission = request.admission

    def serves(beat: Heartbeat) -> bool:
        if beat.tier != subjects.HOSTED_TIER:
            return admission.queue in beat.queues
        is_allowed = beat.provider in admission.hosted and beat.pool not in request.log.hosted_failed
        return is_allowed and admission.model in beat.models

    return [beat for beat in beats if serves(beat) and ServingWorker.of(beat, admission.model).may_take(request)]


def _agree(needed: Revision, own: Revision) -> bool:
    is_same = needed.weights == own.weights or not (needed.weights and own.weights)
    return is_same and (needed.tokenizer == own.tokenizer or not (needed.tokenizer and own.tokenizer))


def restart_or_fail(request: OpenRequest, revision_wait_s: float, now_s: float, *, is_cut: bool = False) -> None:
    """Restart, keep or end a waiting request that no worker of its model may take.

    ``is_cut``: a worker runs the same weights, but cannot continue the answer.
    """
    if request.state is not State.QUEUED:
        return
    waited_s = now_s - request.current.queued_s
    if not request.choices.has_output:
        if waited_s >= TOKENIZER_WAIT_S:
            message = "The model's tokenizer changed while the request waited for a worker. Send the request again."
            request.fail(Failure(ErrorCode.MODEL_CHANGED, message), now_s)
    elif not request.admission.prompt.stream:
        drop_answer(request)
        message = "the model version that began this answer is no longer running"
        request.job_vanished(request.attempt, now_s, Failure(ErrorCode.MODEL_CHANGED, message))
    elif is_cut:
        request.fail(answer_cut(request), now_s)
    elif waited_s >= revision_wait_s:
        message = "The model was replaced mid-stream. Send the request again."
        request.fail(Failure(ErrorCode.MODEL_CHANGED, message), now_s)
