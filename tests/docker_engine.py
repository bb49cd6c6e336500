"""A Docker engine of our own for tests: in a network namespace without a way out, with its data in a folder of ours.

Nothing of a machine's own engine is used or seen.  What must share the engine's network (packet filter rules, a
registry, programs that containers talk to) is started in its namespace too: `Lab.enter` and `Lab.command`.

As a program, `python -m tests.docker_engine` runs one until it is ended, for a person who wants to try something.
"""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kici.testing import engines

_CLONE_NEWNET = 0x40000000
START_SECONDS = 30.0


class Lab:
    """One network namespace with a Docker engine in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"kici-{os.getpid()}-{folder.name[-6:]}"
        self.socket = folder / "docker.sock"
        self.listens_at: tuple[str, ...] = ()
        """Where else the engine listens, such as `tcp://127.0.0.1:2375` of the lab's own network."""
        self._daemon: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []
        self.others_namespaces: list[str] = []
        """Further network namespaces that go with the lab."""

    @property
    def namespace(self) -> str:
        return f"/run/netns/{self.name}"

    def command(self, *argv: str | Path) -> tuple[str, ...]:
        """A command line that runs in the lab's network."""
        return ("nsenter", f"--net={self.namespace}", *map(str, argv))

    def run(self, *argv: str | Path, stdin: str | None = None) -> str:
        """Run a short command in the lab's network; its output."""
        done = subprocess.run(self.command(*argv), input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def spawn(
        self, *argv: str | Path, env: Mapping[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program in the lab's network; it is ended with the lab."""
        with (output or Path(os.devnull)).open("ab") as file:
            process = subprocess.Popen(
                self.command(*argv),
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._others.append(process)
        return process

    @contextmanager
    def enter(self) -> Iterator[None]:
        """This thread's new sockets and children are in the lab's network as long as the block runs."""
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
        inside = os.open(self.namespace, os.O_RDONLY)
        assert libc.setns(inside, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0
            os.close(before)
            os.close(inside)

    def up(self) -> None:
        subprocess.run(("ip", "netns", "add", self.name), check=True)
        self.run("ip", "link", "set", "lo", "up")
        self.start_engine()

    @property
    def log(self) -> Path:
        return self.folder / "dockerd.log"

    def daemon(self) -> tuple[str, ...]:
        """The command line of the engine itself."""
        folders = {"--data-root": "root", "--exec-root": "exec", "--pidfile": "docker.pid"}
        hosts = (f"unix://{self.socket}", *self.listens_at)
        return (
            "dockerd",
            *(word for option, name in folders.items() for word in (option, str(self.folder / name))),
            *(word for host in hosts for word in ("-H", host)),
            *("--bip", "172.29.0.1/24", "--default-address-pool", "base=172.29.64.0/18,size=24"),
        )

    def start_engine(self) -> None:
        log = self.log
        with log.open("ab") as output:
            self._daemon = subprocess.Popen(
                self.command(*self.daemon()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._daemon.poll() is None, f"the engine ended:\n{log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"the engine does not answer:\n{log.read_text()[-4000:]}"
            time.sleep(0.05)

    def stop_engine(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._daemon is not None:
            self._daemon.send_signal(number)
            self._daemon.wait(timeout=60)
            self._daemon = None

    def down(self) -> None:
        for process in self._others:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._daemon is not None:
            try:
                self.remove_all()
            finally:
                self.stop_engine()
        for name in (self.name, *self.others_namespaces):
            subprocess.run(("ip", "netns", "delete", name), check=False)
        for mount in _mounts_below(self.folder):
            subprocess.run(("umount", "-l", mount), check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ the engine, without the code under test

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """One request; the answer's JSON, or None for a missing object."""
        connection = _UnixConnection(str(self.socket))
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            return None
        assert answer.status < 400, f"{method} {path}: {answer.status} {data.decode(errors='replace')}"
        return json.loads(data) if data.strip() else {}

    def containers(self, **labels: str) -> list[dict[str, Any]]:
        """Everything that is there, running or not; underscores in names of labels stand for hyphens."""
        pairs = [f"{name.replace('_', '-')}={value}" for name, value in labels.items()]
        filters = json.dumps({"label": pairs}).replace(" ", "")
        found: list[dict[str, Any]] = self.ask("GET", f"/containers/json?all=1&filters={_quote(filters)}")
        return found

    def remove_all(self) -> None:
        for one in self.containers():
            try:
                self.ask("DELETE", f"/containers/{one['Id']}?force=1&v=1")
            except AssertionError as error:
                if "already in progress" not in str(error):
                    raise

    def import_image(self, name: str, tree: Path, *changes: str) -> None:
        """Make an image of a folder."""
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                for entry in sorted(tree.iterdir()):
                    tar.add(entry, entry.name)
            size = file.tell()
            file.seek(0)
            repo, _, tag = name.rpartition(":")
            query = f"fromSrc=-&repo={_quote(repo)}&tag={tag}" + "".join(f"&changes={_quote(one)}" for one in changes)
            connection = _UnixConnection(str(self.socket))
            connection.request(
                "POST",
                f"/images/create?{query}",
                file,
                {"Content-Type": "application/x-tar", "Content-Length": str(size)},
            )
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
        assert answer.status == 200, text
        assert "error" not in text, text

    def _answers(self) -> bool:
        try:
            return self.ask("GET", "/version") is not None
        except (OSError, http.client.HTTPException):
            return False


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextmanager
def lab(*listens_at: str) -> Iterator[Lab]:
    """A lab for as long as the block runs.  Ask `engines.absence("docker")` first."""
    made = Lab(Path(tempfile.mkdtemp(prefix="kici-docker-")))
    made.listens_at = listens_at
    try:
        made.up()
        yield made
    finally:
        made.down()


def _quote(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _mounts_below(folder: Path) -> Sequence[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sorted((line.split()[1] for line in lines if line.split()[1].startswith(f"{folder}/")), reverse=True)


# ---------------------------------------------------------------------- images


def busybox_tree(folder: Path) -> Path:
    """A file system with a statically linked shell and nothing else: no C library, no loader, no Python."""
    (folder / "bin").mkdir(parents=True)
    shutil.copy(_busybox(), folder / "bin" / "busybox")
    for name in (
        "sh",
        "echo",
        "sleep",
        "cat",
        "id",
        "ls",
        "env",
        "true",
        "nc",
        "ip",
        "kill",
        "ps",
        "pwd",
        "grep",
        "tr",
    ):
        (folder / "bin" / name).symlink_to("busybox")
    return folder


def empty_tree(folder: Path) -> Path:
    """Nothing that could be run."""
    folder.mkdir(parents=True)
    (folder / "hello").write_text("hello\n")
    return folder


def _busybox() -> str:
    for path in ("/usr/bin/busybox", "/bin/busybox"):
        if Path(path).exists():
            return path
    raise AssertionError("busybox-static is not installed")


if __name__ == "__main__":
    if (reason := engines.absence("docker")) is not None:
        sys.exit(reason)
    with lab() as running:
        sys.stdout.write(f"DOCKER_HOST=unix://{running.socket}  {' '.join(running.command())}\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
