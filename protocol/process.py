"""What each process does alike: settings, waiting, signals, memory, children."""

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
# The base of all sections of a configuration: frozen, validated, passed down.

PORT_PLACE: Final = "{port}"  # in a server's command and URL: a port that is chosen when it starts


class Settings(BaseModel):
    """Base of all settings: immutable, and unknown keys are errors that name the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def in_url(host: str) -> str:
    """Return a host as URLs write it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url_parts(url: str) -> SplitResult:
    """Return the parts of an absolute URL that paths can be appended to. Raises ValueError."""
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
HostText = Annotated[str, AfterValidator(_is_host)]  # of an address to listen at; an IPv6 one has no brackets here
HeaderSecret = Annotated[SecretStr, AfterValidator(_is_header_text)]  # an HTTP client's error would show another
HttpUrlText = Annotated[str, AfterValidator(_is_http_url)]
PositiveSeconds = Annotated[float, Field(gt=0, le=31_536_000)]  # a year: TTLs and timers take no infinity


# --- telemetry --------------------------------------------------------------------------------------------------------
#
# Settings of trace export, shared by every process that creates spans.


class TelemetrySettings(Settings):
    """``[telemetry]``: traces to an OpenTelemetry collector, by OTLP over HTTP. Without ``otlp_endpoint``: none."""

    # As OTEL_EXPORTER_OTLP_ENDPOINT: "/v1/traces" is appended to it.
    otlp_endpoint: HttpUrlText | None = None
    headers: dict[str, str] = Field(default={}, repr=False)  # of each export, such as an API key
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # of requests whose callers have not decided it
    service_name: Annotated[str, Field(min_length=1)] = "spillway"  # "-gateway" and "-worker" are appended
    resource_attributes: dict[str, str] = Field(default={})
    export_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0  # of one export; what fails is not kept
    max_queued_spans: Annotated[int, Field(ge=512, le=1_000_000)] = 8192  # that wait for export; the oldest go

    @field_validator("otlp_endpoint")
    @classmethod
    def _needs_the_extra(cls, endpoint: str | None) -> str | None:
        # The top package alone may be there: other libraries bring the API without the SDK.
        if endpoint is not None and not traces_installed():
            raise ValueError(f"traces need the extra 'otel': {install_command('otel')}")
        return endpoint


def traces_installed() -> bool:
    """Return whether the packages that send traces are installed."""
    return _is_installed("sdk.trace") and _is_installed("exporter.otlp.proto.http")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(f"opentelemetry.{module}") is not None
    except ModuleNotFoundError:  # of a package above it
        return False


# --- backoff ----------------------------------------------------------------------------------------------------------
#
# Waiting for what is away: longer each time, never all at once.

FIRST_WAIT_S: Final = 0.1
LONGEST_WAIT_S: Final = 2.0  # what is added, at worst, to the outage of whatever is waited for


def backoff_s(longest_s: float = LONGEST_WAIT_S) -> Iterator[float]:
    """Yield waits in seconds, without end: doubling up to ``longest_s``, each jittered down to half of itself."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s * random.uniform(0.5, 1.0)  # noqa: S311
        wait_s = min(2 * wait_s, longest_s)


async def wait_for(event: asyncio.Event, limit_s: float) -> bool:
    """Wait until the event is set, at most ``limit_s``; whether it is."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return event.is_set()


async def unless_set(stop: asyncio.Event, work: Awaitable[_Result]) -> _Result | None:
    """Do the work; None if ``stop`` is set before it is done. Raises what the work raises."""
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
    """Call back, should the event be set meanwhile."""
    watcher = asyncio.create_task(event.wait())
    watcher.add_done_callback(lambda watcher: None if watcher.cancelled() else callback())
    try:
        yield
    finally:
        watcher.cancel()


# --- signals ----------------------------------------------------------------------------------------------------------
#
# SIGTERM and SIGINT in processes that end in order.

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


# --- garbage ----------------------------------------------------------------------------------------------------------
#
# How Python and glibc free memory, in processes that handle many small requests, and now and then a large one.

# Of objects made and not yet freed, from which on the youngest are looked through; CPython's own is 700, which one
# request passes several times. Circles that nobody holds then take some megabytes more before they are found.
YOUNGEST: Final = 20_000


def calm_garbage_collection() -> None:
    """Look for garbage less often, and never again in what is there now: call it when a process is about to serve."""
    gc.collect()
    gc.freeze()  # libraries: several 100,000 objects
    _, middle, oldest = gc.get_threshold()
    gc.set_threshold(YOUNGEST, middle, oldest)


MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of mallopt(3)
LARGE_BYTES: Final = 256 * 1024


def return_large_memory() -> None:
    """Have the allocator return what is large to the system as soon as it is freed; not for processes that compute.

    By default glibc raises the size from which on it does so to that of the largest body (mallopt(3)). Bodies of
    megabytes then leave holes in the heaps of many threads: a gateway kept 330 MiB of them, and 170 to 220 with this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


# --- children ---------------------------------------------------------------------------------------------------------
#
# Processes that we start: their environments, how they are ended, how they ended, and how often they may.
#
# Ours holds the database's password, the pepper and the queue's credentials.
#
# ``plain_environment``       a process that reads what a caller or a worker has sent: only what an interpreter needs
# ``without_own_variables``   an operator's program, which has variables of its own in ours: all but Spillway's

KILLED_LIMIT_S: Final = 5.0  # for a killed process to be gone
LONGEST_RESTART_WAIT_S: Final = 60.0
OWN_VARIABLES: Final = "SPILLWAY_"
# Where programs and libraries lie, and how texts, times and temporary files are dealt with.
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
    """Ask a process to end, by SIGTERM or as ``ask`` does, and kill it after ``limit_s``.

    asyncio waits for the end of its pipes, too, which another process may hold: for ``killed_limit_s`` at most.
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
        log.warning("%s was killed, and its output is still open after %g s", name, killed_limit_s)


async def _has_ended(process: asyncio.subprocess.Process, limit_s: float) -> bool:
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


class Restarts:
    """Counts how often one process has died, so that one that dies again and again is given up."""

    def __init__(
        self, most: int, window_s: float, first_wait_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """``most``: restarts within ``window_s``. ``first_wait_s``: before the first; doubled for each further one."""
        self.most = most
        self.window_s = window_s
        self._first_wait_s = first_wait_s
        self._clock_s = clock_s
        self._deaths_s: deque[float] = deque(maxlen=most)

    def wait_s(self) -> float | None:
        """Count a death; return how long to wait before the next start. None: it has died too often."""
        now_s = self._clock_s()
        recent = sum(now_s - death_s < self.window_s for death_s in self._deaths_s)
        if recent == self.most:
            return None
        self._deaths_s.append(now_s)
        return min(LONGEST_RESTART_WAIT_S, self._first_wait_s * 2.0**recent)


def ending(code: int) -> str:
    """Return how a process ended, for a message: ``exit code 3`` or ``signal SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"signal {known.get(-code, -code)}"


def plain_environment() -> dict[str, str]:
    """Return the environment of a Python process that needs no secret, with the same import path as ours."""
    kept = {name: os.environ[name] for name in _PLAIN if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


def without_own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that configure Spillway, secrets included."""
    return {name: value for name, value in environment.items() if not name.upper().startswith(OWN_VARIABLES)}
