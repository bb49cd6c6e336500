"""What `/proc` says about processes, and who belongs to whom.

`family` is the rule and touches nothing; the rest reads.  Processes come and go while one looks, so everything
here answers "not there" instead of raising.
"""

import os
from collections.abc import Callable, Iterable, Mapping
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


def snapshot(proc: Path = PROC) -> dict[int, Seen]:
    """Every running process."""
    found = (look(int(name), proc) for name in os.listdir(proc) if name.isdigit())
    return {seen.pid: seen for seen in found if seen is not None}


def mark_of(pid: int, proc: Path = PROC) -> str | None:
    """The compute that a process says it belongs to; None: none, or not ours to read."""
    try:
        environment = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    start = 0 if environment.startswith(_MARK) else environment.find(b"\0" + _MARK) + 1
    if start == 0 and not environment.startswith(_MARK):
        return None
    return environment[start + len(_MARK) :].split(b"\0", 1)[0].decode(errors="replace")


def marks(pids: Iterable[int], proc: Path = PROC) -> dict[int, str]:
    found = ((pid, mark_of(pid, proc)) for pid in pids)
    return {pid: mark for pid, mark in found if mark is not None}


def family(seen: Snapshot, root: ProcessId, is_marked: Callable[[int], bool]) -> frozenset[int]:
    """Pids of a root and of everything that came from it, as far as one snapshot shows.

    Descendants, members of a session that one of them leads, whatever is marked, and the descendants of all
    these.  A session of a root that is gone still counts, unless another process has the root's pid by now.
    """
    head = seen.get(root.pid)
    is_reused = head is not None and head.started != root.started
    members = {pid for pid in seen if is_marked(pid)}
    if not is_reused:
        members |= {one.pid for one in seen.values() if one.session == root.pid and one.started >= root.started}
        if head is not None:
            members.add(root.pid)
    while True:
        leads = {pid for pid in members if seen[pid].session == pid}
        more = {
            one.pid
            for one in seen.values()
            if one.pid not in members and (one.parent in members or one.session in leads)
        }
        if not more:
            return frozenset(members)
        members |= more
