"""Who belongs to whom, and what `/proc` says: on snapshots and a copy of `/proc`, never on this machine's processes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.adapters import proc
from kici.adapters.proc import Seen, family, look, mark_of, snapshot, started_at
from kici.ports.processes import ProcessId

OWN = 50
"""The coordinator, below the first process and a shell."""


def table(*rows: tuple[int, int, int]) -> dict[int, Seen]:
    """(pid, parent, session); it started at ten times its pid."""
    machine = [(1, 0, 0), (2, 0, 0), (3, 2, 0), (40, 1, 40), (OWN, 40, 40)]
    return {pid: Seen(pid, parent, session, session, pid * 10) for pid, parent, session in [*machine, *rows]}


def root(pid: int, started: int | None = None) -> ProcessId:
    return ProcessId(pid=pid, started=pid * 10 if started is None else started, boot="b")


def test_descendants_and_sessions_are_family() -> None:
    seen = table((60, OWN, 60), (61, 60, 60), (62, 61, 62), (63, 1, 62), (64, 1, 60), (70, OWN, 70))
    assert family(seen, root(60), marked=set(), own=OWN) == {60, 61, 62, 63, 64}


def test_a_session_outlives_its_leader() -> None:
    seen = table((61, 1, 60), (62, 61, 62))
    assert family(seen, root(60), marked=set(), own=OWN) == {61, 62}


def test_a_reused_pid_is_no_root() -> None:
    seen = table((60, 1, 60), (61, 60, 60))
    assert family(seen, root(60, started=599), marked=set(), own=OWN) == frozenset()


def test_what_is_marked_is_family_with_its_descendants() -> None:
    seen = table((60, 1, 60), (61, 60, 60), (70, 1, 70))
    assert family(seen, None, marked={60}, own=OWN) == {60, 61}
    assert family(seen, root(99), marked={60, 4711}, own=OWN) == {60, 61}


@pytest.mark.parametrize("pid", [0, 1, 40, OWN])
def test_neither_the_machine_nor_our_own_line_is_anybodys_family(pid: int) -> None:
    """Session 0 is where the first process lives: taking it for a root once ended a whole machine."""
    seen = table((60, OWN, 60), (70, 1, 0), (80, 1, 80))
    for started in (0, pid * 10):
        found = family(seen, root(pid, started), marked={pid}, own=OWN)
        assert not found & {1, 2, 3, 40, OWN, 70, 80}


pids = st.integers(min_value=60, max_value=90)


@given(
    rows=st.lists(st.tuples(pids, st.one_of(st.just(1), st.just(OWN), pids), st.one_of(st.just(0), pids)), max_size=20),
    head=st.integers(min_value=0, max_value=90),
    marked=st.sets(st.integers(min_value=0, max_value=90), max_size=4),
)
def test_family_is_closed_and_spares_the_rest(rows: list[tuple[int, int, int]], head: int, marked: set[int]) -> None:
    seen = table(*rows)
    found = family(seen, root(head), marked=marked, own=OWN)
    assert not found & {0, 1, 40, OWN}
    for one in seen.values():
        if one.parent in found and one.pid not in {1, 40, OWN}:
            assert one.pid in found
    for pid in found:
        one = seen[pid]
        reasons = [
            pid in marked,
            head > 1 and head in (one.pid, one.session),
            one.parent in found,
            one.session in found and seen[one.session].session == one.session,
        ]
        assert any(reasons), pid


def a_process(folder: Path, pid: int, *, name: str = "sh", state: str = "S", started: int = 5) -> Path:
    path = folder / str(pid)
    path.mkdir(parents=True)
    zeros = " ".join("0" for _ in range(15))
    (path / "stat").write_text(f"{pid} ({name}) {state} 7 8 9 {zeros} {started} 0 0")
    return path


def test_reads_stat_whatever_the_name_of_the_program(tmp_path: Path) -> None:
    a_process(tmp_path, 11, name="a) R 1 (b c", started=77)
    a_process(tmp_path, 12, state="Z")
    (tmp_path / "self").mkdir()
    assert snapshot(tmp_path) == {11: Seen(11, 7, 8, 9, 77)}
    assert look(12, tmp_path) is None
    assert look(13, tmp_path) is None
    assert started_at(12, tmp_path) == 5


@pytest.mark.parametrize(
    ("environ", "cmdline", "mark"),
    [
        (b"AGENT_COMPUTE_MARK=/d/a\0X=1\0", b"", "/d/a"),
        (b"X=1\0AGENT_COMPUTE_MARK=/d/a\0", b"", "/d/a"),
        (b"XAGENT_COMPUTE_MARK=/d/a\0", b"", None),
        (b"X=1\0", b"python\0-X\0AGENT_COMPUTE_MARK=/d/a\0-m\0kici.apps.agent\0", "/d/a"),
        (None, b"kici-agent\0AGENT_COMPUTE_MARK=/d/a\0\0\0", "/d/a"),
        (None, b"grep\0--AGENT_COMPUTE_MARK=/d/a\0", None),
        (b"", b"", None),
    ],
)
def test_reads_marks(tmp_path: Path, environ: bytes | None, cmdline: bytes, mark: str | None) -> None:
    path = a_process(tmp_path, 11)
    if environ is not None:
        (path / "environ").write_bytes(environ)
    (path / "cmdline").write_bytes(cmdline)
    assert mark_of(11, tmp_path) == mark
    assert proc.marks([11, 12], tmp_path) == ({} if mark is None else {11: mark})
