"""Logging of all Spillway processes: one JSON object per line, or coloured text on a terminal."""

import datetime as dt
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import structlog

_encode_json = msgspec.json.Encoder().encode


class _JsonLines(structlog.stdlib.ProcessorFormatter):
    """Formats records with a mapping of ``fields`` at a fraction of structlog's cost: there is one per request."""

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
            return super().format(record)
        head = {
            "process": self._process,
            "event": record.msg,
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": dt.datetime.fromtimestamp(record.created, dt.UTC),
        }
        return _encode_json({**head, **fields}).decode()


def _flatten(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event.update(event.pop("fields", {}))
    return event


def configure(process: str, *, level: int = logging.INFO) -> None:
    """Send the standard library's log records to stderr, each with the time, the level and the process's name."""
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
        shared.pop()  # the console renderer formats exceptions itself, in colour
    formatter_class = structlog.stdlib.ProcessorFormatter if sys.stderr.isatty() else partial(_JsonLines, process)
    formatter = formatter_class(
        foreign_pre_chain=shared,
        processors=[
            lambda _logger, _name, event: {"process": process, **event},
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            renderer,
        ],
    )
    # Our lines do not show these fields, so they need not be collected: Python's "Logging HOWTO", "Optimization".
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # noqa: SLF001
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "aiosqlite", "alembic", "botocore", "uvicorn.error", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
