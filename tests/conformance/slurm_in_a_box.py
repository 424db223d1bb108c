"""A real Slurm of one machine in its own namespaces: it is invisible outside, and nothing outlives it.

As root, it runs a command beside Debian's munged, slurmctld and slurmd, and an sshd that accepts the box's root user
with the box's key. The box has its own mounts (/etc/slurm, /run, /tmp and root's home are folders of it), its own
process ids (all end with the command), and a network with only a loopback device.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

PROGRAMS: Final = ("slurmctld", "slurmd", "munged", "sshd", "ssh-keygen", "rsync", "unshare", "ip")
PACKAGES: Final = "slurm-wlm munge openssh-server rsync util-linux iproute2"
MODULE: Final = "tests.conformance.slurm_in_a_box"
NAMESPACES: Final = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--mount",
    "--pid",
    "--net",
    "--fork",
    "--mount-proc",
    "--kill-child",
)
NAME: Final = "box"  # of the Slurm cluster, and of its login node
SSH_PORT: Final = 2222  # the only listener in this network
CPUS: Final = 4  # that Slurm is configured with
START_LIMIT_S: Final = 60.0
POLL_S: Final = 0.2

SLURM_CONF: Final = f"""\
ClusterName={NAME}
SlurmctldHost={{host}}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={{folder}}/munge/socket
StateSaveLocation={{folder}}/slurmctld
SlurmdSpoolDir={{folder}}/slurmd
SlurmctldPidFile={{folder}}/slurmctld.pid
SlurmdPidFile={{folder}}/slurmd.pid
SlurmctldLogFile={{folder}}/slurmctld.log
SlurmdLogFile={{folder}}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=5
NodeName={{host}} NodeAddr=127.0.0.1 CPUs={CPUS} State=UNKNOWN
PartitionName=all Nodes={{host}} Default=YES MaxTime=1:00:00
"""
SSHD_CONFIG: Final = f"""\
Port {SSH_PORT}
ListenAddress 127.0.0.1
HostKey {{folder}}/host_key
PidFile {{folder}}/sshd.pid
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
PasswordAuthentication no
Subsystem sftp internal-sftp
"""
LOGIN: Final = f"""\
Host {NAME}
  HostName 127.0.0.1
  Port {SSH_PORT}
  User root
  IdentityFile {{folder}}/key
  IdentitiesOnly yes
"""


def missing() -> str | None:
    """Return what this machine lacks for a box; None: nothing."""
    if os.geteuid() != 0:
        return "namespaces and slurmd need root"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"there is no {', '.join(lacking)}; Debian has them: apt-get install {PACKAGES}" if lacking else None


def run_in_box(folder: Path, mounts: Mapping[Path, str], environment: Mapping[str, str], command: Sequence[str]) -> int:
    """Run a command in a box whose files are in a new folder outside /tmp; return its exit status.

    ``mounts``: further folders, and where to mount them. ``environment``: of all processes in the box.
    """
    there = json.dumps({str(source): target for source, target in mounts.items()})
    box = [*NAMESPACES, sys.executable, "-m", MODULE, str(folder), there, *command]
    return subprocess.run(box, check=False, env={**os.environ, **environment}).returncode


def main() -> int:
    """Run as the first process of the box."""
    folder, mounts, command = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    _mount(folder)
    for source, target in mounts.items():
        Path(target).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", source, target], check=True)
    _start(folder)
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:  # orphans in the box become children of its first process
        pid, status = os.wait()
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)


def _mount(folder: Path) -> None:
    """Mount the box's folders and files over the system's."""
    home = folder / "home"
    for name in ("home/.ssh", "home/.slurm", "slurm", "run/sshd", "tmp", "munge", "slurmctld", "slurmd"):
        (folder / name).mkdir(parents=True)
    accounts = Path("/etc/passwd").read_text().splitlines(keepends=True)
    others = [line for line in accounts if not line.startswith("root:")]
    (folder / "passwd").write_text("".join([f"root:x:0:0:root:{home}:/bin/bash\n", *others]))
    # Read by login shells: commands on the login node and in jobs get this environment.
    kept = {**os.environ, "HOME": str(home)}
    names = ("PATH", *(name for name in kept if name.startswith(("UV_", "PIP_", "SKYPILOT_"))))
    (folder / "profile").write_text("".join(f"export {name}={_quoted(kept[name])}\n" for name in names if name in kept))
    for source, target in (
        ("passwd", "/etc/passwd"),
        ("profile", "/etc/profile"),
        ("slurm", "/etc/slurm"),
        ("run", "/run"),
        ("tmp", "/tmp"),
    ):
        subprocess.run(["mount", "--bind", str(folder / source), target], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # If all addresses are 127.…, resolvers asked for addresses of this machine's kind (by Slurm) find none.
    subprocess.run(["ip", "address", "add", "192.0.2.1/32", "dev", "lo"], check=True)
    os.environ["HOME"] = str(home)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _start(folder: Path) -> None:
    """Start everything; return once the node accepts jobs."""
    host = socket.gethostname().split(".")[0]
    (folder / "slurm" / "slurm.conf").write_text(SLURM_CONF.format(folder=folder, host=host))
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    (folder / "home" / ".slurm" / "config").write_text(LOGIN.format(folder=folder))
    for name in ("key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    shutil.copy(folder / "key.pub", folder / "home" / ".ssh" / "authorized_keys")
    key = folder / "munge" / "key"
    key.touch(0o400)
    key.write_bytes(os.urandom(1024))
    munge = {"key-file": key, "socket": folder / "munge/socket", "pid-file": folder / "munge/pid"}
    munge |= {"log-file": folder / "munge/log", "seed-file": folder / "munge/seed"}
    _run("munged", "--force", *(f"--{name}={path}" for name, path in munge.items()))
    _run("slurmctld", "-c")
    _run("slurmd")
    _run(str(shutil.which("sshd")), "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log"))
    deadline_s = time.monotonic() + START_LIMIT_S
    while "idle" not in _run("sinfo", "--noheader", "--format=%T", may_fail=True):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"Slurm has no idle node within {START_LIMIT_S:g} s; its logs are in {folder}")
        time.sleep(POLL_S)


def _run(*command: str, may_fail: bool = False) -> str:
    done = subprocess.run(command, check=not may_fail, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
