"""``python -m tests.fuzz``: run targets under coverage, one after the other, and say what each found.

The exit code is 0 if there is no finding, 1 if there is one, 2 if a target could not run.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from msgspec import Struct

from tests.fuzz import CORPUS, TARGETS

WORK: Final = Path("build") / "fuzz"  # inputs of earlier runs, and findings
MAX_INPUT_BYTES: Final = 4096
INPUT_LIMIT_S: Final = 20  # for one input
MEMORY_LIMIT_MB: Final = 2048
START_LIMIT_S: Final = 240  # until a target is imported, and its end, beside the time that it runs
KEPT_BYTES: Final = 10 * 1024  # of each target's corpus
SHOWN_LINES: Final = 15  # of a process that failed


class Result(Struct):
    """What a run of one target says of itself."""

    executions: int
    features: int
    findings: list[Path]
    fault: str = ""  # why it did not run to its end


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; default: 60")
    parser.add_argument("--minimise", action="store_true", help="keep the smallest corpus that reaches as much")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    code = 0
    for name in arguments.targets or TARGETS:
        if arguments.minimise:
            _minimise(name)
            continue
        result = _run(name, arguments.seconds)
        figures = f"{result.executions:>10,} executions {result.features:>7,} features"
        print(f"{name:<11}{figures} {len(result.findings):>3} findings in {arguments.seconds} s", flush=True)
        for path in result.findings:
            print(f"  {path}")
        if result.fault:
            print(result.fault, file=sys.stderr)
        code = max(code, 2 if result.fault else int(bool(result.findings)))
    return code


def _run(name: str, seconds: int) -> Result:
    """Run one target; what it reaches and finds stays in ``build/fuzz``."""
    inputs, findings = WORK / name / "inputs", WORK / name / "findings"
    shutil.rmtree(findings, ignore_errors=True)
    for folder in (inputs, findings):
        folder.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={INPUT_LIMIT_S}",
        f"-rss_limit_mb={MEMORY_LIMIT_MB}", f"-artifact_prefix={findings}/", "-print_final_stats=1",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as seeds:
        _write_seeds(name, Path(seeds))
        done = _fuzzer(name, findings, [*options, str(inputs), str(CORPUS / name), seeds], seconds + START_LIMIT_S)
    found = sorted(path for path in findings.iterdir() if path.suffix != ".txt")
    executions = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    features = re.findall(r" ft: (\d+) ", done.stderr)
    fault = ""
    if done.returncode and not found:
        fault = "\n".join(done.stderr.splitlines()[-SHOWN_LINES:])
    return Result(int(executions[1]) if executions else 0, int(features[-1]) if features else 0, found, fault)


def _write_seeds(name: str, folder: Path) -> None:
    """Write a target's seeds, and make sure that there is a corpus."""
    code = f"from tests.fuzz.{name} import SEEDS as s; import sys, pathlib as p\n"
    code += "for n, b in enumerate(s): (p.Path(sys.argv[1]) / str(n)).write_bytes(b)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    (CORPUS / name).mkdir(parents=True, exist_ok=True)


def _fuzzer(name: str, findings: Path, options: list[str], limit_s: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.fuzz.under_atheris", name, str(findings), "fuzz", *options]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)


def _minimise(name: str) -> None:
    """Let libFuzzer merge a target's inputs, and keep the smallest of what is left, up to the bound."""
    with tempfile.TemporaryDirectory() as temporary:
        merged, seeds = Path(temporary) / "merged", Path(temporary) / "seeds"
        for folder in (merged, seeds):
            folder.mkdir()
        _write_seeds(name, seeds)
        program = Path(temporary) / "program"
        arguments = f"-m tests.fuzz.under_atheris {name} {temporary}"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$0" "$@"\n')
        program.chmod(0o755)
        sources = [str(CORPUS / name), str(seeds), str(WORK / name / "inputs")]
        (WORK / name / "inputs").mkdir(parents=True, exist_ok=True)
        subprocess.run([program, "-merge=1", str(merged), *sources], check=True, capture_output=True)
        _keep(name, merged)


def _keep(name: str, merged: Path) -> None:
    kept, size_bytes = CORPUS / name, 0
    shutil.rmtree(kept)
    kept.mkdir()
    for path in sorted(merged.iterdir(), key=lambda path: path.stat().st_size):
        size_bytes += path.stat().st_size
        if size_bytes > KEPT_BYTES:
            break
        shutil.copy(path, kept / path.name[:16])
    print(f"{name:<11}{len(list(kept.iterdir())):>5} of {len(list(merged.iterdir())):>5} inputs are kept")


if __name__ == "__main__":
    sys.exit(main())
