"""Run the conformance suite of engines against a real server, in an environment of its own that is made on demand.

    python -m tests.conformance.real_servers llamacpp [-k EXPRESSION …]

Serves the demo model, whose files the repository holds, and hands further arguments to pytest. ``vllm`` is vLLM for
CPUs (its first start compiles for a minute); ``llamacpp`` is llama.cpp's own server as the package xllamacpp ships it,
with the model converted to GGUF.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx

from benchmarks.peers import pinned, vllm
from spillway.config import DEMO_MODEL_PATH
from tests.nats_server import free_port

READY_S: Final = 600.0
STOP_S: Final = 20.0
SLOTS: Final = 4
CONTEXT: Final = 512
HERE: Final = Path(__file__).parent


def llamacpp(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Convert the demo model; return how its server is started."""
    pinned.install("llamacpp", "xllamacpp")
    python = pinned.ENVIRONMENTS / "llamacpp" / "bin" / "python"
    [site] = (pinned.ENVIRONMENTS / "llamacpp").glob("lib/python*/site-packages")
    gguf = folder / "demo.gguf"
    convert = [sys.executable, str(HERE / "convert_to_gguf.py"), str(site), str(DEMO_MODEL_PATH), str(gguf)]
    subprocess.run(convert, check=True, stdout=sys.stderr)
    serve = [str(python), str(HERE / "serve_llamacpp.py"), str(gguf), str(port), str(CONTEXT * SLOTS), str(SLOTS)]
    return serve, {}


def vllm_server(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return how vLLM's server is started with the demo model."""
    del folder
    vllm.install()
    serve = [str(vllm.PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL_PATH)]
    serve += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT)]
    serve += ["--max-num-seqs", str(SLOTS), "--max-logprobs", "20"]
    return serve, {**vllm.environment(1), "PATH": f"{vllm.FOLDER / 'bin'}:{os.environ['PATH']}"}


SERVERS: Final = {"llamacpp": llamacpp, "vllm": vllm_server}


@contextlib.contextmanager
def serving(kind: str, log: Path) -> Iterator[str]:
    """Run a real server; yield its URL once it is ready. Raises RuntimeError with the end of its log."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="spillway-conformance-") as folder, log.open("wb") as output:
        command, environment = SERVERS[kind](Path(folder), port)
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(0.25)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.real_servers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=SERVERS)
    arguments, for_pytest = parser.parse_known_args()
    with (
        tempfile.TemporaryDirectory(prefix="spillway-conformance-") as folder,
        serving(arguments.kind, Path(folder) / "server.log") as url,
    ):
        environment = {**os.environ, "SPILLWAY_TEST_SERVER": f"{arguments.kind} {url} {DEMO_MODEL_PATH}"}
        suite = [sys.executable, "-m", "pytest", "-n", "0", str(HERE / "test_engines.py"), "-k", "real"]
        return subprocess.run([*suite, *for_pytest], check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
