"""SIGTERM and SIGINT in processes that end in order."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_stop_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call ``handle`` on the running loop for each of ``STOP_SIGNALS``; afterwards Python's own handlers are back.

    uvloop leaves its handlers in place when it is closed, and a process that goes on would then ignore Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
