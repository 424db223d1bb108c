"""Prepare .venv for ``run``, ``unit`` or ``test`` from uv.lock; do nothing if it is up to date with this lock.

pip installs uv, checked by the hash that uv.lock has for it. Then packages, torch and, for tests, servers by apt are
installed side by side. The terminal shows one bar; all output goes to .venv/setup.log.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TextIO

ROOT: Final = Path(__file__).resolve().parent.parent
VENV: Final = ROOT / ".venv"
PYTHON: Final = VENV / "bin/python"
UV: Final = VENV / "bin/uv"
LOG: Final = VENV / "setup.log"
TORCH_FOLDER: Final = VENV / ".torch"  # scripts/install_torch.py works there

EVERYWHERE: Final = ("--group", "setup", "--group", "torch")
PROFILES: Final = {
    "run": (*EVERYWHERE, "--extra", "nats", "--extra", "otel", "--extra", "worker"),
    "unit": (*EVERYWHERE, "--group", "dev", "--group", "docs", "--all-extras"),
    "test": (*EVERYWHERE, "--group", "dev", "--group", "docs", "--all-extras"),
}
UNIT_TESTS: Final = ("tests/unit",)
OTHER_TESTS: Final = ("tests", "--ignore=tests/unit")
PACKAGES_SHARE: Final = {"run": 8, "unit": 30, "test": 30}
PYPI: Final = "https://pypi.org/simple"
BAR_WIDTH: Final = 30
CLEAR_LINE: Final = "\r\033[2K"
TAIL_LINES: Final = 15
TORCH_BYTES: Final = 320_000_000  # the wheel has 190 MB; the rest of the bar is for unpacking
UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class SetupFailed(Exception):
    """A step failed. The message names it and has the end of its output."""


@dataclass
class Step:
    """One step of the installation: its dependencies, its progress, and its part of the log."""

    name: str
    share: float  # of the bar, roughly its share of the time
    work: Callable[["Step"], None]
    log: TextIO
    after: list["Step"] = field(default_factory=list)
    future: Future[None] = field(default_factory=Future)
    fraction: float = 0.0
    running: subprocess.Popen[str] | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def do(self) -> None:
        """Wait for the steps that this one depends on, then run."""
        for step in self.after:
            step.future.result()
        self.work(self)
        self.fraction = 1.0

    def run(self, command: Sequence[str | Path], on_line: Callable[[str], None] = lambda _: None) -> None:
        """Run a command, logging its output and passing each line to ``on_line``."""
        words = [str(word) for word in command]
        self._write(f"$ {' '.join(words)}\n")
        with subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            self.running = process
            for line in process.stdout or ():
                self._write(line)
                on_line(line)
        if process.returncode:
            raise SetupFailed(f"{self.name}: exit code {process.returncode}\n{''.join(self.tail)}")

    def stop(self) -> None:
        """Stop, because another step has failed."""
        if self.running is not None and self.running.poll() is None:
            self.running.terminate()

    def _write(self, line: str) -> None:
        self.tail.append(line)
        self.log.write(f"{self.name}: {line}")
        self.log.flush()


# --- what is installed ------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return the environment of commands: our .venv, and pip's certificates also for uv."""
    ours = {"VIRTUAL_ENV": str(VENV), "UV_PROJECT_ENVIRONMENT": str(VENV), "UV_PYTHON": str(PYTHON)}
    certificates = {"SSL_CERT_FILE": cert} if (cert := os.environ.get("PIP_CERT")) else {}
    return {**certificates, **os.environ, **ours, "UV_PYTHON_DOWNLOADS": "never"}


def installer() -> Path:
    """Return a Python with pip: this one, or a virtual environment if the system's Python has no pip."""
    if importlib.util.find_spec("pip"):
        return Path(sys.executable)
    return VENV / "bootstrap/bin/python"


