"""Real vLLM servers that start in seconds, forked from a process that has imported everything: vllm_forks.py ARGUMENTS.

Each line that it reads is a port and the path of a log file, separated by a space; it answers with the id of the
process, and of its group, that it has started there with ARGUMENTS. Only the imports are shared; no thread runs before
the fork. vLLM's engine is a process of its own, which on a CPU imports everything again: here that is forked, too, as
vLLM itself does with GPUs. Runs in vLLM's environment, without ours.
"""

import multiprocessing
import os
import signal
import sys

import uvloop
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401 - what a server imports for its model
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.models import llama  # noqa: F401 - likewise
from vllm.utils.argparse_utils import FlexibleArgumentParser


def serve(port: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    forks = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: forks  # type: ignore[assignment]  # not what vLLM asks for
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*sys.argv[1:], "--port", port])
    validate_parsed_serve_args(arguments)
    uvloop.run(run_server(arguments))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(*line.strip().split(" ", 1))
            os._exit(0)
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
