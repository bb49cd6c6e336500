"""The folder of the machine pools' ledgers, one blocking step at a time.

    <pool>.json             what each instance declares and what agents hold; replaced as a whole
    <pool>.flock            held while somebody changes it; never renamed or removed, so everybody locks the same file
    instances/<id>.alive    held by an instance for as long as it runs
    agents/<id>.alive       held for an agent: by its coordinator, and by the process itself, which inherits it

Whoever is killed leaves nothing that has to be cleaned up first: the kernel lets go of the locks, and the next one
to use a pool drops what nobody holds.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kici.adapters import life_locks
from kici.decide.admit import Cap
from kici.decide.ledger import EMPTY, Kind, Ledger, Life, Outcome, Row, living
from kici.domain.errors import Misconfigured, Retryable
from kici.domain.ids import AgentId, InstanceId, Instant
from kici.domain.resources import Amount

VERSION: Final = 2
"""1 had one cap for all, and told by pids who lives."""
OWN_LOCK_SECONDS: Final = 1.0
"""How long a lock may be in the way that nobody should have: of a look at it, or of a process that is just ending."""


class Busy(Retryable):
    """Others had the pool locked all the time."""


def usual_places(environ: Mapping[str, str], home: Path) -> tuple[Path, ...]:
    """Where the folder is looked for unless a setting names it."""
    state = environ.get("XDG_STATE_HOME", "")
    above = Path(state) if state.startswith("/") else home / ".local" / "state"
    temporary = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108 - the last resort, and never a stranger's folder
    return Path("/var/lib/kici/scaler-ledger"), above / "kici" / "scaler-ledger", temporary / "kici-scaler-ledger"


def choose_folder(explicit: Path | None, places: Sequence[Path]) -> Path:
    """The named folder, made if need be, or the first of the places that can be written.  Raises `Misconfigured`."""
    if explicit is not None:
        try:
            explicit.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Misconfigured(f"KICI_MACHINE_LEDGER_DIR: cannot make {explicit}: {error.strerror}") from error
        return explicit
    for place in places:
        if _can_write(place):
            return place
    raise Misconfigured(
        f"machine pools need a folder that all coordinators of this host share, and this user can write none of "
        f"{', '.join(map(str, places))}; name one with KICI_MACHINE_LEDGER_DIR"
    )


def foresee_folder(explicit: Path | None, places: Sequence[Path]) -> Path | None:
    """What `choose_folder` would choose, as far as can be told without making anything; None: it would fail."""
    return next((place for place in ([explicit] if explicit else places) if _may_write(place)), None)


def _may_write(place: Path) -> bool:
    existing = next(each for each in (place, *place.parents) if each.exists())
    if existing == place and _is_strangers(place):
        return False
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _is_strangers(place: Path) -> bool:
    """In a folder for everybody, where anybody could have put it."""
    is_for_everybody = place.parent.stat().st_mode & stat.S_ISVTX
    return bool(is_for_everybody) and place.stat().st_uid not in (0, os.geteuid())


def _can_write(place: Path) -> bool:
    probe = place / f".probe-{os.getpid()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if _is_strangers(place):
            return False
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


class LedgerFiles:
    """One instance's hold on the folder.  Blocking; every method may be called from any thread.

    Raises `Retryable` (`Busy` where others are the reason) and `Misconfigured`.
    """

    def __init__(self, folder: Path, *, instance_id: InstanceId, boot: str, lock_seconds: float) -> None:
        """Make what is missing, and show that this instance runs."""
        self.folder = folder
        self._me = instance_id
        self._boot = boot
        self._lock_seconds = lock_seconds
        self._held: dict[AgentId, int] = {}
        with _translated(folder):
            for name in ("instances", "agents"):
                (folder / name).mkdir(exist_ok=True)
                with suppress(PermissionError):  # it is another user's, who has done the same
                    (folder / name).chmod(folder.stat().st_mode & 0o7777)
            alive = life_locks.hold(self._instance(instance_id), seconds=lock_seconds)
        if alive is None:
            raise Misconfigured(
                f"another process that runs is instance {instance_id} as well ({self._instance(instance_id)} is held); "
                "was the data directory copied?  Remove the file instance-id from the copy"
            )
        self._alive = alive

    def change(self, pool: str, step: Callable[[Ledger], Outcome]) -> Outcome:
        """Forget what is dead, take a step, write it down.  No other process changes the pool meanwhile."""
        with _translated(self.folder), self._locked(pool):
            before = self._read(pool)
            outcome = step(living(before, self._life(before)))
            if outcome.ledger != before:
                self._write(pool, outcome.ledger)
            return outcome

    def hold(self, agent_id: AgentId, *, seconds: float = OWN_LOCK_SECONDS) -> bool:
        """Prove from now on that this agent lives.  False: somebody else does."""
        if agent_id not in self._held:
            with _translated(self.folder):
                descriptor = life_locks.hold(self._agent(agent_id), seconds=seconds)
            if descriptor is None:
                return False
            self._held[agent_id] = descriptor
        return True

    def descriptor(self, agent_id: AgentId) -> int | None:
        return self._held.get(agent_id)

    def drop(self, agent_id: AgentId) -> None:
        """The agent is gone, whatever still has its file open."""
        with _translated(self.folder):
            self._agent(agent_id).unlink(missing_ok=True)
        descriptor = self._held.pop(agent_id, None)
        if descriptor is not None:
            os.close(descriptor)

    def let_go(self) -> None:
        """Prove nothing any more: agents that live do it themselves."""
        while self._held:
            os.close(self._held.popitem()[1])

    def close(self) -> None:
        """As the end of the program does."""
        self.let_go()
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def pools(self) -> list[str]:
        with _translated(self.folder):
            names = sorted(path.name for path in self.folder.iterdir())
        return [name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")]

    def sweep(self) -> None:
        """Remove the files of the dead."""
        with _translated(self.folder):
            for name in ("instances", "agents"):
                life_locks.remove_unheld(self.folder / name)

    def _life(self, ledger: Ledger) -> Life:
        """What the host tells about those that the ledger names."""
        return Life(
            boot=self._boot,
            instances={one for one in ledger.caps if life_locks.is_held(self._instance(one))},
            agents={row.agent_id for row in ledger.rows if life_locks.is_held(self._agent(row.agent_id))},
        )

    @contextmanager
    def _locked(self, pool: str) -> Iterator[None]:
        path = self.folder / f"{pool}.flock"
        descriptor = life_locks.lock(path, seconds=self._lock_seconds)
        if descriptor is None:
            raise Busy(
                f"machine pool {pool}: other processes held {path} for {self._lock_seconds:g} s; "
                "`lslocks` shows which, and one that hangs has to be ended"
            )
        try:
            yield
        finally:
            os.close(descriptor)

    def _read(self, pool: str) -> Ledger:
        path = self._path(pool)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return EMPTY
        with os.fdopen(descriptor, "rb") as file:
            data = file.read()
        try:
            version = _decode_version(data).version
            if version == VERSION:
                return _ledger(_decode(data))
            problem = f"it is of version {version}, and this program writes version {VERSION}"
        except msgspec.MsgspecError as error:
            problem = str(error)
        raise Misconfigured(
            f"the ledger {path} cannot be used: {problem}; stop the coordinators of this host that share the pool, "
            "remove the file, and start them again"
        )

    def _write(self, pool: str, ledger: Ledger) -> None:
        beside = self.folder / f".{pool}.json.new"
        beside.unlink(missing_ok=True)  # of one that was killed in the midst of it; nobody else is here now
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(_encode(_file(ledger)))
            file.flush()
            os.fsync(descriptor)
        beside.replace(self._path(pool))

    def _path(self, pool: str) -> Path:
        return self.folder / f"{pool}.json"

    def _instance(self, instance_id: InstanceId) -> Path:
        return self.folder / "instances" / f"{instance_id}.alive"

    def _agent(self, agent_id: AgentId) -> Path:
        return self.folder / "agents" / f"{agent_id}.alive"


# ---------------------------------------------------------------------- the form of the file

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128)]
"""Part of a path, and written by others."""
_Quantity = Annotated[int, msgspec.Meta(ge=0)]


class _Cap(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    max_cpu: float | None = None
    max_memory_bytes: int | None = None


class _Row(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    instance_id: _Name
    agent_id: _Name
    cpus: Annotated[float, msgspec.Meta(ge=0)]
    mem_bytes: _Quantity
    reserved_at: int
    boot_id: str
    kind: Kind


class _Version(msgspec.Struct, frozen=True):
    version: int


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    caps: dict[_Name, _Cap]
    reservations: list[_Row]


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_File).decode
_decode_version: Final = msgspec.json.Decoder(_Version).decode


def _file(ledger: Ledger) -> _File:
    return _File(
        caps={one: _Cap(max_cpu=cap.cpus, max_memory_bytes=cap.memory_bytes) for one, cap in ledger.caps.items()},
        reservations=[
            _Row(
                instance_id=row.instance_id,
                agent_id=row.agent_id,
                cpus=row.requests.cpus,
                mem_bytes=row.requests.memory_bytes,
                reserved_at=row.reserved_at,
                boot_id=row.boot,
                kind=row.kind,
            )
            for row in ledger.rows
        ],
    )


def _ledger(file: _File) -> Ledger:
    return Ledger(
        caps={
            InstanceId(one): Cap(cpus=cap.max_cpu, memory_bytes=cap.max_memory_bytes) for one, cap in file.caps.items()
        },
        rows=tuple(
            Row(
                instance_id=InstanceId(row.instance_id),
                agent_id=AgentId(row.agent_id),
                requests=Amount(cpus=row.cpus, memory_bytes=row.mem_bytes),
                reserved_at=Instant(row.reserved_at),
                boot=row.boot_id,
                kind=row.kind,
            )
            for row in file.reservations
        ),
    )


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{error.strerror} ({error.filename or folder})"
        raise Retryable(f"the ledgers of machine pools in {folder} cannot be used: {what}") from error
