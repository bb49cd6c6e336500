"""A prepared process that forks agents: everything is imported once, each agent is a fork away from running.

`python -m kici.adapters.zygote FD MODULE:FUNCTION PADDING`, started by `adapters.zygote_client` with a scrubbed
environment.  It listens on the sequenced-packet socket FD.  A request carries three descriptors: where the agent
writes, a file for its environment, and a pipe; the agent just inherits any more.  The child prepares itself, enters
its control groups, and waits for a byte in the pipe; the coordinator, which knows by then who the child is, fills
the file before it writes that byte.  So a credential never passes through this process, whose memory all later
children would inherit; and when the coordinator gives up or dies, the pipe closes and the child ends before it was
an agent.

It ends when its socket closes; its children live on.  No threads, and nothing of the coordinator, in here.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MARK: Final = "AGENT_COMPUTE_MARK"
TITLE: Final = "kici-agent"
DESCRIPTORS: Final = ("output", "environment", "go")
DESCRIPTORS_MAX: Final = 8
REQUEST_BYTES_MAX: Final = 64 * 1024
_PR_SET_NAME: Final = 15
_FAILED: Final = 70

Run = Callable[[dict[str, str]], int]


@dataclass(frozen=True)
class Areas:
    """Where in memory this process's command line and initial environment lie: what `/proc` shows of it."""

    arguments: tuple[int, int]
    environment: tuple[int, int]

    def show(self, mark: str) -> None:
        """Let `/proc` show the command line and the environment of an agent with this mark."""
        assignment = f"{MARK}={mark}".encode()
        for (start, end), words in (
            (self.arguments, [TITLE.encode(), assignment]),
            (self.environment, [assignment]),
        ):
            text = b"".join(word + b"\0" for word in words)
            if len(text) < end - start:
                ctypes.memset(start, 0, end - start)
                ctypes.memmove(start, text, len(text))


def own_areas() -> Areas:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_arguments, end_arguments, start_environment, end_environment = map(int, fields[45:49])
    return Areas((start_arguments, end_arguments), (start_environment, end_environment))


def started_at(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def serve(control: socket.socket, run: Run) -> None:
    """Until the other side is gone."""
    areas = own_areas()
    wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    own = [control.fileno(), wake_reader, wake_writer]
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_reader, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            report_exits(control)
        if control.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(
                control, REQUEST_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                return
            answer(control, json.loads(data), descriptors, lambda request: become(own, areas, request, run))


def answer(
    control: socket.socket, request: dict[str, Any], descriptors: list[int], child: Callable[[dict[str, Any]], None]
) -> None:
    """Fork, and tell who the child is; its pidfd goes along while the pid cannot mean anybody else."""
    try:
        pid = os.fork()
        if pid == 0:
            child({**request, **dict(zip(DESCRIPTORS, descriptors, strict=False))})
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        control.send(json.dumps({"number": request["number"], "error": str(error)}).encode())
        return
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    reply = {"number": request["number"], "pid": pid, "started": started_at(pid)}
    socket.send_fds(control, [json.dumps(reply).encode()], [pidfd])
    os.close(pidfd)


def report_exits(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(json.dumps({"exited": pid, "status": status}).encode())


def become(own: list[int], areas: Areas, request: Mapping[str, Any], run: Run) -> None:
    """In the child: stop being a zygote, be an agent, and never return."""
    code = _FAILED
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for descriptor in own:
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (request["output"], 1), (request["output"], 2)):
            os.dup2(source, target)
        for descriptor in (null, request["output"]):
            os.close(descriptor)
        areas.show(request["mark"])
        ctypes.CDLL(None).prctl(_PR_SET_NAME, TITLE.encode(), 0, 0, 0)
        for group in request["groups"]:
            Path(group).write_text(str(os.getpid()))
        os.chdir(request["cwd"])
        if os.read(request["go"], 1) != b"1":
            os._exit(0)
        os.close(request["go"])
        with os.fdopen(request["environment"], "rb") as file:
            environment = json.loads(file.read())
        os.environ.clear()
        os.environ.update(environment)
        code = run(environment)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else _FAILED
    except BaseException:  # noqa: BLE001  # above this frame lives the zygote, which the child must not become
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def main() -> None:
    """Import the program, freeze what it needs, serve."""
    number, target = sys.argv[1:3]
    control = socket.socket(fileno=int(number))
    module, _, name = target.partition(":")
    run: Run = getattr(importlib.import_module(module), name)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file, unless somebody replaced it
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": True}).encode())
    serve(control, run)


if __name__ == "__main__":
    main()
