"""Functions common to all processes: settings, waiting, signals, memory, child processes."""

import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import logging
import os
import random
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator

from protocol.distribution import install_command

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# --- settings ---------------------------------------------------------------------------------------------------------
#
# The base of all configuration sections: frozen, validated, passed down.

PORT_PLACE: Final = "{port}"  # in a server's command and URL: replaced by a port chosen at start


class Settings(BaseModel):
    """Base of all settings: immutable; unknown keys are errors that name the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def in_url(host: str) -> str:
    """Return a host for a URL, with an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url_parts(url: str) -> SplitResult:
    """Split an absolute URL to which paths can be appended. Raises ValueError."""
    if any(character.isspace() for character in url):
        raise ValueError("must not contain white space")
    try:
        parts = urlsplit(url.replace(PORT_PLACE, "1"))
        port = parts.port
    except ValueError as error:
        raise ValueError(
            f"{error}; write http://host:port, and an IPv6 address in brackets: http://[::1]:8000"
        ) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be an absolute URL: https://host, or http://host:port")
    if port == 0:
        raise ValueError("Port out of range 1-65535")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("must not have a query (?…) or a fragment (#…): paths are appended to it")
    return parts


def _is_http_url(url: str) -> str:
    http_url_parts(url)
    return url


def _is_header_text(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError("must be printable ASCII without leading or trailing white space")
    return value


def _is_host(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", host):
            raise ValueError('must be only an address or a name: "127.0.0.1", "0.0.0.0", "::"') from None
    return host


PositiveInt = Annotated[int, Field(gt=0)]
HostText = Annotated[str, AfterValidator(_is_host)]  # of a listening address; IPv6 without brackets
HeaderSecret = Annotated[SecretStr, AfterValidator(_is_header_text)]  # an HTTP client's error would show an invalid one
HttpUrlText = Annotated[str, AfterValidator(_is_http_url)]
PositiveSeconds = Annotated[float, Field(gt=0, le=31_536_000)]  # a year, because TTLs and timers accept no infinity


# --- telemetry --------------------------------------------------------------------------------------------------------
#
# Settings of trace export, shared by every process that creates spans.


class TelemetrySettings(Settings):
    """``[telemetry]``: traces to an OpenTelemetry collector by OTLP over HTTP. Disabled without ``otlp_endpoint``."""

    # Like OTEL_EXPORTER_OTLP_ENDPOINT: "/v1/traces" is appended.
    otlp_endpoint: HttpUrlText | None = None
    headers: dict[str, str] = Field(default={}, repr=False)  # of each export, such as an API key
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # of requests whose clients did not decide it
    service_name: Annotated[str, Field(min_length=1)] = "spillway"  # "-gateway" and "-worker" are appended
    resource_attributes: dict[str, str] = Field(default={})
    export_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0  # of one export; failed exports are dropped
    max_queued_spans: Annotated[int, Field(ge=512, le=1_000_000)] = 8192  # then the oldest are dropped

    @field_validator("otlp_endpoint")
    @classmethod
    def _needs_the_extra(cls, endpoint: str | None) -> str | None:
        # The top-level package alone is not enough: other libraries install the API without the SDK.
        if endpoint is not None and not traces_installed():
            raise ValueError(f"traces need the extra 'otel': {install_command('otel')}")
        return endpoint


def traces_installed() -> bool:
    """Return whether the packages for traces are installed."""
    return _is_installed("sdk.trace") and _is_installed("exporter.otlp.proto.http")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(f"opentelemetry.{module}") is not None
    except ModuleNotFoundError:  # for a parent package
        return False


# --- backoff ----------------------------------------------------------------------------------------------------------
#
# Backoff: waits that grow, with jitter.

FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0  # the longest time that backoff adds to an outage


def backoff_s(longest_s: float = LONGEST_WAIT_S) -> Iterator[float]:
    """Yield waits in seconds without end, doubling up to ``longest_s``, each reduced by up to half at random."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s * random.uniform(0.5, 1.0)  # noqa: S311
        wait_s = min(2 * wait_s, longest_s)


async def wait_for(event: asyncio.Event, limit_s: float) -> bool:
    """Wait at most ``limit_s`` until the event is set; return whether it is."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def unless_set(stop: asyncio.Event, work: Awaitable[_Result]) -> _Result | None:
    """Return the result of ``work``, or None if ``stop`` is set first. Raises the errors of ``work``."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopped.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


@contextlib.contextmanager
def calling_once(event: asyncio.Event, callback: Callable[[], object]) -> Iterator[None]:
    """Call ``callback`` once if the event is set within the context."""
    watcher = asyncio.create_task(event.wait())
    watcher.add_done_callback(lambda watcher: None if watcher.cancelled() else callback())
    try:
        yield
    finally:
        watcher.cancel()


# --- signals ----------------------------------------------------------------------------------------------------------
#
# SIGTERM and SIGINT in processes that shut down cleanly.

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_stop_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call ``handle`` on the running loop for each of ``STOP_SIGNALS``; restore Python's handlers at the end.

    uvloop leaves its handlers in place when it is closed, and the process would then ignore Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


# --- memory ----------------------------------------------------------------------------------------------------------
#
# How Python and glibc free memory in processes with many small requests and occasional large ones.

# Threshold of the collector's youngest generation. CPython's default of 700 is passed several times per request. With
# this one, reference cycles take some megabytes more before they are found.
YOUNGEST: Final = 20_000


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, and exclude them from it: they are no garbage.

    It takes a seventh of the import time, and without this as much again when the process ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_heap() -> None:
    """Exclude existing objects from garbage collection, and collect less often. Call it before serving."""
    gc.collect()
    gc.freeze()  # several 100,000 objects of libraries
    _, middle, oldest = gc.get_threshold()
    gc.set_threshold(YOUNGEST, middle, oldest)


MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of mallopt(3)
LARGE_BYTES: Final = 256 * 1024


def return_large_memory() -> None:
    """Return large allocations to the system as soon as they are freed. Not for processes that compute.

    By default glibc raises the threshold for this to the size of the largest body (mallopt(3)). Bodies of megabytes
    then fragment the heaps of many threads: a gateway kept 330 MiB, and 170 to 220 MiB with this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


# --- children ---------------------------------------------------------------------------------------------------------
#
# Child processes: their environments, stopping them, their exit status, and bounded restarts.
#
# The own environment has the database's password, the pepper and the queue's credentials.
#
# ``plain_environment``       for a process that reads data of a client or worker: only what an interpreter needs
# ``without_own_variables``   for an operator's program, which may need its own variables: all but Spillway's

KILLED_LIMIT_S: Final = 5.0  # for a killed process to end
LONGEST_RESTART_WAIT_S: Final = 60.0
OWN_VARIABLES: Final = "SPILLWAY_"
# Paths of programs and libraries, locale, time zone and temporary files.
_PLAIN: Final = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX",
)  # fmt: skip


async def stop_process(
    process: asyncio.subprocess.Process,
    name: str,
    limit_s: float,
    ask: Callable[[], object] | None = None,
    *,
    killed_limit_s: float = KILLED_LIMIT_S,
) -> None:
    """Ask a process to end, by SIGTERM or ``ask``; kill it after ``limit_s``, and wait ``killed_limit_s`` for its end.

    asyncio's own loop, unlike uvloop, also waits for the end of its pipes, which another process may keep open.
    """
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        (ask or process.terminate)()
    if await _has_ended(process, limit_s):
        return
    log.warning("%s did not end within %g s: killing it", name, limit_s)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if not await _has_ended(process, killed_limit_s):
        log.warning("%s was killed, and did not end within %g s", name, killed_limit_s)


async def write_to(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a child process, and wait while the pipe is full. Raises ConnectionError if the child has closed it."""
    if pipe.is_closing():  # uvloop would raise RuntimeError
        raise ConnectionResetError("the process has closed its input")
    pipe.write(data)
    await pipe.drain()


async def _has_ended(process: asyncio.subprocess.Process, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


class Restarts:
    """Counts the deaths of one process, to give it up if it dies too often."""

    def __init__(
        self, most: int, window_s: float, first_wait_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``most``: restarts within ``window_s``. ``first_wait_s``: before the first restart; doubles each time."""
        self.most = most
        self.window_s = window_s
        self._first_wait_s = first_wait_s
        self._clock_s = clock_s
        self._deaths_s: deque[float] = deque(maxlen=most)

    def wait_s(self) -> float | None:
        """Count a death; return the wait before the next start, or None if the process died too often."""
        now_s = self._clock_s()
        recent = sum(now_s - death_s < self.window_s for death_s in self._deaths_s)
        if recent == self.most:
            return None
        self._deaths_s.append(now_s)
        return min(LONGEST_RESTART_WAIT_S, self._first_wait_s * 2.0**recent)


def ending(code: int) -> str:
    """Describe how a process ended: ``exit code 3`` or ``signal SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"signal {known.get(-code, -code)}"


def plain_environment() -> dict[str, str]:
    """Return the environment of a Python process without secrets and with this process's import path."""
    kept = {name: os.environ[name] for name in _PLAIN if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


def without_own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Spillway's variables, which include secrets."""
    return {name: value for name, value in environment.items() if not name.upper().startswith(OWN_VARIABLES)}
