"""Fixtures that several kinds of test share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nats_server import NatsServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A fresh, empty nats-server of the test's own; it starts in some 50 ms. Tests may kill and restart it."""
    folder = tmp_path / "nats-server"
    folder.mkdir()
    server = NatsServer(folder)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The URL of the test's own nats-server."""
    return nats_server.url
