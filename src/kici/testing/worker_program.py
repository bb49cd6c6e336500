"""`kici worker` as a process, for tests from the outside."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from kici.testing.programs import KICI, START_SECONDS, CoordinatorProgram, environment, marked, until

SCALERS = """
version: 1
scalers:
  - name: far
    type: bare-metal
    maxAgents: {max_agents}
    labelSets:
      - labels: [linux, far]
        binaryPath: kici-agent
"""


class WorkerProgram:
    """A worker of a coordinator: a data directory, a scalers file with processes, and a join token."""

    def __init__(
        self,
        folder: Path,
        join: Sequence[str],
        *,
        max_agents: int = 8,
        within: Sequence[str] = (),
        extra: Sequence[str] = (),
    ) -> None:
        """`within`: as for `CoordinatorProgram`; `extra`: more words of the command."""
        folder.mkdir(parents=True, exist_ok=True)
        self.data_dir = folder / "data"
        self.join = tuple(join)
        self.scalers = folder / "scalers.yaml"
        self.scalers.write_text(SCALERS.format(max_agents=max_agents))
        self.token_file = folder / "join-token"
        self.log = folder / "worker.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._within = tuple(within)
        self._extra = tuple(extra)

    def takes_token(self, coordinator: CoordinatorProgram) -> Self:
        done = coordinator.run("admin", "join-token", "create")
        assert done.returncode == 0, done.stderr
        self.token_file.write_text(done.stdout)
        return self

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop(signal.SIGTERM)

    def start(self) -> None:
        """Start it.  Whether it is linked is for coordinators to say."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self._within,
                    *KICI,
                    "worker",
                    *("--join", ",".join(self.join)),
                    *("--token-file", str(self.token_file)),
                    *("--scalers", str(self.scalers)),
                    *("--data-dir", str(self.data_dir)),
                    *self._extra,
                ],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, number: signal.Signals, *, seconds: float = 40.0) -> int:
        """Signal it and wait for its end.  Its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def is_linked(self, coordinator: CoordinatorProgram) -> bool:
        mine = (self.data_dir / "instance-id").read_text().strip() if (self.data_dir / "instance-id").exists() else ""
        peers = coordinator.admin("peers")
        return any(each["id"] == mine and each["role"] == "worker" and each["linkedTo"] for each in peers)

    def waits_until_linked(self, coordinator: CoordinatorProgram) -> None:
        process = self.process
        assert process is not None
        until(
            lambda: process.poll() is not None or self.is_linked(coordinator),
            seconds=START_SECONDS,
            what="the worker is linked",
        )
        assert process.poll() is None, self.log.read_text()[-4000:]

    def agent_processes(self) -> list[int]:
        return sorted(marked(str(self.data_dir)))

    def is_clean(self) -> bool:
        """Nothing is left of any agent: no process, record or folder."""
        folders = ("agents", "work", "worker")
        leftovers = [path for folder in folders for path in (self.data_dir / folder).glob("*")]
        return not self.agent_processes() and not leftovers

    def kill_agents(self) -> None:
        for pid in self.agent_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class TcpRelay:
    """Passes connections to a port, and can cut them, in threads of its own: for tests that use no loop."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.refuses = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection that there is."""
        with self._lock:
            sockets, self._open = self._open, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = None if self.refuses else socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                far = None
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
