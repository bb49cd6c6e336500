"""A network of its own for tests of microVMs: a namespace that stands for the host, and others around it.

No interface leads out of these namespaces, so no packet of a test can leave this machine.  `around` adds what guests
are to be kept from: a private network with a machine and a metadata service in it, and an internet.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_numbers = count(1)

LAN = "10.9.9.9"
METADATA = "169.254.169.254"
INTERNET = "203.0.113.10"
_SERVE = """
import socket, sys, threading, time
def serve(listener):
    while True:
        listener.accept()[0].close()
for place in sys.argv[1:]:
    host, _, port = place.rpartition(":")
    threading.Thread(target=serve, args=(socket.create_server((host, int(port))),), daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""


class Namespace:
    def __init__(self, what: str) -> None:
        self.name = f"kici-{os.getpid()}-{next(_numbers)}-{what}"
        self._others: list[subprocess.Popen[bytes]] = []

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def up(self) -> None:
        subprocess.run(("ip", "netns", "add", self.name), check=True)
        self.run("ip", "link", "set", "lo", "up")

    def down(self) -> None:
        for process in self._others:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        subprocess.run(("ip", "netns", "delete", self.name), check=False)

    def command(self, *argv: str | Path) -> tuple[str, ...]:
        """A command line that runs in this network (unlike `ip netns exec`, with the same /sys)."""
        return ("nsenter", f"--net={self.path}", *map(str, argv))

    def run(self, *argv: str | Path, stdin: str | None = None) -> str:
        done = subprocess.run(self.command(*argv), input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def serve(self, *places: str) -> None:
        """Accept connections at each `address:port`, until the end."""
        process = subprocess.Popen(
            self.command(sys.executable, "-c", _SERVE, *places),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._others.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n", f"cannot serve at {places}"

    def interfaces(self) -> list[str]:
        lines = self.run("ip", "-o", "link", "show").splitlines()
        return [line.split(": ")[1].split("@")[0] for line in lines]

    @contextmanager
    def enter(self) -> Iterator[None]:
        """This thread's new sockets, threads and children are in this network as long as the block runs."""
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        inside = os.open(self.path, os.O_RDONLY)
        try:
            assert libc.setns(inside, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0
            os.close(before)
            os.close(inside)


@contextmanager
def namespace(what: str = "host") -> Iterator[Namespace]:
    made = Namespace(what)
    made.up()
    try:
        yield made
    finally:
        made.down()


@contextmanager
def around(host: Namespace) -> Iterator[None]:
    """Machines that guests must not reach, and one that they may."""
    with namespace("lan") as lan, namespace("net") as internet:
        _join(host, lan, "vlan", "10.9.9.1/24", f"{LAN}/24", gateway="10.9.9.1")
        lan.run("ip", "addr", "add", f"{METADATA}/32", "dev", "lo")
        host.run("ip", "route", "add", METADATA, "via", LAN)
        _join(host, internet, "vnet", "203.0.113.1/24", f"{INTERNET}/24", gateway="203.0.113.1")
        lan.serve(f"{LAN}:80", f"{METADATA}:80")
        internet.serve(f"{INTERNET}:80")
        yield


def _join(host: Namespace, other: Namespace, name: str, ours: str, theirs: str, *, gateway: str) -> None:
    host.run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", other.name)
    host.run("ip", "addr", "add", ours, "dev", name)
    host.run("ip", "link", "set", name, "up")
    other.run("ip", "addr", "add", theirs, "dev", "eth0")
    other.run("ip", "link", "set", "eth0", "up")
    other.run("ip", "route", "add", "default", "via", gateway)


def reachable(places: Sequence[str], seconds: float = 0.5) -> dict[str, bool]:
    """Which `address:port` accept a connection from here."""
    found = {}
    for place in places:
        host, _, port = place.rpartition(":")
        with socket.socket() as probe:
            probe.settimeout(seconds)
            found[place] = probe.connect_ex((host, int(port))) == 0
    return found


def until(condition: object, *, seconds: float = 20.0, what: str = "") -> None:
    assert callable(condition)
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, f"within {seconds:g} s did not happen: {what}"
        time.sleep(0.01)
