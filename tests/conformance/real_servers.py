"""Run the conformance suite of engines against a real server, in a separate environment that is made on demand.

    python -m tests.conformance.real_servers llamacpp [-k EXPRESSION …]

Serves the demo model of the repository, and passes further arguments to pytest. ``vllm`` is vLLM for CPUs (its first
start compiles for a minute); ``llamacpp`` is llama.cpp's own server from the package xllamacpp, with the model
converted to GGUF; ``triton`` is Triton around Spillway's engine; ``transformers`` is `transformers serve`; ``ray`` is
Ray Serve around Spillway's engine. ``…-completions`` treats a server as an unknown one, in text, ``…-chat`` in
messages. ``vllm-inprocess`` runs the suite in vLLM's own environment, without a server. Tests that are skipped for a
server are listed with the reason.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.peers import pinned, vllm
from benchmarks.ports import free_port
from spillway.config import DEMO_MODEL_PATH

READY_S: Final = 600.0
STOP_S: Final = 20.0
SLOTS: Final = 4
CONTEXT: Final = 512
HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]


def llamacpp(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Convert the demo model; return the command that starts the server."""
    pinned.install("llamacpp", "xllamacpp")
    python = pinned.ENVIRONMENTS / "llamacpp" / "bin" / "python"
    [site] = (pinned.ENVIRONMENTS / "llamacpp").glob("lib/python*/site-packages")
    gguf = folder / "demo.gguf"
    convert = [sys.executable, str(HERE / "convert_to_gguf.py"), str(site), str(DEMO_MODEL_PATH), str(gguf)]
    subprocess.run(convert, check=True, stdout=sys.stderr)
    serve = [str(python), str(HERE / "serve_llamacpp.py"), str(gguf), str(port), str(CONTEXT * SLOTS), str(SLOTS)]
    return serve, {}


def vllm_server(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts vLLM's server with the demo model."""
    del folder
    vllm.install()
    serve = [str(vllm.PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL_PATH)]
    serve += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT)]
    serve += ["--max-num-seqs", str(SLOTS), "--max-logprobs", "20"]
    # Otherwise an answer by a schema may be endless white space, which so small a model prefers.
    serve += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    return serve, {**vllm.environment(1), "PATH": f"{vllm.FOLDER / 'bin'}:{os.environ['PATH']}"}


TRITON_INPUTS: Final = {
    "text_input": "TYPE_STRING",
    "max_tokens": "TYPE_INT32",
    "temperature": "TYPE_FP32",
    "top_p": "TYPE_FP32",
    "top_k": "TYPE_INT32",
    "min_p": "TYPE_FP32",
    "presence_penalty": "TYPE_FP32",
    "frequency_penalty": "TYPE_FP32",
    "repetition_penalty": "TYPE_FP32",
    "random_seed": "TYPE_INT64",
    "ignore_eos": "TYPE_BOOL",
    "min_tokens": "TYPE_INT32",
    "stream": "TYPE_BOOL",
}


SAMPLED: Final = TRITON_INPUTS.keys() - {"text_input", "max_tokens"}


