"""Which control groups are ours, on made-up trees: no root needed."""

from pathlib import Path

import pytest

from kici.adapters.cgroups import LinuxCgroups, NoCgroups, own_folders
from kici.decide.launch import CgroupPlan, CgroupSetting, LimitsBy
from kici.domain.errors import Retryable


def a_group(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in {"cgroup_procs": "", **files}.items():
        (path / name.replace("_", ".", 1)).write_text(text)
    return path


def hybrid(root: Path) -> dict[str, Path]:
    """The old hierarchies with the unified one beside them; in the memory one we are in a group of our own."""
    a_group(root / "cpu,cpuacct")
    a_group(root / "memory" / "ours")
    a_group(root / "freezer")
    a_group(root / "pids")
    a_group(root / "unified", cgroup_controllers="hugetlb", cgroup_subtree_control="")
    membership = "5:cpu,cpuacct:/\n4:memory:/ours\n3:freezer:/\n2:pids:/\n9:name=systemd:/\n0::/\n"
    return own_folders(root, membership)


@pytest.fixture(autouse=True)
def _without_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.adapters.cgroups.SYSTEMD", Path("/nowhere"))


def test_our_own_group_in_each_hierarchy(tmp_path: Path) -> None:
    assert hybrid(tmp_path) == {
        "cpu": tmp_path / "cpu,cpuacct",
        "memory": tmp_path / "memory" / "ours",
        "freezer": tmp_path / "freezer",
        "pids": tmp_path / "pids",
        "": tmp_path / "unified",
    }


def test_hybrid_limits_by_the_old_and_tracks_by_the_unified(tmp_path: Path) -> None:
    groups = LinuxCgroups(own=hybrid(tmp_path))
    assert (groups.support.tracking, groups.support.limits) == (True, LimitsBy.V1)
    plan = CgroupPlan(settings=(CgroupSetting("memory", "memory.limit_in_bytes", "1"),))
    group = groups.create("x", plan)
    assert (
        groups.folders("x", plan)
        == group.folders
        == tuple(tmp_path / name / "kici" / "x" for name in ("unified", "freezer", "memory/ours"))
    )
    assert (tmp_path / "memory/ours/kici/x/memory.limit_in_bytes").read_text() == "1"
    assert group.entries[0] == tmp_path / "unified/kici/x/cgroup.procs"


def test_unified_with_controllers_limits_by_it(tmp_path: Path) -> None:
    own = a_group(tmp_path / "a", cgroup_controllers="cpu io memory pids", cgroup_subtree_control="cpu memory pids")
    groups = LinuxCgroups(own=own_folders(tmp_path, "0::/a\n"))
    assert (groups.support.tracking, groups.support.limits) == (True, LimitsBy.V2)
    group = groups.create("x", CgroupPlan(settings=(CgroupSetting("", "cpu.max", "1 2"),)))
    assert group.folders == (own / "kici" / "x",)
    assert (own / "kici" / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (own / "kici" / "x" / "cpu.max").read_text() == "1 2"


def test_a_setting_that_must_hold_and_does_not_leaves_no_group(tmp_path: Path) -> None:
    groups = LinuxCgroups(own=hybrid(tmp_path))
    missing = CgroupSetting("io", "io.max", "1")
    with pytest.raises(Retryable, match="control group x"):
        _ = groups.create("x", CgroupPlan(settings=(missing,)))
    assert not list(tmp_path.rglob("x"))
    _ = groups.create("x", CgroupPlan(settings=(CgroupSetting("io", "io.max", "1", required=False),)))


def test_nothing_there_is_said(tmp_path: Path) -> None:
    for groups in (LinuxCgroups(own=own_folders(tmp_path, "0::/\n")), NoCgroups()):
        assert not groups.support.tracking
        assert groups.support.problem
    with pytest.raises(Retryable):
        _ = NoCgroups().create("x", CgroupPlan())
    assert NoCgroups().find((tmp_path / "gone",)).kill()
    assert NoCgroups().find((tmp_path / "gone",)).remove()


def test_where_systemd_runs_only_what_it_delegated_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.adapters.cgroups.SYSTEMD", tmp_path)
    groups = LinuxCgroups(own=hybrid(tmp_path))
    assert not groups.support.tracking
    assert "Delegate" in groups.support.problem
