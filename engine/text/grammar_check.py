"""Checks that a grammar can be compiled at an acceptable cost, in a separate process that can be killed.

A schema of 40 kB (800 ``patternProperties``) takes llguidance 145 s even with all of its limits, and a thread cannot be
stopped. So each grammar is compiled first in a child process. The kernel limits the child's CPU time
(``ITIMER_PROF`` counts its own work, however busy the machine is) and memory; if the child dies, only that request
fails. The child's tokenizer has the single bytes and the added tokens only: nearly all of the work, and nearly all
possible errors, do not depend on the rest, so a new child starts in a fraction of a second.

    compiler's thread ──{"source", "cpu_s"}──> child
    compiler's thread <─────── {"error"} ───── child

The child runs this file as a script, so it imports no other module of Spillway.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, LifoQueue
from typing import IO, Any, Final, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import pre_tokenizers

COMPILE_CPU_S: Final = 3.0  # of CPU time; a schema of 3,000 fields takes 0.3 to 1
COMPILE_MEMORY_BYTES: Final = 1 << 30  # above the process's size at its start; that schema takes 51 MiB
# Unlike llguidance's default of 50,000; a schema of 450 fields, the largest that its rows hold, needs less than 10,000.
STEP_MAX_ITEMS: Final = 10_000
# For all compilations. "Verbose" errors would contain pages of parser state.
PARSER_LIMITS: Final = LLParserLimits(verbose_errors=False, step_max_items=STEP_MAX_ITEMS)
END_LIMIT_S: Final = 5.0  # for a killed child to exit
KEPT_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "PYTHONHOME")


class TooExpensive(Exception):
    """Compiling the grammar takes more time or memory than one request may use."""


class GrammarCheck:
    """Child processes for one tokenizer, one for each concurrent caller."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: tuple[int, ...], *, cpu_s: float) -> None:
        """Prepare the checks; the first grammar starts the first child. ``cpu_s``: CPU time of one compilation."""
        added = json.loads(tokenizer_json)["added_tokens"]
        self._setup = {"added_tokens": added, "vocab_size": vocab_size, "eos_ids": eos_ids}
        self._cpu_s = cpu_s
        self._idle: LifoQueue[_Child] = LifoQueue()

    def find_error(self, source: str) -> str:
        """Return the error in a grammar in llguidance's form; empty if it is valid. Raises TooExpensive."""
        try:
            child = self._idle.get_nowait()
        except Empty:
            child = _Child(self._setup)
        error = child.ask({"source": source, "cpu_s": self._cpu_s})
        self._idle.put(child)
        return error


class _Child:
    """One process, which ends with this object and with its parent process."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        command = [sys.executable, "-I", __file__]  # isolated: neither the folder nor the environment adds modules
        # A grammar is a caller's text: its parser must not have the queue's credentials in its environment.
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - no client input
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        pipes = self._process.stdin, self._process.stdout
        self._questions, self._answers = (cast("IO[str]", pipe) for pipe in pipes)
        self._end = weakref.finalize(self, _end, self._process, self._questions, self._answers)
        self._setup: Mapping[str, Any] | None = setup

    def ask(self, question: Mapping[str, Any]) -> str:
        try:
            if self._setup is not None:
                _write(self._questions, self._setup)
                self._setup = None
            _write(self._questions, question)
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._end()
            raise TooExpensive(_kill_reason(self._process.returncode))
        return str(json.loads(answer)["error"])


def _end(process: subprocess.Popen[str], questions: IO[str], answers: IO[str]) -> None:
    process.kill()
    process.wait(END_LIMIT_S)
    answers.close()
    with suppress(BrokenPipeError):  # the last question may still be in the buffer
        questions.close()


def _kill_reason(status: int) -> str:
    return "compiling it takes too long" if status == -signal.SIGPROF else "compiling it takes too much memory"


def _write(pipe: IO[str], message: Mapping[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


# --- the child --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer questions from standard input until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which closes standard input when it ends
    setup = json.loads(sys.stdin.readline() or sys.exit())
    tokenizer = _byte_tokenizer(setup["added_tokens"], setup["vocab_size"], setup["eos_ids"])
    held_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes + COMPILE_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
        matcher = LLMatcher(tokenizer, question["source"], log_level=0, limits=PARSER_LIMITS)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout, {"error": matcher.get_error() if matcher.is_error() else ""})


def _byte_tokenizer(added_tokens: list[Any], vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    """Return a tokenizer of the single bytes, with the added tokens at the model's own ids."""
    taken = {token["id"] for token in added_tokens}
    free_ids = (number for number in range(vocab_size + 256) if number not in taken)
    bytes_ = {char: next(free_ids) for char in sorted(pre_tokenizers.ByteLevel.alphabet())}
    whole = {
        "version": "1.0",
        "added_tokens": added_tokens,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": bytes_, "merges": []},
    }
    return LLTokenizer(json.dumps(whole), n_vocab=max(vocab_size, 1 + max(bytes_.values())), eos_token=eos_ids)


if __name__ == "__main__":
    main()
