"""``python -m spillway``: the same as the ``spillway`` command."""

from spillway.cli import app

app()
