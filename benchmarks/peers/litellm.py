"""LiteLLM's proxy in front of the fake backend, configured as its production guide recommends.

One worker process (as recommended per pod), a master key checked on every request, only errors in the log, no database,
no callbacks, no telemetry. Its environment is made on demand from the pinned set in ``litellm.txt``.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers import pinned
from benchmarks.ports import free_port, wait_until_listening
from protocol.process import stop_process
from spillway.children import die_with_parent

BACKEND_PROGRAM: Final = Path(__file__).with_name("fake_backend.py")
MASTER_KEY: Final = "sk-benchmark"
START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 10.0

CONFIG: Final = """\
model_list:
  - model_name: instant
    litellm_params: {{model: openai/instant, api_base: "http://127.0.0.1:{backend_port}/v1", api_key: none}}
  - model_name: paced
    litellm_params: {{model: openai/paced, api_base: "http://127.0.0.1:{backend_port}/v1", api_key: none}}
litellm_settings: {{set_verbose: false, request_timeout: 600, num_retries: 0, telemetry: false}}
general_settings: {{master_key: {master_key}, disable_spend_logs: true, disable_error_logs: true}}
"""

# Two servers of one model, as its reliability pages recommend: retries go to the other server, a failing one is avoided
# for its default cooldown, and there is a fallback group. ``continues`` is off by default: it resumes interrupted
# streams by asking a server to continue the text, if the model is declared to support that.
FAILOVER_CONFIG: Final = """\
model_list:
{deployments}
router_settings:
  {{num_retries: 3, timeout: 600, fallbacks: [{{scripted: [again]}}],
   enable_mid_stream_fallback_continuation: {continues}}}
litellm_settings: {{set_verbose: false, request_timeout: 600, telemetry: false}}
general_settings: {{master_key: {master_key}, disable_spend_logs: true, disable_error_logs: true}}
"""
DEPLOYMENT: Final = """\
  - model_name: {group}
    litellm_params: {{model: openai/scripted, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
    model_info: {{supports_assistant_prefill: {continues}}}
"""


@dataclass(frozen=True)
class RunningPeer:
    """A proxy and its backend, both listening on 127.0.0.1."""

    proxy_port: int
    backend_port: int
    pids: dict[str, int]  # "litellm" | "backend" → process id
    api_key: str


def install() -> str:
    """Install the pinned environment; return the version (``pinned.install``)."""
    return pinned.install("litellm", "litellm")


@asynccontextmanager
async def running_litellm(folder: Path, token_ms: float) -> AsyncIterator[RunningPeer]:
    """Run backend and proxy while the context lasts; logs and configuration go into ``folder``.

    Raises TimeoutError or ChildProcessError, naming the log, if either fails to start.
    """
    backend_port, proxy_port = free_port(), free_port()
    config = folder / "litellm.yaml"
    config.write_text(CONFIG.format(backend_port=backend_port, master_key=MASTER_KEY))
    backend_command = [sys.executable, str(BACKEND_PROGRAM), "--port", str(backend_port), "--token-ms", str(token_ms)]
    async with (
        _running(backend_command, backend_port, folder / "backend.log") as backend,
        _running(_proxy_command(config, proxy_port), proxy_port, folder / "litellm.log") as proxy,
    ):
        yield RunningPeer(proxy_port, backend_port, {"litellm": proxy.pid, "backend": backend.pid}, MASTER_KEY)


@asynccontextmanager
async def running_failover_litellm(folder: Path, server_ports: Sequence[int], *, continues: bool) -> AsyncIterator[int]:
    """Run the proxy in front of running engine servers; yield its port. Raises like ``running_litellm``."""
    proxy_port = free_port()
    deployments = "".join(
        DEPLOYMENT.format(group=group, port=port, continues=str(continues).lower())
        for group in ("scripted", "again")
        for port in server_ports
    )
    config = folder / "litellm.yaml"
    config.write_text(
        FAILOVER_CONFIG.format(
            deployments=deployments.rstrip(), master_key=MASTER_KEY, continues=str(continues).lower()
        )
    )
    async with _running(_proxy_command(config, proxy_port), proxy_port, folder / "litellm.log"):
        yield proxy_port


def _proxy_command(config: Path, port: int) -> list[str]:
    program = str(pinned.ENVIRONMENTS / "litellm" / "bin" / "litellm")
    return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


@asynccontextmanager
async def _running(command: list[str], port: int, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LITELLM")},
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download at start
    }
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env=environment, start_new_session=True, preexec_fn=die_with_parent
        )
        try:
            await wait_until_listening(process, port, START_LIMIT_S, log)
            yield process
        finally:
            await stop_process(process, command[0], STOP_LIMIT_S)
