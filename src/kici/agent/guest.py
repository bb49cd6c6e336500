"""The first process of a microVM: makes the guest a place to work in, and ends it when the agent has ended.

The root file system is read only and shared; what is written goes to the overlay drive.  The agent is a child that
reads the boot data itself, so that the first process never holds a credential.  The machine is reset when the child
ends, which ends its VMM; Ctrl-Alt-Del asks the agent to end first.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Never

from kici.agent import boot_data, program, renewal
from kici.agent.boot_data import BadBootData
from kici.agent.guest_network import network_up
from kici.agent.host import METADATA_ADDRESS

PLACE: Final = "/.kici"
"""Mount points of ours; the image has them, since nothing can be made on a read-only root."""
OVERLAY_DRIVE: Final = "/dev/vdb"
PORT: Final = "kici.boot"
NAME_SERVERS: Final = "nameserver 8.8.8.8\nnameserver 1.1.1.1\n"
BOOT_DATA_SECONDS: Final = 30.0
METADATA_SECONDS: Final = 2.0
WARM_METADATA_SECONDS: Final = 0.3
"""How long an answer may take while a guest waits to be copied: the copy never gets one that the original asked for."""
WARM_LOOK_SECONDS: Final = 0.03
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_MOVE: Final = 8192
_MNT_DETACH: Final = 2
_RB_AUTOBOOT: Final = 0x01234567
_RB_DISABLE_CAD: Final = 0
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}

_libc: Final = ctypes.CDLL(None, use_errno=True)


def main() -> Never:
    """Never returns: the machine is reset."""
    try:
        _mount_basics()
        _overlay_root()
        _mount_rest()
        _name_basics()
        network_up()
        agent = _start_agent()
        _reap_until(agent)
    except BaseException as error:  # noqa: BLE001  # whatever it is, a first process that ends is a kernel panic
        sys.stderr.write(f"kici-init: cannot go on: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    _reset()


# ---------------------------------------------------------------------- file systems


def _mount_basics() -> None:
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")):
        if not os.path.ismount(target):
            _mount(kind, target, kind, _MS_NOSUID)


def _overlay_root() -> None:
    """Become the root of an overlay whose lower layer is the image."""
    drive, root = f"{PLACE}/drive", f"{PLACE}/root"
    if os.path.exists(OVERLAY_DRIVE):
        _mount(OVERLAY_DRIVE, drive, "ext4", _MS_NODEV)
    else:
        _mount("tmpfs", drive, "tmpfs", _MS_NODEV)
    for name in ("upper", "work"):
        os.makedirs(f"{drive}/{name}", exist_ok=True)
    options = f"lowerdir=/,upperdir={drive}/upper,workdir={drive}/work"
    _mount("overlay", root, "overlay", 0, options)
    for target in ("/proc", "/sys", "/dev"):
        _mount(target, root + target, "", _MS_MOVE)
    os.chdir(root)
    _pivot_root(".", f".{PLACE}/old")
    os.chroot(".")
    os.chdir("/")
    _check(_libc.umount2(f"{PLACE}/old".encode(), _MNT_DETACH), "umount the image")


def _mount_rest() -> None:
    for target in ("/dev/pts", "/dev/shm", "/run", "/tmp"):  # noqa: S108  # a guest has one user of it
        os.makedirs(target, exist_ok=True)
    _mount("devpts", "/dev/pts", "devpts", _MS_NOSUID, "mode=620,ptmxmode=666")
    for target in ("/dev/shm", "/run"):  # noqa: S108  # as above
        _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777" if target == "/dev/shm" else "mode=755")  # noqa: S108  # as above
    os.chmod("/tmp", 0o1777)  # noqa: S103, S108  # as everywhere
    with suppress(OSError):
        _mount("cgroup2", "/sys/fs/cgroup", "cgroup2", _MS_NOSUID)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(done, f"mount {source} at {target}")


def _pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(number, new.encode(), old.encode()), "pivot_root")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {what}: {os.strerror(code)}")


# ---------------------------------------------------------------------- network


def _name_basics() -> None:
    with suppress(OSError), open("/etc/resolv.conf", encoding="ascii", errors="replace") as file:
        if "nameserver" in file.read():
            return
    with suppress(OSError):
        if os.path.islink("/etc/resolv.conf"):
            os.unlink("/etc/resolv.conf")
        _write("/etc/resolv.conf", NAME_SERVERS)


# ---------------------------------------------------------------------- the agent


def _start_agent() -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            code = _be_agent()
        except BaseException as error:  # noqa: BLE001  # the machine ends, and its console should say why
            sys.stderr.write(f"kici-init: cannot run the agent: {type(error).__name__}: {error}\n")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _be_agent() -> int:
    document = boot_data.parse_document(_boot_document())
    if boot_data.warms_up(document):
        document = _be_copied()
    lines = boot_data.host_lines(document)
    if lines:
        with open("/etc/hosts", "a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
    environ = boot_data.environment(document)
    with suppress(OSError):
        socket.sethostname(environ.get("KICI_AGENT_ID", "guest"))
    os.chdir("/")
    return program.run(environ)


def _be_copied() -> dict[str, object]:
    """Wait to be stopped, with everything loaded; whoever goes on from there is another machine, and is told which."""
    sys.stdout.write(f"kici-init: warm {' '.join(renewal.renewals())}\n")
    sys.stdout.flush()
    while True:
        document = boot_data.parse_document(_next_document())
        if not boot_data.warms_up(document):
            renewal.renew(boot_data.renewal(document, renewal.DEVICE))
            return document
        time.sleep(WARM_LOOK_SECONDS)


def _next_document() -> bytes:
    for port in _boot_ports():
        return _read_line(port, ends_at=None)
    while True:
        try:
            return _read_metadata(seconds=WARM_METADATA_SECONDS)
        except (OSError, BadBootData):  # cut off by the snapshot
            time.sleep(WARM_LOOK_SECONDS)


def _boot_document() -> bytes:
    """From the port that only this process reads, or from the metadata service.  Raises `BadBootData`."""
    ends_at = time.monotonic() + BOOT_DATA_SECONDS
    for port in _boot_ports():
        return _read_line(port, ends_at=ends_at)
    while True:
        try:
            return _read_metadata()
        except OSError as error:
            if time.monotonic() > ends_at:
                raise BadBootData(f"the metadata service does not answer: {error}") from error
            time.sleep(0.2)


def _boot_ports() -> Iterator[str]:
    base = "/sys/class/virtio-ports"
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        with suppress(OSError), open(f"{base}/{name}/name", encoding="ascii") as file:
            if file.read().strip() == PORT:
                yield f"/dev/{name}"


def _read_line(path: str, *, ends_at: float | None) -> bytes:
    """`ends_at`: how long to wait, by the monotonic clock; None: for ever."""
    data = b""
    with open(path, "rb", buffering=0) as port:
        while not data.endswith(b"\n"):
            part = port.read(65536)
            data += part or b""
            if not part:
                if ends_at is not None and time.monotonic() > ends_at:
                    raise BadBootData("nothing came through the port")
                time.sleep(0.01)
    return data


def _read_metadata(seconds: float = METADATA_SECONDS) -> bytes:
    """Raises `OSError` while nobody answers, `BadBootData` for a wrong answer."""
    import http.client  # costs an emulated processor half a second, and the port needs none of it

    ttl = {"X-metadata-token-ttl-seconds": "60"}
    connection = http.client.HTTPConnection(METADATA_ADDRESS, timeout=seconds)
    try:
        connection.request("PUT", "/latest/api/token", headers=ttl)
        answer = connection.getresponse()
        token = answer.read().decode("ascii", "replace")
        if answer.status != 200:
            raise BadBootData(f"the metadata service gives no token: {answer.status}")
        headers = {"X-metadata-token": token, "Accept": "application/json"}
        connection.request("GET", "/latest/meta-data", headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise BadBootData(f"the metadata service gives no data: {answer.status}")
        return data
    except http.client.HTTPException as error:
        raise BadBootData(f"the metadata service speaks no HTTP: {error!r}") from error
    finally:
        connection.close()


def _reap_until(agent: int) -> None:
    """Collect whatever ends, until the agent has."""
    _libc.reboot(_RB_DISABLE_CAD)  # Ctrl-Alt-Del becomes a signal to us

    def ask(_number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(agent, signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPWR):
        signal.signal(number, ask)
    while True:
        pid, _ = os.wait()
        if pid == agent:
            return


def _reset() -> Never:
    os.sync()
    _libc.reboot(_RB_AUTOBOOT)
    while True:
        time.sleep(1)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
