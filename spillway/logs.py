"""How every Spillway process logs: one JSON object a line, or coloured text on a terminal."""

import logging
import sys

import structlog


def configure(process: str, *, level: int = logging.INFO) -> None:
    """Send the standard library's log records to stderr, each with the time, the level and the process's name."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor
    renderer = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        shared.pop()  # the console renderer formats exceptions itself, in colour
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            lambda _logger, _name, event: {"process": process, **event},
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "aiosqlite", "alembic", "uvicorn.error", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
