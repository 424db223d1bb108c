"""``spillway up``."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.panel import Panel

from console.login.admins import ADMIN_NAME
from pool_worker.settings import LocalEngineSettings
from protocol.distribution import install_command
from spillway import logs
from spillway.cli.context import ConfigOption, DataOption, fail, out, resolve_config, run_async
from spillway.config import DEMO_MODEL_NAME, DEMO_MODEL_PATH, Config, default_config
from spillway.up import Running
from spillway.up import up as run_up

_EXAMPLES: Final[dict[str, tuple[str, dict[str, Any]]]] = {  # by task: path under /v1, and body without the model
    "generate": ("chat/completions", {"stream": True, "messages": [{"role": "user", "content": "What is Spillway?"}]}),
    "embed": ("embeddings", {"input": ["a dam", "a river"]}),
    "score": ("rerank", {"query": "What holds water?", "documents": ["a dam", "a bird"]}),
}


@logs.configured("up")
def up(
    config: ConfigOption = None,
    data: DataOption = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="HTTP port of the gateway. 0: any free port.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model to serve: a folder, a Hugging Face name, or `scripted` (a fake engine)."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=0, max=64, help="Workers per pool on this machine.")] = None,
) -> None:
    """Run all of Spillway on this machine: NATS, gateway, ledger and workers. Ctrl-C shuts it down in order."""
    overrides: dict[str, Any] = {} if port is None else {"gateway": {"port": port}}
    resolved = resolve_config(config, data, overrides)
    if model is not None:
        resolved = serve_model(resolved, model)
    if workers is not None:
        pools = {name: pool.model_copy(update={"workers": workers}) for name, pool in resolved.pools.items()}
        resolved = resolved.model_copy(update={"pools": pools})
    check_local_engines(resolved)
    options = finding_options({"--config": config, "--data": data})

    def say(line: str) -> None:
        out.print(f"[dim]{datetime.now().astimezone():%H:%M:%S}[/dim] {escape(line)}", soft_wrap=True)

    def on_start(running: Running) -> None:
        out.print(Panel(banner(running), title="Spillway is starting", expand=False))

    def on_running(running: Running) -> None:
        say(f"Spillway is running: {running.base_url}/v1")
        out.print(next_commands(running, options), soft_wrap=True, markup=False)
        out.print(curl_command(running), soft_wrap=True, markup=False)
        out.print("")

    run_async(lambda: run_up(resolved, say, on_start, on_running))


def serve_model(config: Config, model: str) -> Config:
    """Replace the configured models and pools with one pool that serves ``model``."""
    return default_config(overrides=config.model_dump(exclude={"models", "pools"}, exclude_unset=True), model=model)


def check_local_engines(config: Config) -> None:
    """Fail on a missing model folder or missing torch before anything is started."""
    for name, pool in config.pools.items():
        path = getattr(pool.engine, "path", "")
        if path.startswith((".", "/", "~")) and path != str(DEMO_MODEL_PATH) and not Path(path).is_dir():
            raise fail(f"pools.{name}.engine.path: {path}: no such folder")
        if getattr(pool.engine, "path", None) == str(DEMO_MODEL_PATH) and not DEMO_MODEL_PATH.is_dir():
            raise fail(f"the demo model {DEMO_MODEL_NAME} is not installed. Name another model with --model")
        if isinstance(pool.engine, LocalEngineSettings) and pool.workers and find_spec("torch") is None:
            raise fail(f"pools.{name}: its engine needs torch. Run: {install_command('worker')}")


def finding_options(paths: Mapping[str, Path | None]) -> str:
    """Return the given options as text, for other commands to find the running system."""
    return "".join(f" {option} {shlex.quote(str(path))}" for option, path in paths.items() if path is not None)


def banner(running: Running) -> str:
    """Return addresses, key and login for a new user, as rich markup."""
    key = running.api_key or "(created earlier)"
    password = f"{running.admin_password}  (shown only once)" if running.admin_password else "(set earlier)"
    return (
        f"[bold]Endpoint[/bold]  {escape(running.base_url)}/v1\n"
        f"[bold]API key[/bold]   {key}\n"
        f"[bold]Model[/bold]     {escape(running.model)}\n"
        f"[bold]Pages[/bold]     {escape(running.base_url)}/dashboard\n"
        f"[bold]Login[/bold]     {ADMIN_NAME}  {password}\n"
        "[bold]Stop[/bold]      Ctrl-C"
    )


def next_commands(running: Running, options: str) -> str:
    """Return commands for a new user, one per line. ``options`` let each command find this system."""
    command = command_name()
    lines = [f"Usage:         {command} usage{options}"]
    if not running.api_key:
        lines.append(f"Another key:   {command} keys create NAME{options}")
    if not running.admin_password:
        lines.append(f"New password:  {command} admin password{options}")
    return "\n".join([*lines, "Try it from another terminal:"])


def command_name() -> str:
    """Return the command that runs this program: its name, or its path if it is not on PATH."""
    beside = Path(sys.executable).with_name("spillway")
    if shutil.which("spillway") or not beside.exists():
        return "spillway"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def curl_command(running: Running) -> str:
    """Return a curl command with an example request for the model's task. Text generation streams."""
    path, body = _EXAMPLES[running.task]
    key = running.api_key or "$SPILLWAY_API_KEY"
    return (
        f"curl -N {shlex.quote(f'{running.base_url}/v1/{path}')} \\\n"
        f"  -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps({'model': running.model, **body})}'"
    )
