"""A model's workers are replaced while requests wait: which requests continue, and how the others end."""

import dataclasses
from typing import Any

from msgspec.structs import replace

from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.revisions import TOKENIZER_WAIT_S, LiveRevisions, needed_revision, restart_or_fail
from protocol.errors import ErrorCode
from protocol.job import PROTOCOL_VERSION, Heartbeat, Revision
from tests.unit.gateway.dispatch.opened_requests import accepted, lose_worker, open_request, tokens

WAIT_S = 30.0
OLD, NEW = Revision("old", "t"), Revision("new", "t")


def beat(revision: Revision | None, **fields: Any) -> Heartbeat:
    revisions = {} if revision is None else {"m": revision}
    names = ("w", "p", "x", "eu", "spot", "e", ("m",))
    return Heartbeat(PROTOCOL_VERSION, *names, 0.5, 4, 400, 4, 400, 0, 1, 2, revisions=revisions, **fields)


def live(*revisions: Revision | None) -> LiveRevisions:
    return LiveRevisions(beat(revision) for revision in revisions)


def begun(*, stream: bool = True, n: int = 1, trusted: bool = False) -> OpenRequest:
    """Return a request whose first attempt generated a token with the old weights, and that waits since 10.0 s."""
    request, _ = open_request(n=n, stream=stream, trusted=trusted)
    request.on_frame("w", replace(accepted(), revision="old"), 0.1)
    request.on_frame("w", tokens(1), 0.2)
    lose_worker(request, 10.0)
    return request


def test_which_workers_may_take_a_request() -> None:
    fresh, _ = open_request()
    assert not live(NEW).is_changed(fresh)
    request = begun()
    assert needed_revision(request).weights == "old"
    assert not live(NEW, OLD).is_changed(request)
    assert live(NEW).is_changed(request)
    assert not live().is_changed(request), "without live workers it keeps waiting"
    assert not live(NEW, None).is_changed(request), "an older worker does not tell"
    draining = LiveRevisions([beat(NEW), beat(OLD, draining=True)])
    assert draining.is_changed(request)


def test_a_request_without_output_may_run_anywhere() -> None:
    request, _ = open_request()
    request.on_frame("w", replace(accepted(), revision="old"), 0.1)
    lose_worker(request, 1.0)
    assert needed_revision(request).weights == ""
    request.on_frame("w2", replace(accepted(2), revision="new"), 1.1)
    request.on_frame("w2", tokens(1, attempt=2), 1.2)
    assert needed_revision(request).weights == "new"


def test_the_first_weights_count_for_all_attempts() -> None:
    request = begun()
    request.on_frame(
        "w2", replace(accepted(2), revision=""), 11.0
    )  # a worker of an older release, which does not check it
    request.on_frame("w2", tokens(1, attempt=2), 11.1)
    lose_worker(request, 12.0)
    assert needed_revision(request).weights == "old"


def test_a_stream_that_has_begun_waits_and_then_ends_with_an_error() -> None:
    request = begun()
    restart_or_fail(request, WAIT_S, 10.0 + WAIT_S - 0.1)
    assert request.state is State.QUEUED
    restart_or_fail(request, WAIT_S, 10.0 + WAIT_S)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.MODEL_CHANGED


def test_an_unsent_answer_starts_again() -> None:
    request = begun(stream=False, n=2)
    restart_or_fail(request, WAIT_S, 10.3)
    assert (request.state, request.attempt) == (State.QUEUED, 3)
    assert request.choices.resume_points() == ()
    assert needed_revision(request).weights == ""
    request.on_frame("w3", replace(accepted(3), revision="new"), 11.0)
    for index in range(2):
        request.on_frame("w3", tokens(1 + index, "y", attempt=3, index=index, finish_reason="stop"), 11.1)
    assert [frame.text for frame in request.mailbox.tokens()] == ["y", "y"]
    assert request.completion_tokens == 2
    assert request.choices.are_complete()


def test_a_prompt_of_another_tokenizer_is_not_kept_waiting() -> None:
    request, _ = open_request()
    request.admission = dataclasses.replace(request.admission, tokenizer="old tokens")
    assert live(Revision("new", "new tokens")).is_changed(request)
    assert not live(Revision("any", "old tokens")).is_changed(request)
    assert not live(Revision("older")).is_changed(request)
    restart_or_fail(request, WAIT_S, TOKENIZER_WAIT_S - 0.1)
    assert request.state is State.QUEUED
    restart_or_fail(request, WAIT_S, TOKENIZER_WAIT_S)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.MODEL_CHANGED


def test_only_workers_of_its_queue_count() -> None:
    request = begun(trusted=True)
    assert not live(NEW).is_changed(request), "no live worker may take it"
    assert LiveRevisions([beat(NEW, trusted=True), beat(OLD)]).is_changed(request)
    assert not LiveRevisions([beat(NEW), beat(OLD, trusted=True)]).is_changed(request)
