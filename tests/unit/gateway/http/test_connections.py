"""State of all connections. Single connections are tested at the socket."""

import resource

import pytest

from gateway.http.server import OTHER_FILES, files_allow
from gateway.settings import ConnectionSettings

LONGEST_USUAL_S = 600  # Google's load balancers


def test_idle_connections_outlive_those_of_clients_and_proxies() -> None:
    """Equal timeouts would be worst: the next request arrives while the connection closes."""
    assert ConnectionSettings().keep_alive_s > LONGEST_USUAL_S


def test_the_open_file_limit_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = OTHER_FILES + 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        assert files_allow(10) == 10
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
        assert files_allow(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == OTHER_FILES + 400
        assert not caplog.records
        if before[1] != resource.RLIM_INFINITY:
            assert files_allow(before[1]) == before[1] - OTHER_FILES
            assert "accepting at most" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
