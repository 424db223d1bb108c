"""``spillway worker``: one worker of a pool, configured by the configuration file, by options, or by both.

Options take precedence over environment variables, and variables over the file. A sidecar of a server needs no file.
"""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pool_worker.main import run
from pool_worker.settings import DETECTED
from protocol.process import PORT_PLACE
from spillway import logs
from spillway.cli.context import (
    ConfigOption,
    DataOption,
    ReadyFileOption,
    resolve_config,
    run_async,
    with_running_queue,
    write_ready,
)
from spillway.config import Config

SERVER: Final = "An inference server beside the worker (sidecar)"
POOL: Final = "The pool, if no configuration file describes it"
LOCAL_URL: Final = f"http://127.0.0.1:{PORT_PLACE}"


def worker(
    pool: Annotated[str, typer.Option(envvar="SPILLWAY_POOL", help="The pool of this worker.")],
    config: ConfigOption = None,
    data: DataOption = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            envvar="SPILLWAY_ENGINE_URL",
            help="The server's URL, such as http://localhost:8000.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    engine_kind: Annotated[
        str | None,
        typer.Option(
            envvar="SPILLWAY_ENGINE_KIND",
            help="The server's kind: vllm, sglang, llamacpp, … Default: the pool's kind, or else detected.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    exec_: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            envvar="SPILLWAY_EXEC",
            help="Start and supervise the server. {port} is replaced by a free port, here and in --engine-url.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            envvar="SPILLWAY_TOKENIZER",
            help="The model's folder or its tokenizer.json.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SPILLWAY_MODEL",
            help="The model's public name. The gateway's configuration must have it too. Repeatable.",
            rich_help_panel=POOL,
        ),
    ] = None,
    nats_url: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SPILLWAY_NATS_URL",
            help="URL of the queue server: tls://host:4222. Repeatable. Pass a URL with a password in the variable.",
            rich_help_panel=POOL,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other key of the pool: tier=spot, usd_per_hour=0.34, engine.max_sequences=128, "
            "engine.revision=llama-8b-v1, watch.max_tpot_ms=60. Repeatable.",
            rich_help_panel=POOL,
        ),
    ] = None,
    machine: Annotated[
        str, typer.Option(envvar="SPILLWAY_MACHINE", help="The machine's id, if the fleet controller launched it.")
    ] = "",
    ready_file: ReadyFileOption = None,
) -> None:
    """Run one worker of a pool. It pulls jobs for its engine and needs only an outbound connection to NATS.

    Beside a running inference server (sidecar):

    spillway worker --pool runpod --engine-url http://localhost:8000

    As the supervisor of the server: the worker starts it, copies its log,
    restarts it when it dies or hangs (its jobs are handed back), and stops it
    after the last job of a drain:

    spillway worker --pool runpod --exec "vllm serve /model --port {port}"

    Without any configuration file:

    SPILLWAY_NATS_URL=tls://spillway:PASSWORD@queue:4222 spillway worker
    --pool laptop --model llama-8b --tokenizer /models/llama-8b
    --engine-url http://localhost:8080

    SIGTERM and SIGINT drain the worker: running jobs finish or are handed back.
    A second signal hands them back immediately. Exit code 1 means that the
    engine was lost and its jobs were handed back: restart the worker.
    """
    with logs.configured(f"worker {pool}"):
        engine = {"url": engine_url, "kind": engine_kind, "exec": exec_, "tokenizer": tokenizer}
        overrides = _of_pool(engine, model or [], set_ or [])
        resolved = with_running_queue(_resolve(config, data, pool, overrides, model or [], nats_url or []))
        run_async(
            lambda: run(
                resolved.worker_settings(pool, machine),
                on_ready=lambda task: write_ready(ready_file, None if task is None else {"pool": pool, "task": task}),
            )
        )


def _of_pool(engine: dict[str, str | None], models: list[str], settings: list[str]) -> dict[str, Any]:
    """Return the pool's settings that the options name."""
    given: dict[str, Any] = {"engine": {name: value for name, value in engine.items() if value is not None}}
    if models:
        given["models"] = models
    for text in settings:
        path, equals, value = text.partition("=")
        *sections, key = path.split(".")
        if not equals or not all((*sections, key)):
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE, where KEY is a key of the pool", param_hint="--set")
        target = given
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return {name: value for name, value in given.items() if value}


def _resolve(
    config: Path | None, data: Path | None, pool: str, given: dict[str, Any], models: list[str], nats_urls: list[str]
) -> Config:
    overrides: dict[str, Any] = {"pools": {pool: given}} if given else {}
    if nats_urls:
        overrides["nats"] = {"urls": nats_urls}
    engine = given.get("engine", {})
    if not {"url", "exec"} & set(engine):
        return resolve_config(config, data, overrides)
    # Defaults for keys that neither the options nor the configuration set.
    server = {"kind": DETECTED}
    if PORT_PLACE in engine.get("exec", ""):
        server["url"] = LOCAL_URL
    defaults = {"models": {name: {} for name in models}, "pools": {pool: {"engine": server}}}
    return resolve_config(config, data, overrides, defaults=defaults)
