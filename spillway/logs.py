"""Logging of all Spillway processes: one JSON object per line, or colored text on a terminal."""

import contextlib
import datetime as dt
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import structlog

from db.accounts.masking import masked

_CHATTY: Final = ("httpx", "aiosqlite", "alembic", "botocore", "uvicorn.error", "urllib3")
_ABOUT_CLIENTS: Final = ("python_multipart",)  # warns of each malformed form: a client could fill the log
# Our lines do not show these fields. Not collecting them saves time: Python's "Logging HOWTO", "Optimization".
_UNUSED_FIELDS: Final = {"logThreads": False, "logProcesses": False, "logMultiprocessing": False, "_srcfile": None}

_encode_json = msgspec.json.Encoder().encode


class _JsonLines(structlog.stdlib.ProcessorFormatter):
    """Formats records with ``fields`` at a fraction of structlog's cost: each request logs one.

    Fields are not masked here. The code that logs them must mask text from clients.
    """

    def __init__(
        self,
        process: str,
        foreign_pre_chain: Sequence[structlog.typing.Processor],
        processors: Sequence[structlog.typing.Processor],
    ) -> None:
        super().__init__(foreign_pre_chain=foreign_pre_chain, processors=processors)
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        fields: Mapping[str, object] | None = getattr(record, "fields", None)
        if fields is None:
            return masked(super().format(record))
        head = {
            "process": self._process,
            "event": record.msg,
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": dt.datetime.fromtimestamp(record.created, dt.UTC),
        }
        return _encode_json({**head, **fields}).decode()


class _MaskedLines(structlog.stdlib.ProcessorFormatter):
    """Formats records for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _flatten(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event.update(event.pop("fields", {}))
    return event


@contextlib.contextmanager
def configured(process: str, *, level: int = logging.INFO) -> Iterator[None]:
    """Send the standard library's log records to stderr, each with the time, the level and the process's name.

    Restores the previous logging at the end, because stderr may be closed afterwards, as in tests of commands.
    """
    root = logging.getLogger()
    levels = {root: level} | {logging.getLogger(name): logging.WARNING for name in _CHATTY}
    levels |= {logging.getLogger(name): logging.ERROR for name in _ABOUT_CLIENTS}
    handlers_before = root.handlers
    levels_before = {logger: logger.level for logger in levels}
    fields_before = {name: getattr(logging, name) for name in _UNUSED_FIELDS}
    root.handlers = [_handler(process)]
    _set(levels, _UNUSED_FIELDS)
    try:
        yield
    finally:
        root.handlers = handlers_before
        _set(levels_before, fields_before)


def is_json() -> bool:
    """Return whether this process logs JSON lines now."""
    return any(isinstance(handler.formatter, _JsonLines) for handler in logging.getLogger().handlers)


def _set(levels: Mapping[logging.Logger, int], fields: Mapping[str, object]) -> None:
    for logger, level in levels.items():
        logger.setLevel(level)
    for name, value in fields.items():
        setattr(logging, name, value)


def _handler(process: str) -> logging.Handler:
    """Return a handler that writes to stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        _flatten,
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        shared.pop()  # the console renderer formats exceptions itself, in color
    formatter_class = _MaskedLines if sys.stderr.isatty() else partial(_JsonLines, process)
    formatter = formatter_class(
        foreign_pre_chain=shared,
        processors=[
            lambda _logger, _name, event: {"process": process, **event},
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    return handler
