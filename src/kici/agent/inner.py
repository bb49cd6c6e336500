"""The first process in a job's container: takes the job from its standard input, runs it, and ends with it.

What the job is told (its secrets above all) comes this way because nothing else leaves no trace: it is in no image,
no description of the container, no file.  The input stays open as long as the agent's side lives; its end is the end
of the container, so that no container outlives whoever started it.

Runs in any image with the interpreter that comes along, as whoever the image says; imports next to nothing.
"""

import errno
import json
import os
import select
import signal
import sys
from typing import Any, Final, NoReturn

LENGTH_DIGITS: Final = 8
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
ABANDONED: Final = 125
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OOM_COUNTERS: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def packed(order: dict[str, Any]) -> bytes:
    """An order as `main` reads it: how many bytes follow, then `command`, `env` and `directory` as JSON."""
    text = json.dumps(order).encode()
    return b"%0*d" % (LENGTH_DIGITS, len(text)) + text


def main() -> NoReturn:
    """Never returns: ends with the job's exit code, 128 and the signal for one that was killed."""
    head = _read(LENGTH_DIGITS)
    body = _read(int(head)) if head else b""
    if not body:
        os._exit(ABANDONED)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Held back until there is somebody to pass them on to: the kernel drops what a first process does not handle.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = _start(json.loads(body))
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: _send(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        ready = select.select([0, wake], [], [])[0]
        if wake in ready:
            os.read(wake, 512)
            _reap(child)
        if 0 in ready and not os.read(0, 4096):
            os._exit(ABANDONED)


def _read(size: int) -> bytes:
    """Exactly so many bytes, or none."""
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            return b""
        data += more
    return data


def _start(order: dict[str, Any]) -> int:
    command, env = order["command"], {**os.environ, **order["env"]}
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*_FORWARDED, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.chdir(order["directory"])
        os.execvpe(command[0], command, env)  # noqa: S606 (a job is what somebody else wants run)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        what = f"command not found in the image: {command[0]}" if missing else f"cannot start {command[0]}: {error}"
        os.write(2, f"kici: {what}\n".encode())
        os._exit(NOT_FOUND if missing else NOT_EXECUTABLE)


def _send(child: int, number: int) -> None:
    for send in (os.killpg, os.kill):  # it has a group of its own soon, not at once
        try:
            send(child, number)
        except (ProcessLookupError, PermissionError):
            continue
        return


def _reap(child: int) -> None:
    """Collect what ended; with the job's own process everything ends."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                is_oom = code == -signal.SIGKILL and _ran_out_of_memory()
                why = ": it needed more memory than it is limited to" if is_oom else ""
                os.write(2, f"kici: the job was ended by signal {-code}{why}\n".encode())
            os._exit(code if code >= 0 else 128 - code)


def _ran_out_of_memory() -> bool:
    for path in _OOM_COUNTERS:
        try:
            with open(path) as file:
                words = [line.split() for line in file]
        except OSError:
            continue
        return any(name == "oom_kill" and int(count) > 0 for name, count in (pair for pair in words if len(pair) == 2))
    return False


if __name__ == "__main__":
    try:
        main()
    except BaseException as fault:  # noqa: BLE001 (the last words of a container)
        sys.stderr.write(f"kici: the job could not be run in its container: {fault!r}\n")
        sys.stderr.flush()
        os._exit(NOT_EXECUTABLE)
