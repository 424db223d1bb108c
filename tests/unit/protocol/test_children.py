"""How the end of a process is told."""

import pytest

from protocol.process import ending


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "exit code 0"), (3, "exit code 3"), (-11, "signal SIGSEGV"), (-9, "signal SIGKILL"), (-40, "signal 40")],
)
def test_an_end_is_named_by_its_code_or_its_signal(code: int, said: str) -> None:
    assert ending(code) == said
