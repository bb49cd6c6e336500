"""The data directory: what a program keeps on its machine between starts.

Only its owner may look into it.  A held lock keeps a second process out; the kernel lets go of it however the
process ends.  The files here are made once and then stay: the identity of the instance, the owner's token, the
key of the secrets.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from kici.domain.errors import Conflict, Misconfigured
from kici.domain.ids import InstanceId
from kici.ports.entropy import Entropy

INSTANCE_ID: Final = "instance-id"
LOCK: Final = "lock"
OWNER_TOKEN: Final = "owner-token"
ENDPOINT: Final = "endpoint"
SECRET_KEY: Final = "secret-key"
DATABASE: Final = "kici.db"
WORKER_CREDENTIAL: Final = "worker-credential"
RELAY_PORT: Final = "relay-port"
AGENTS: Final = "agents"
_LINE_BYTES_MAX: Final = 4096


def default_data_dir(environment: Mapping[str, str], home: Path) -> Path:
    """Where the data directory is unless a command says otherwise: `KICI_DATA_DIR`, else by the XDG rules."""
    if chosen := environment.get("KICI_DATA_DIR"):
        return Path(chosen)
    state = environment.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else home / ".local" / "state") / "kici"


class DataDir:
    """An opened data directory, locked until `close` or the end of the process."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the directory if need be, and lock it.

        Raises `Conflict` when another process holds it, `Misconfigured` when it cannot be used.
        """
        path = path.absolute()
        try:
            _make_private(path)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, _LINE_BYTES_MAX).decode(errors="replace").strip()
            os.close(lock)
            raise Conflict(
                f"data directory {path} is in use by {holder or 'another process'}; "
                "stop that one, or choose another directory with --data-dir"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return cls(path, lock)

    def close(self) -> None:
        """Let others have it."""
        os.close(self._lock)

    def instance_id(self, entropy: Entropy) -> InstanceId:
        """Who this installation is; made at the first call ever."""
        known = _read_line(self.path / INSTANCE_ID)
        if known is None:
            known = entropy.hex(8)
            _write(self.path / INSTANCE_ID, known)
        return InstanceId(known)

    def owner_token(self) -> str | None:
        return _read_line(self.path / OWNER_TOKEN)

    def write_owner_token(self, plain: str) -> None:
        _write(self.path / OWNER_TOKEN, plain)

    def worker_credential(self) -> str | None:
        """The right of this host to be a worker."""
        return _read_line(self.path / WORKER_CREDENTIAL)

    def keep_worker_credential(self, plain: str | None) -> None:
        """None: the one that there is was refused for good."""
        if plain is None:
            (self.path / WORKER_CREDENTIAL).unlink(missing_ok=True)
        else:
            _write(self.path / WORKER_CREDENTIAL, plain)

    def relay_port(self) -> int:
        """Where agents of this worker were told to connect to; 0: none were yet."""
        known = _read_line(self.path / RELAY_PORT)
        return int(known) if known is not None and known.isdigit() else 0

    def keep_relay_port(self, port: int) -> None:
        _write(self.path / RELAY_PORT, str(port))

    @contextmanager
    def endpoint(self, url: str) -> Iterator[None]:
        """Let clients on this machine find the coordinator, while the block runs."""
        _write(self.path / ENDPOINT, url)
        try:
            yield
        finally:
            (self.path / ENDPOINT).unlink(missing_ok=True)

    def secret_key(self, entropy: Entropy) -> str:
        """The key of this installation's secrets, in hex; made at the first call ever."""
        known = _read_line(self.path / SECRET_KEY)
        if known is None:
            known = entropy.hex(32)
            _write(self.path / SECRET_KEY, known)
        return known


def _make_private(path: Path) -> None:
    """Make the directory, or close one of ours to others.  A stranger's (`/tmp`, say) is refused, not changed."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        if any(path.iterdir()) and not (path / LOCK).exists():
            raise Misconfigured(
                f"{path} is no data directory: it holds other files, and other users may look into it; "
                "choose an empty or new folder with --data-dir"
            )
        path.chmod(0o700)


def _read_line(path: Path) -> str | None:
    """The one line of a small file; None: no such file, or an empty one.  Raises `Misconfigured`."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline(_LINE_BYTES_MAX).strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error


def _write(path: Path, line: str) -> None:
    """Write a file of one line (0600) that is whole or absent, whenever the machine stops."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> Misconfigured:
    why = getattr(error, "strerror", None) or error
    return Misconfigured(f"cannot use {path}: {why}; make it accessible to this user, or choose another --data-dir")
