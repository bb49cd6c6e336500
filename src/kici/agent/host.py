"""What the agent asks of the kernel: facts about the machine, its children, and what others may read of itself.

Linux has all of it.  Elsewhere the agent runs with less: what a step left behind is found by its process group only.
"""

import ctypes
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from kici.agent.environment import HostFacts
from kici.domain.engine_sockets import named_engine, usual_sockets
from kici.domain.errors import Misconfigured

SECRETS: Final = ("KICI_AGENT_TOKEN", "KICI_SCALER_CLAIM_CODE")
TOKEN_FILE: Final = "KICI_AGENT_TOKEN_FILE"
STANDARD_INPUT: Final = "/dev/stdin"
_TOKEN_BYTES_MAX: Final = 4096
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36
METADATA_ADDRESS: Final = "169.254.169.254"
NEEDED_FOR_CONTAINERS: Final = ("aiodocker", "kici.apps.job_container")
"""Not in every agent's installation: one in somebody else's image has neither."""
_MAY_MAKE_CONTAINERS: Final = sys.platform == "linux" and all(find_spec(name) for name in NEEDED_FOR_CONTAINERS)
"""Found out at import, once for all agents that are forked afterwards."""


def facts(environ: Mapping[str, str] | None = None) -> HostFacts:
    """`environ`: the agent's own."""
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return HostFacts(
        system=sys.platform,
        machine=os.uname().machine,
        hostname=socket.gethostname().lower(),
        cpu_count=os.cpu_count() or 0,
        memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        user=user,
        uid=uid,
        random_hex8=os.urandom(4).hex(),
        engine=find_engine(environ or {}),
    )


def find_engine(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Kind and address of a container engine that we may use, if this installation can talk to one."""
    if not _MAY_MAKE_CONTAINERS:
        return None
    named = named_engine(environ)
    environ = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **environ}
    found = [named] if named is not None else [(kind, f"unix://{path}") for kind, path in usual_sockets(environ)]
    for kind, url in found:
        if not url.startswith("unix://") or _is_usable(url.removeprefix("unix://")):
            return kind, url
    return None


def _is_usable(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode) and os.access(path, os.R_OK | os.W_OK)
    except OSError:
        return False


def take_environment() -> dict[str, str]:
    """A copy of this process's environment; the credentials are wiped from the original.

    Deleting a variable leaves its text where `/proc/<pid>/environ` shows it: the bytes themselves are overwritten.
    Raises `Misconfigured` when a credential that is in a file cannot be taken.
    """
    environ = dict(os.environ)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in SECRETS:
        if name in environ:
            address = libc.getenv(name.encode())
            if address:
                ctypes.memset(address, ord("x"), len(os.fsencode(environ[name])))
            del os.environ[name]
    file = environ.pop(TOKEN_FILE, "")
    if file:
        environ["KICI_AGENT_TOKEN"] = _take_token(file, environ)
    return environ


def _take_token(file: str, environ: dict[str, str]) -> str:
    """The credential that somebody put into a file for us alone; nobody finds it there afterwards."""
    if "KICI_AGENT_TOKEN" in environ:
        raise Misconfigured(f"both KICI_AGENT_TOKEN and {TOKEN_FILE} are set: give the credential one way only")
    try:
        token = _given_token() if file == STANDARD_INPUT else _kept_token(file)
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{TOKEN_FILE}: the credential in {file} cannot be taken: {error}") from error
    if not token:
        raise Misconfigured(f"{TOKEN_FILE}: {file} is empty")
    return token


def _kept_token(file: str) -> str:
    with open(file) as text:
        token = text.read().strip()
    os.unlink(file)
    return token


def _given_token() -> str:
    """One line of the standard input, which is nobody's from then on.

    Read from what is open: who dropped rights since then could not open it again by its name.
    """
    given = b""
    while b"\n" not in given and len(given) < _TOKEN_BYTES_MAX and (part := os.read(0, _TOKEN_BYTES_MAX)):
        given += part
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return given.partition(b"\n")[0].decode().strip()


def shield() -> None:
    """Adopt what the job's processes leave behind, and close this process's memory to them."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def children() -> list[int]:
    """Processes whose parent is this one.  Only Linux can say."""
    if sys.platform != "linux" or not _has_children():
        return []  # as after most steps: nobody need look at every process of the machine
    own = str(os.getpid()).encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    stat = file.read(1024)
            except OSError:
                continue  # it is gone
            if stat.rpartition(b")")[2].split(None, 2)[1] == own:
                found.append(int(name))
    return found


def _has_children() -> bool:
    """Running or ended; collects none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill(pid: int) -> None:
    """KILL a child; nothing if it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        pass  # it became another user: not ours to end


def signal_group(group: int, number: int) -> None:
    """Signal a process group; nothing if it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def reap() -> list[tuple[int, int]]:
    """Children that ended since the last call: pid and exit code, negative for a signal."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def close_metadata() -> str | None:
    """Inside a VM: make the metadata address unreachable for jobs.  What went wrong, if anything."""
    command = ["ip", "route", "replace", "prohibit", METADATA_ADDRESS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the metadata address stays open: {error}"
    return None if done.returncode == 0 else f"the metadata address stays open: {done.stderr.strip()}"
