"""What `/proc` says about processes, and who belongs to whom.

`family` is the rule and touches nothing; the rest reads.  Processes come and go while one looks, so everything
here answers "not there" instead of raising.
"""

import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kici.ports.processes import MARK, ProcessId

PROC: Final = Path("/proc")
_MARK: Final = MARK.encode() + b"="


@dataclass(frozen=True, slots=True)
class Seen:
    """One process in a snapshot."""

    pid: int
    parent: int
    group: int
    session: int
    started: int


Snapshot = Mapping[int, Seen]


def boot_id(proc: Path = PROC) -> str:
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def look(pid: int, proc: Path = PROC) -> Seen | None:
    """A running process; None for one that is gone or a zombie."""
    try:
        line = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may itself contain spaces and parentheses.
    fields = line[line.rfind(b")") + 2 :].split()
    if fields[0] in b"ZX":
        return None
    return Seen(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def started_at(pid: int, proc: Path = PROC) -> int:
    """Start time of a process that cannot go away: a child of ours that nobody has reaped, dead or alive."""
    line = (proc / str(pid) / "stat").read_bytes()
    return int(line[line.rfind(b")") + 2 :].split()[19])


def open_same(pid: int, *, started: int) -> int | None:
    """A pidfd of the running process that began at `started`; None when it is gone, or the pid is another's by now."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    seen = look(pid)
    if seen is not None and seen.started == started:
        return pidfd
    os.close(pidfd)
    return None


def snapshot(proc: Path = PROC) -> dict[int, Seen]:
    """Every running process."""
    found = (look(int(name), proc) for name in os.listdir(proc) if name.isdigit())
    return {seen.pid: seen for seen in found if seen is not None}


def mark_of(pid: int, proc: Path = PROC) -> str | None:
    """The compute that a process says it belongs to, in its environment or on its command line; None: none.

    An agent closes its environment to everybody but root, which is why its command line says it, too.
    """
    for name in ("environ", "cmdline"):
        try:
            words = (proc / str(pid) / name).read_bytes()
        except OSError:
            continue
        start = 0 if words.startswith(_MARK) else words.find(b"\0" + _MARK) + 1
        if start or words.startswith(_MARK):
            return words[start + len(_MARK) :].split(b"\0", 1)[0].decode(errors="replace")
    return None


def marks(pids: Iterable[int], proc: Path = PROC) -> dict[int, str]:
    found = ((pid, mark_of(pid, proc)) for pid in pids)
    return {pid: mark for pid, mark in found if mark is not None}


def family(seen: Snapshot, root: ProcessId | None, *, marked: Set[int], own: int) -> frozenset[int]:
    """Pids of a root and of everything that came from it, as far as one snapshot shows; without a root, of what is
    marked and came from that.

    Descendants, members of a session that one of them leads, whatever is marked, and the descendants of all
    these.  A session of a root that is gone still counts, unless another process has the root's pid by now.
    Never the caller (`own`) or what it descends from, nor anything by way of them: session 0 and the first
    process are no family of anybody's.
    """
    protected = _line_of(seen, own)
    members = set(marked & seen.keys()) - protected
    if root is not None and root.pid > 1:
        head = seen.get(root.pid)
        if head is None or head.started == root.started:
            members |= {
                one.pid
                for one in seen.values()
                if (one.session == root.pid or one.pid == root.pid) and one.started >= root.started
            }
    while True:
        members -= protected
        leads = {pid for pid in members if seen[pid].session == pid}
        more = {
            one.pid
            for one in seen.values()
            if one.pid not in members and (one.parent in members or one.session in leads)
        }
        if not more - protected:
            return frozenset(members)
        members |= more


def _line_of(seen: Snapshot, pid: int) -> set[int]:
    """A process and all that it descends from; the first process always."""
    line = {0, 1}
    while pid not in line:
        line.add(pid)
        pid = seen[pid].parent if pid in seen else 0
    return line
