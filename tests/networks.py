"""Networks of their own for processes of tests, where the caller is root: Linux's network namespaces without a name.

A network lives as long as somebody holds it open or runs in it, so none outlives the tests, however they end. The only
addresses are those given here.
"""

import ctypes
import functools
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self, TypeVar

PROGRAMS: Final = ("ip", "nsenter", "setpriv", "unshare")
CLONE_NEWNET: Final = 0x40000000  # unshare(2), setns(2)
_libc: Final = ctypes.CDLL(None, use_errno=True)
_wires: Final = itertools.count(1)
T = TypeVar("T")


@functools.cache
def can_be_made() -> bool:
    """Report whether this process may make networks: as root on Linux, with its usual programs."""
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        return False
    try:
        Network().close()
    except (OSError, subprocess.CalledProcessError):  # in many a container
        return False
    return True


class Network:
    """One network, at first with its loopback device alone."""

    def __init__(self) -> None:
        """Make it. Raises OSError where that is not allowed."""
        self._fd = _in_thread(_make)
        self.ip("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """The file that other processes of root's enter it by, for as long as we hold it open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def command(self, *command: str) -> list[str]:
        """Return what runs a command in here."""
        return ["nsenter", f"--net={self.path}", *command]

    def ip(self, *arguments: str) -> None:
        """Run the program ``ip`` in here."""
        subprocess.run(self.command("ip", *arguments), check=True)

    def listen(self, host: str, port: int) -> socket.socket:
        """Return a socket that listens in here, whoever accepts from it."""
        return self._do(lambda: socket.create_server((host, port)))

    def is_listened_on(self, host: str, port: int) -> bool:
        """Report whether somebody in here accepts connections."""
        try:
            self._do(lambda: socket.create_connection((host, port), timeout=1)).close()
        except OSError:
            return False
        return True

    def _do(self, what: Callable[[], T]) -> T:
        def do() -> T:
            enter(self.path)
            return what()

        return _in_thread(do)

    def close(self) -> None:
        """Hold it open no longer."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Link:
    """A wire between two networks, a pair of devices with an address each; it can be pulled out and put back."""

    def __init__(self, near: Network, far: Network) -> None:
        number = next(_wires)
        self.near_host, far_host = f"10.77.{number % 256}.1", f"10.77.{number % 256}.2"
        self._near, self._device = near, f"wire{number}"
        near.ip("link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", far.path)
        for network, device, host in ((near, self._device, self.near_host), (far, "eth0", far_host)):
            network.ip("address", "add", f"{host}/30", "dev", device)
            network.ip("link", "set", device, "up")

    def cut(self) -> None:
        """Lose whatever is sent from either side, and tell nobody."""
        self._near.ip("link", "set", self._device, "down")

    def mend(self) -> None:
        """Carry again."""
        self._near.ip("link", "set", self._device, "up")


def enter(path: str) -> None:
    """Move the calling thread to the network with this ``path``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(fd, CLONE_NEWNET))
    finally:
        os.close(fd)


def _make() -> int:
    _check(_libc.unshare(CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(what: Callable[[], T]) -> T:
    """Do it in a thread that ends with it, since a thread stays in the network that it has entered."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(what).result()