def triton(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Lay out a model of its Python backend; return the command that starts Triton. It needs the system's Python."""
    pinned.install("triton", "nvidia-pytriton", base="/usr/bin/python3")
    environment = pinned.ENVIRONMENTS / "triton"
    [site] = environment.glob("lib/python*/site-packages")
    server = site / "pytriton" / "tritonserver"
    shutil.copytree(server / "backends", folder / "backends")
    stub = server / "python_backend_stubs" / site.parent.name.removeprefix("python") / "triton_python_backend_stub"
    shutil.copy(stub, folder / "backends" / "python")
    model = folder / "models" / "demo"
    (model / "1").mkdir(parents=True)
    shutil.copy(HERE / "triton_model.py", model / "1" / "model.py")
    inputs = ",".join(
        f'{{name: "{name}" data_type: {kind} dims: [1] optional: {"true" if name in SAMPLED else "false"}}}'
        for name, kind in TRITON_INPUTS.items()
    )
    (model / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: 0 model_transaction_policy {{ decoupled: true }} input [{inputs}] '
        'output [{name: "text_output" data_type: TYPE_STRING dims: [1]}] instance_group [{count: 1 kind: KIND_CPU}]'
    )
    serve = [str(server / "bin" / "tritonserver"), "--model-repository", str(folder / "models")]
    serve += ["--backend-directory", str(folder / "backends"), "--http-address", "127.0.0.1", "--http-port", str(port)]
    serve += ["--allow-grpc", "false", "--allow-metrics", "false"]
    engine = [sys.executable, "-m", "tests.conformance.triton_engine", str(SLOTS), str(CONTEXT)]
    return serve, {
        "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "ENGINE_COMMAND": json.dumps(engine),
    }


HUB_NAME: Final = "spillway/demo"


def transformers_server(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Lay out the demo model like the hub's cache, the only models that it lists; return the server's command."""
    pinned.install("transformers", "transformers", needs_torch=True)
    kept = folder / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    commit = "0" * 40
    shutil.copytree(DEMO_MODEL_PATH, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    (kept / "blobs").mkdir()
    program = pinned.ENVIRONMENTS / "transformers" / "bin" / "transformers"
    serve = [str(program), "serve", HUB_NAME, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    return serve, {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def ray_server(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a Ray Serve app around Spillway's engine."""
    pinned.install("ray", "ray", needs_torch=True)
    python = pinned.ENVIRONMENTS / "ray" / "bin" / "python"
    serve = [str(python), "-m", "tests.conformance.ray_app", str(port), str(DEMO_MODEL_PATH), str(SLOTS), str(CONTEXT)]
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",  # otherwise it leaves a token in the home folder; it listens only locally
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": str(int(READY_S)),
    }
    return [*serve, str(folder)], environment


@dataclass(frozen=True)
class Checked:
    """A server, and the settings of the engine that uses it."""

    start: Callable[[Path, int], tuple[list[str], dict[str, str]]]
    kind: str
    ready_path: str = "/health"
    settings: Mapping[str, Any] = field(default_factory=dict)
    leaves_out: Mapping[str, str] = field(default_factory=dict)  # name of a test → why it cannot pass


CHAT: Final = "openai_chat"
OF_OPENAI: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
IN_TEXT: Final = {"honours": (*OF_OPENAI, "ignore_eos")}
SERVERS: Final = {
    "llamacpp": Checked(llamacpp, "llamacpp"),
    "vllm": Checked(vllm_server, "vllm"),
    "triton": Checked(triton, "triton", "/v2/models/demo", {"model": "demo"}),
    "llamacpp-completions": Checked(llamacpp, "openai_completions", settings=IN_TEXT),
    "vllm-completions": Checked(vllm_server, "openai_completions", settings=IN_TEXT),
    "vllm-chat": Checked(vllm_server, CHAT, settings={"profile": "vllm", "model": str(DEMO_MODEL_PATH)}),
    "transformers": Checked(
        transformers_server,
        "openai_completions",
        settings={"honours": ("temperature", "top_p", "seed")},
        leaves_out={
            "test_canceled_choices_report_their_timings": "it answers one request at a time, so four never run at once"
        },
    ),
    "ray-chat": Checked(ray_server, CHAT, "/v1/models", {"profile": "ray", "model": "demo"}),
    "ray-completions": Checked(ray_server, "openai_completions", "/v1/models", IN_TEXT),
}
IN_PROCESS: Final = "vllm-inprocess"


@contextlib.contextmanager
def serving(name: str, log: Path) -> Iterator[str]:
    """Run a real server; yield its URL once it is ready. Raises RuntimeError with the end of its log."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="spillway-conformance-") as folder, log.open("wb") as output:
        command, environment = SERVERS[name].start(Path(folder), port)
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        try:
            _wait_until_ready(server, f"http://127.0.0.1:{port}{SERVERS[name].ready_path}", log)
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
            if httpx.get(url).is_success:
                return
        time.sleep(0.25)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def check(name: str, for_pytest: Sequence[str]) -> int:
    """Run the suite against a server; return pytest's exit status."""
    checked = SERVERS[name]
    with (
        tempfile.TemporaryDirectory(prefix="spillway-conformance-") as folder,
        serving(name, Path(folder) / "server.log") as url,
    ):
        settings = {"kind": checked.kind, "url": url, **checked.settings}
        if checked.kind != CHAT:
            settings["tokenizer"] = str(DEMO_MODEL_PATH)
        suite = HERE / ("test_chat_servers.py" if checked.kind == CHAT else "test_engines.py")
        command = [sys.executable, "-m", "pytest", "-n", "0", str(suite), "-k", "real"]
        for test, reason in checked.leaves_out.items():
            sys.stderr.write(f"{name}: {test} is left out: {reason}\n")
            command += [
                "--deselect",
                f"{suite.relative_to(ROOT)}::{test}",
            ]  # pytest names tests relative to it
        environment = {**os.environ, "SPILLWAY_TEST_SERVER": json.dumps(settings)}
        return subprocess.run([*command, *for_pytest], check=False, env=environment).returncode


def check_vllm_in_process(for_pytest: Sequence[str]) -> int:
    """Run the suite in vLLM's environment, with one engine for all tests; then its life-cycle tests, with one each."""
    vllm.install()
    settings = {
        "kind": "vllm_inprocess",
        "model": str(DEMO_MODEL_PATH),
        "engine_args": {"dtype": "float32", "enforce_eager": True},
    }
    environment = {
        **os.environ,
        **vllm.environment(1),
        "PATH": f"{vllm.FOLDER / 'bin'}:{os.environ['PATH']}",
        "SPILLWAY_TEST_SERVER": json.dumps(settings),
    }
    pytest = [str(vllm.PYTHON), "-m", "pytest", "--noconftest", "-p", "no:cacheprovider"]
    kept = ["-p", "tests.conformance.kept_vllm", "-o", "asyncio_default_test_loop_scope=session"]
    kept += ["-o", "asyncio_default_fixture_loop_scope=session"]
    runs = [[*kept, str(HERE / "test_engines.py"), "-k", "real"], [str(HERE / "real_vllm.py")]]
    done = [subprocess.run([*pytest, *run, *for_pytest], check=False, env=environment, cwd=ROOT) for run in runs]
    return max(one.returncode for one in done)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.real_servers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("server", choices=[*SERVERS, IN_PROCESS])
    arguments, for_pytest = parser.parse_known_args()
    if arguments.server == IN_PROCESS:
        return check_vllm_in_process(for_pytest)
    return check(arguments.server, for_pytest)


if __name__ == "__main__":
    sys.exit(main())
