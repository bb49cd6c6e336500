"""Work directories: fresh, private, and gone."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kici.agent.workdir import LOCK, TmpRoot, WorkRoot, remove_tree, work_root
from kici.domain.errors import Permanent


def base(tmp: Path) -> Path:
    return tmp / f"kici-work-{os.getuid()}"


def everything(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def exhaust(root: WorkRoot) -> None:
    for _ in root.remove():
        pass


def test_every_job_has_a_fresh_private_directory(tmp_path: Path) -> None:
    root = TmpRoot(str(tmp_path), "agent-1", shared=False)
    first, second = root.new(), root.new()
    assert first != second
    assert everything(first) == ["tmp", "work"]
    assert stat.S_IMODE(base(tmp_path).stat().st_mode) == 0o700
    assert stat.S_IMODE((first / "work").stat().st_mode) == 0o700
    exhaust(root)
    assert everything(base(tmp_path)) == [LOCK]


def test_another_user_may_pass_through_to_its_own(tmp_path: Path) -> None:
    root = TmpRoot(str(tmp_path), "agent-1", shared=True)
    path = root.new()
    assert stat.S_IMODE(base(tmp_path).stat().st_mode) == 0o711
    assert stat.S_IMODE((path / "work").stat().st_mode) == 0o700
    exhaust(root)


@pytest.mark.parametrize("agent_id", ["../../etc", "a/b", "x" * 300, "ä ü", ""])
def test_a_strange_agent_id_stays_inside(tmp_path: Path, agent_id: str) -> None:
    root = TmpRoot(str(tmp_path), agent_id, shared=False)
    assert root.new().parents[1] == base(tmp_path)
    exhaust(root)


def test_what_a_dead_agent_left_is_found_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    script = (
        "import sys; from kici.agent.workdir import TmpRoot\n"
        f"path = TmpRoot({str(tmp_path)!r}, 'dead', shared=False).new()\n"
        "(path / 'work' / 'file').write_text('x'); print(path)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_env(), check=True)
    left = Path(done.stdout.strip())
    assert left.exists()
    alive = TmpRoot(str(tmp_path), "alive", shared=False)
    alive.new()
    starting = TmpRoot(str(tmp_path), "starting", shared=False)
    (stale,) = starting.stale()
    assert not left.exists()
    assert starting.stale() == [stale], "somebody else removes it if we do not"
    for _ in remove_tree(stale):
        pass
    assert starting.stale() == []
    assert len(everything(base(tmp_path))) > 3
    exhaust(alive)
    exhaust(starting)


def _env() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[3] / "src")}


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    base(tmp_path).symlink_to("/")
    with pytest.raises(Permanent, match="set TMPDIR"):
        TmpRoot(str(tmp_path), "agent-1", shared=False)


def test_a_tree_is_removed_with_read_only_directories_and_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    for number in range(200):
        (tree / "a" / f"f{number}").write_text("x")
    (tree / "a" / "link").symlink_to(outside)
    (tree / "loop").symlink_to(tree)
    (tree / "a" / "b").chmod(0o000)
    (tree / "a").chmod(0o500)
    steps = sum(1 for _ in remove_tree(tree))
    assert steps >= 3, "it lets others run in between"
    assert not tree.exists()
    assert everything(outside) == ["keep"]


def test_removing_what_is_not_there_is_no_fault(tmp_path: Path) -> None:
    assert list(remove_tree(tmp_path / "nothing")) == []


def test_an_agent_that_starts_in_a_place_of_its_name_works_there(tmp_path: Path) -> None:
    start = tmp_path / "agent-1"
    start.mkdir()
    (start / "theirs").write_text("x")
    root = work_root(str(tmp_path / "tmp"), "agent-1", start=start, shared=False)
    path = root.new()
    assert path.parent == start
    assert root.new() != path
    assert root.stale() == []
    exhaust(root)
    assert everything(tmp_path) == ["agent-1", "agent-1/theirs"]


def test_with_steps_of_another_user_it_works_where_that_user_can_go(tmp_path: Path) -> None:
    start = tmp_path / "agent-1"
    start.mkdir()
    root = work_root(str(tmp_path), "agent-1", start=start, shared=True)
    assert root.new().parents[1] == base(tmp_path)
    exhaust(root)