def make_venv(step: Step) -> None:
    """Create .venv without pip; the lock installs pip."""
    if not PYTHON.exists():
        step.run([sys.executable, "-m", "venv", "--without-pip", VENV])
    if installer().exists():
        return
    if not importlib.util.find_spec("ensurepip"):
        apt_install(step, ["python3-venv"])
    step.run([sys.executable, "-m", "venv", installer().parents[1]])


def install_uv(step: Step) -> None:
    """Install the locked uv into .venv."""
    locked = re.search(r'^name = "uv"\nversion = "(.+)"\n((?:.+\n)+)', (ROOT / "uv.lock").read_text(), re.MULTILINE)
    if locked is None:
        raise SetupFailed("uv.lock has no uv")
    version, files = locked.groups()
    if (
        UV.exists()
        and f" {version} " in subprocess.run([UV, "--version"], capture_output=True, text=True, check=False).stdout
    ):
        return
    hashes = [f"--hash={found}" for found in re.findall(r"sha256:[0-9a-f]+", files)]
    requirement = VENV / "uv.txt"
    requirement.write_text(f"uv=={version} {' '.join(hashes)}\n")
    pip = [str(installer()), "-m", "pip", "--python", str(PYTHON), "--disable-pip-version-check", "install"]
    step.run([*pip, "--no-compile", "--no-deps", "--require-hashes", "--requirement", str(requirement)])


def configured_index() -> str | None:
    """Return the package index that this machine's uv or pip is configured to use, if it is not PyPI.

    uv.lock names PyPI's files, and uv knows nothing of pip's configuration.
    """
    url = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    if not url:
        pip = [str(installer()), "-m", "pip", "config", "list"]
        listed = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
        found = re.search(r"^\S*\.index-url='(.+)'$", listed, re.MULTILINE)
        url = found[1] if found else None
    return None if url is None or url.rstrip("/") == PYPI else url


def install_packages(step: Step, *, profile: str) -> None:
    """Install the packages of the profile from uv.lock, and the project itself in editable mode."""
    sizes: dict[str, float] = {}
    done: set[str] = set()

    def watch(line: str) -> None:
        if found := re.match(r"Downloading (\S+) \(([\d.]+)(\w+)\)", line):
            sizes[found[1]] = float(found[2]) * UNITS.get(found[3], 1)
        elif found := re.match(r" Downloaded (\S+)", line):
            done.add(found[1])
        if sizes:
            step.fraction = 0.9 * sum(sizes.get(name, 0.0) for name in done) / sum(sizes.values())

    index = configured_index()
    if index is None:
        # Keep torch and the packages of other profiles.
        step.run([UV, "sync", "--frozen", "--inexact", *PROFILES[profile]], watch)
        return
    requirements = VENV / "locked.txt"
    step.run(
        [UV, "export", "--frozen", "--quiet", "--no-emit-project", "--output-file", requirements, *PROFILES[profile]]
    )
    install = [str(UV), "pip", "install", "--no-deps"]
    step.run([*install, "--require-hashes", "--default-index", index, "--requirement", requirements], watch)
    step.run([*install, "--no-build-isolation", "--offline", "--editable", ROOT])


def install_torch(step: Step, *, before: Step) -> None:
    """Install torch, which is not in uv.lock. Its wheel is downloaded while its dependencies are installed."""
    command = [str(installer()), "scripts/install_torch.py", "--python", str(PYTHON)]
    step.run([*command, "--download-only"])
    before.future.result()
    step.run(command)


def compile_bytecode(step: Step) -> None:
    """Compile the installed packages. Otherwise parallel pytest processes would all compile them again."""
    folder = sysconfig.get_path("purelib", vars={"base": str(VENV)})
    # Ignore errors: packages contain files for other Python versions. Skip tests and transformers' models, which are
    # a quarter of all files and hardly ever imported.
    models = r"transformers/models/\w+/(modeling|modular|convert|image|video|feature|processing)_"
    skipped = rf"site-packages/(.*/tests?/|.*/testing/|{models})"
    options = f"quiet=2, workers=0, rx=re.compile({skipped!r})"
    step.run([PYTHON, "-c", f"import compileall, re; compileall.compile_dir({folder!r}, {options})"])


