"""The host as seen from a process that has locked itself into a folder: programs of it can still be started there."""

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


class Outside:
    """Made before `lock_in`: what it needs later is open by then."""

    def __init__(self, root: Path | None) -> None:
        self.folder = Path.cwd() if root is None else root
        """Where our `/` is, by the host's names; without a lock our own folder."""
        self._is_locked = root is not None
        self._root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        self._dev = os.open("/dev", os.O_RDONLY | os.O_DIRECTORY)
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._network = os.open("/proc/self/ns/net", os.O_RDONLY)

    def lock_in(self) -> None:
        if self._is_locked:
            os.chroot(self.folder)
            os.chdir("/")

    def path(self, inner: str) -> str:
        """A file of ours by the host's name."""
        return f"{self.folder}{inner}" if self._is_locked else inner

    def start(self, argv: Sequence[str], *, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """A program that ends with us, writing where we write."""
        return subprocess.Popen(argv, stdin=self._nothing, pass_fds=fds, preexec_fn=lambda: self._get_out(None))

    def run(self, *argv: str, stdin: str, network: int | None = None) -> None:
        """Raises `OSError` with what it printed."""
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: self._get_out(network),
        )
        if done.returncode != 0:
            raise OSError(f"{argv}: {done.stderr.strip()}")

    def open_tap(self, name: str) -> int:
        """The program's end of an interface, which is made where it is not there."""
        descriptor = os.open("net/tun", os.O_RDWR | os.O_NONBLOCK, dir_fd=self._dev)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
        return descriptor

    def new_network(self) -> int:
        """A network namespace, as long as the descriptor or a socket in it is open."""
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            return os.open(f"{os.getpid()}/ns/net", os.O_RDONLY, dir_fd=self._proc)
        finally:
            _check(_libc.setns(self._network, _CLONE_NEWNET))

    @contextmanager
    def inside(self, network: int) -> Iterator[None]:
        """New sockets are in that network."""
        _check(_libc.setns(network, _CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(self._network, _CLONE_NEWNET))

    def _get_out(self, network: int | None) -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.fchdir(self._root)
        os.chroot(".")
        os.chdir(self.folder)
        if network is not None:
            _check(_libc.setns(network, _CLONE_NEWNET))


def call_ourselves(name: str) -> None:
    """What the kernel calls this process."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
