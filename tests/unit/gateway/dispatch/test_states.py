"""The states of a request: their transitions, the code that changes them, and when the request is settled."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.dispatch import lifecycle
from gateway.dispatch.lifecycle import TRANSITIONS, State
from gateway.errors import Failure
from protocol.errors import ErrorCode
from tests.unit.gateway.dispatch.opened_requests import accepted, finished, open_request, tokens

ROOT = Path(__file__).resolve().parents[4]
IN_THE_FILE = re.compile(r"^# ([A-Z]+) ──> ([A-Z]+) +\S", re.MULTILINE)
IN_ARCHITECTURE = re.compile(r"^    ([A-Z]+) --> ([A-Z]+):", re.MULTILINE)


@pytest.mark.parametrize(
    ("path", "arrow"),
    [(Path(lifecycle.__file__), IN_THE_FILE), (ROOT / "docs/ARCHITECTURE.md", IN_ARCHITECTURE)],
    ids=["lifecycle.py", "ARCHITECTURE.md"],
)
def test_the_drawing_is_true(path: Path, arrow: re.Pattern[str]) -> None:
    drawn = arrow.findall(path.read_text())
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {(old.name, new.name) for old, following in TRANSITIONS.items() for new in following}
    assert set(TRANSITIONS) == set(State)


def root_of(node: ast.expr) -> str:
    """Return the first name of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assigned(source: str) -> Iterator[str]:
    """Yield a source's assignments to attributes of ``request`` and of its parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and root_of(node) == "request":
            yield ast.unparse(node)


def test_only_the_lifecycle_writes_to_a_request() -> None:
    others = [path for path in (ROOT / "gateway").rglob("*.py") if path.name != "lifecycle.py"]
    assert len(others) > 100
    assert [f"{path}: {what}" for path in others for what in assigned(path.read_text())] == []


def test_another_writer_would_be_found() -> None:
    assert [
        *assigned("request.state = ENDED\nrequest.current.seq += 1\nself.request = body\nstate = request.state")
    ] == [
        "request.state",
        "request.current.seq",
    ]


def test_only_drawn_transitions_are_allowed() -> None:
    request, _ = open_request()
    request.end_at_once(Failure(ErrorCode.INTERNAL_ERROR, "broken"), 1.0)
    with pytest.raises(RuntimeError, match="cannot become running: it is ended"):
        request._enter(State.RUNNING)


def test_it_is_settled_once_its_answer_is_closed() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, finish_reason="stop"), finished(2)):
        request.on_frame("w", frame, 1.0)
    assert (request.state, actions.ends, actions.statuses) == (State.ENDED, 1, [])
    request.close(200, 2.0)
    request.close(None, 3.0)
    assert (request.state, actions.ends, actions.statuses) == (State.SETTLED, 1, [200])


def test_it_is_settled_once_its_worker_reported_the_counts() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.close(None, 2.0)
    assert (request.state, actions.statuses) == (State.STOPPING, [])
    request.on_frame("w", finished(1), 3.0)
    assert (request.state, actions.statuses) == (State.SETTLED, [None])


@pytest.mark.parametrize(("is_answered", "status"), [(True, 200), (False, 503)])
def test_shutdown_settles_it_in_its_current_state(is_answered: bool, status: int) -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    if is_answered:  # but read slowly
        request.on_frame("w", tokens(1, finish_reason="stop"), 1.0)
        request.on_frame("w", finished(2), 1.0)
    request.settle_as_it_stands(Failure(ErrorCode.SHUTTING_DOWN, "leaving"), 2.0)
    assert (request.state, actions.statuses) == (State.SETTLED, [status])