def compile_imports(step: Step) -> None:
    """Import the processes of `spillway up`, so that they do not all compile the same modules at the same time."""
    step.run([PYTHON, "-c", "import migrations, spillway.cli.gateway, spillway.cli.ledger, spillway.cli.worker"])


def compile_tests(step: Step, *, part: Sequence[str]) -> None:
    """Collect a part of the tests, which compiles them. What cannot be collected fails when it is run."""
    with suppress(SetupFailed):
        step.run([PYTHON, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--collect-only", "-qq", *part])


def missing_servers() -> list[str]:
    """Return the Debian packages that the tests lack.

    They run these for real: a private PostgreSQL, the load balancer's configuration in its own parser, a browser, the
    compiler of the engine's attention, and the commands of the tutorials.
    """
    missing = []
    if not shutil.which("initdb") and not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        missing.append("postgresql")
    if not shutil.which("haproxy") and not Path("/usr/sbin/haproxy").exists():
        missing.append("haproxy")
    if not shutil.which("chromium-headless-shell") and not shutil.which("chromium"):  # the whole browser is slower
        missing += ["chromium-headless-shell", "fonts-dejavu-core"]
    if not shutil.which("gcc") or not Path("/usr/include/math.h").exists():
        missing += ["gcc", "libc6-dev"]
    if not shutil.which("pgrep"):
        missing.append("procps")
    if not shutil.which("curl"):
        missing.append("curl")
    return missing


def lacks_promtool() -> bool:
    """Return whether promtool is missing and can be installed."""
    return not (VENV / "tools/promtool").exists() and not shutil.which("promtool") and bool(shutil.which("dpkg-deb"))


def install_servers(step: Step) -> None:
    """Install the programs that the tests run besides Python."""
    if missing := missing_servers():
        apt_install(step, missing)
    step.fraction = 0.8
    if not lacks_promtool():
        return
    # Debian's package would also start a server. Extract only promtool from it.
    folder = VENV / ".promtool"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = (
        'cd "$0" && apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg-deb --extract prometheus_*.deb .'
    )
    step.run(["sh", "-c", script, folder])
    (VENV / "tools").mkdir(exist_ok=True)
    (folder / "usr/bin/promtool").rename(VENV / "tools/promtool")
    shutil.rmtree(folder)


def apt_install(step: Step, packages: list[str]) -> None:
    """Install Debian packages, with sudo unless run as root."""
    if not shutil.which("apt-get"):
        raise SetupFailed(
            f"Install {' '.join(packages)} with your system's package manager, then run this command again."
        )
    as_root = [] if os.getuid() == 0 else ["sudo"]
    step.run([*as_root, "apt-get", "update", "-qq"])
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    step.run([*as_root, "env", "DEBIAN_FRONTEND=noninteractive", *install, *packages])


def install_node_packages(step: Step) -> None:
    """Install the clients that the tests run in Node.js."""
    step.run([PYTHON, "scripts/install_node_packages.py", "tests/clients/node"])


# --- in which order, and what is shown --------------------------------------------------------------------------------


def prepare(profile: str, stamp: Path, want: str) -> None:
    """Run all steps that are needed, and write the stamp."""
    VENV.mkdir(exist_ok=True)
    current = stamp.exists() and stamp.read_text() == want
    needs_servers = profile == "test" and bool(missing_servers() or lacks_promtool())
    if current and not needs_servers:
        if profile == "test":
            subprocess.run([PYTHON, ROOT / "scripts/install_node_packages.py", ROOT / "tests/clients/node"], check=True)
        return
    if needs_servers and os.getuid() and shutil.which("sudo"):
        subprocess.run(["sudo", "--validate"], check=True)  # ask for the password before the bar is drawn
    with LOG.open("w") as log:
        # A torch chosen by the user installs additional packages, so install it after the locked ones.
        venv = Step("Python environment", 0.5, make_venv, log)
        uv = Step("uv", 3, install_uv, log, [venv])
        packages = Step("packages", PACKAGES_SHARE[profile], partial(install_packages, profile=profile), log, [uv])
        before_torch = packages if os.environ.get("SPILLWAY_TORCH") else uv
        torch = Step("torch", 8, partial(install_torch, before=before_torch), log, [venv])
        node = Step("Node.js packages", 5, install_node_packages, log, [] if current else [packages])
        steps = [] if current else [venv, uv, packages, torch]
        if needs_servers:
            steps.append(Step("programs for the tests", 20, install_servers, log, [] if current else [venv]))
        if profile == "test":
            steps.append(node)
        if profile == "run" and not current:
            steps.append(Step("bytecode", 3, compile_imports, log, [packages]))
        elif not current:
            bytecode = Step("bytecode", 15, compile_bytecode, log, [packages, torch])
            # In two processes, while the others of these steps wait for the network: pytest's one process takes 20 s.
            units = Step("unit tests", 5, partial(compile_tests, part=UNIT_TESTS), log, [bytecode])
            others = Step("other tests", 5, partial(compile_tests, part=OTHER_TESTS), log, [bytecode])
            steps += [bytecode, units] if profile == "unit" else [bytecode, units, others]
        print(f"Preparing .venv for '{profile}' (log: {LOG.relative_to(ROOT)})", flush=True)
        show(steps)
    stamp.write_text(want)


def show(steps: list[Step]) -> None:
    """Run the steps, in parallel where possible, with a bar on a terminal or else one line per step."""
    began_s = time.monotonic()
    on_terminal = sys.stdout.isatty()
    with ThreadPoolExecutor(len(steps)) as pool:
        for step in steps:
            step.future = pool.submit(step.do)
        waiting = {step.future: step for step in steps}
        while waiting:
            done, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            if any(future.exception() for future in done):
                for step in steps:
                    step.stop()
            for future in done:
                future.result()
                step = waiting.pop(future)
                if not on_terminal:
                    print(f"  {step.name}: ready after {time.monotonic() - began_s:.0f} s", flush=True)
            if on_terminal:
                draw(steps, time.monotonic() - began_s)
    print(f"{CLEAR_LINE if on_terminal else ''}Ready in {time.monotonic() - began_s:.0f} s", flush=True)


def draw(steps: list[Step], seconds: float) -> None:
    """Redraw the bar."""
    for step in steps:
        if step.name == "torch":
            step.fraction = max(step.fraction, min(0.6, downloaded(TORCH_FOLDER) / TORCH_BYTES))
    part = sum(step.share * step.fraction for step in steps) / sum(step.share for step in steps)
    names = ", ".join(step.name for step in steps if step.running and step.fraction < 1)
    print(
        f"{CLEAR_LINE}[{'#' * round(part * BAR_WIDTH):<{BAR_WIDTH}}] {part:4.0%}  {seconds:.0f} s  {names}",
        end="",
        flush=True,
    )


def downloaded(folder: Path) -> int:
    """Return the downloaded bytes of the wheel; pip first uses a temporary name."""
    total = 0
    for path in [*folder.glob("*.whl"), *folder.glob("pip-*/*.whl")]:
        with suppress(FileNotFoundError):  # pip moves it
            total = max(total, path.stat().st_size)
    return total


def main() -> int:
    """Prepare; the exit code is 0 only if .venv is ready."""
    if len(sys.argv) != 2 or sys.argv[1] not in PROFILES:
        print(f"usage: scripts/setup.sh {'|'.join(PROFILES)}", file=sys.stderr)
        return 2
    profile = sys.argv[1]
    files = ("uv.lock", "pyproject.toml", "scripts/install_torch.py", "scripts/setup.py")
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in files)).hexdigest()
    stamp = VENV / f".spillway-{'run' if profile == 'run' else 'test'}"  # unit and test have the same packages
    try:
        prepare(profile, stamp, f"{digest} {os.environ.get('SPILLWAY_TORCH', '')}")
    except SetupFailed as failure:
        print(f"\nSetup failed. {failure}\nFull log: {LOG}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
