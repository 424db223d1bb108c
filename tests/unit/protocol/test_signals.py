"""SIGTERM and SIGINT while a process serves, and afterwards."""

import os
import signal

import pytest
import uvloop

from protocol.process import STOP_SIGNALS, on_stop_signals
from tests.waiting import until


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_are_handled_while_it_serves_and_have_pythons_handlers_afterwards(number: signal.Signals) -> None:
    # A shell without job control starts background processes with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers_before = [signal.getsignal(each) for each in STOP_SIGNALS]
    taken: list[str] = []

    async def serve() -> None:
        with on_stop_signals(lambda: taken.append("stop")):
            os.kill(os.getpid(), number)
            await until(lambda: taken == ["stop"])

    uvloop.run(serve())
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == handlers_before
    signal.signal(signal.SIGINT, before)
