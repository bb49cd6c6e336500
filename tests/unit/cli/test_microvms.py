"""Commands about microVMs: what they show, what they send, and how they exit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kici.adapters.host_persist import forget, persist
from kici.adapters.rootfs_builder import add_agent, make_image, unpack
from kici.backends.firecracker.factory import bridge_of
from kici.config.model import FirecrackerNetwork
from kici.decide.classify import StopOutcome, Tracker
from kici.domain.errors import DeterministicRefusal
from kici.testing.fake_vms import a_live_vm
from kici.testing.served_surface import Served

ONE, TWO = a_live_vm(1), a_live_vm(2, trackers=[Tracker.BACKEND])
A, B = ONE.seen.vm_id, TWO.seen.vm_id


def orphans(served: Served, *words: str, code: int = 0) -> str:
    result = served.kici("admin", "scaler", "orphans", *words)
    assert result.exit_code == code, result.output
    return result.stdout


def test_only_what_nobody_tracks_is_listed_unless_all_is_asked_for(served: Served) -> None:
    served.fake.live_vms.add(ONE, TWO)
    assert A in orphans(served)
    assert B not in orphans(served, "list")
    assert B in orphans(served, "list", "--all")
    found = json.loads(orphans(served, "list", "--all", "--json"))
    assert [each["status"] for each in found["items"]] == ["orphaned", "tracked"]


def test_all_orphans_are_stopped_and_no_others(served: Served) -> None:
    served.fake.live_vms.add(ONE, TWO)
    text = orphans(served, "stop", "--all-orphaned", "--yes")
    assert f"{A} (PID 1001): stopped" in text
    assert served.fake.live_vms.stops == [(None, [A])]


def test_a_named_machine_that_is_tracked_is_not_sent_and_fails_the_command(served: Served) -> None:
    served.fake.live_vms.add(ONE, TWO)
    orphans(served, "stop", A, B, "--yes", "--node", "instance-2", code=1)
    assert served.fake.live_vms.stops == [("instance-2", [A])]


def test_a_machine_that_is_not_stopped_fails_the_command(served: Served) -> None:
    served.fake.live_vms.add(ONE)
    served.fake.live_vms.outcomes[A] = StopOutcome.TRACKED
    assert "tracked" in orphans(served, "stop", A, "--yes", code=1)


@pytest.mark.spec("scaler 42.7.10")
def test_a_dry_run_sends_nothing(served: Served) -> None:
    served.fake.live_vms.add(ONE)
    assert A in orphans(served, "stop", "--all-orphaned", "--dry-run")
    assert served.fake.live_vms.stops == []


def test_without_a_terminal_somebody_has_to_say_yes(served: Served) -> None:
    served.fake.live_vms.add(ONE)
    orphans(served, "stop", A, code=1)
    orphans(served, "stop", code=2)
    orphans(served, "stop", A, "--all-orphaned", code=2)
    orphans(served, "stop", A, "--yes", "--timeout", "241", code=2)
    assert served.fake.live_vms.stops == []


def test_nothing_to_stop_is_no_failure(served: Served) -> None:
    orphans(served, "stop", "--all-orphaned", "--yes")
    assert served.fake.live_vms.stops == []


def test_a_bridge_can_be_made_again_at_every_start(tmp_path: Path) -> None:
    bridge = bridge_of(FirecrackerNetwork())
    script, unit = persist(bridge, program="/opt/kici/bin/kici-admin", egress="eth0", root=tmp_path)
    assert script.read_text() == (
        "#!/bin/sh\nexec /opt/kici/bin/kici-admin firecracker provision --bridge kici-br0 --cidr 10.0.0.1/24 "
        "--table kici --host-iface eth0\n"
    )
    assert script.stat().st_mode & 0o111
    assert "ExecStart=/usr/local/lib/kici-firecracker/provision-kici-br0.sh" in unit.read_text()
    assert (tmp_path / "etc/systemd/system/multi-user.target.wants" / unit.name).is_symlink()
    persist(bridge, program="kici-admin", egress=None, root=tmp_path)
    forget(bridge, root=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("cidr", ["10.0.0.1/33", "10.0.0.300/24", "10.0.0.0/24", "x"])
def test_an_address_that_is_none_of_a_bridge_is_refused(served: Served, cidr: str) -> None:
    result = served.kici("admin", "firecracker", "provision", "--cidr", cidr)
    assert result.exit_code == 2


def a_tar(path: Path, folder: Path) -> Path:
    subprocess.run(("tar", "-C", str(folder), "-cf", str(path), "."), check=True)
    return path


def a_distribution(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/sh").write_text("#!/bin/true\n")
    (folder / "etc").mkdir()
    (folder / "etc/os-release").write_text("ID=test\n")
    return folder


def test_an_engines_image_is_unpacked_layer_by_layer(tmp_path: Path) -> None:
    base = a_distribution(tmp_path / "base")
    (base / "etc/secret").write_text("old")
    (base / "lib").symlink_to("usr/lib")
    top = tmp_path / "top"
    (top / "etc").mkdir(parents=True)
    (top / "etc/.wh.secret").touch()
    (top / "etc/os-release").write_text("ID=newer\n")
    image = tmp_path / "image"
    image.mkdir()
    a_tar(image / "1.tar", base)
    a_tar(image / "2.tar", top)
    (image / "manifest.json").write_text(json.dumps([{"Layers": ["1.tar", "2.tar"]}]))
    whole = tmp_path / "image.tar"
    subprocess.run(("tar", "-C", str(image), "-cf", str(whole), "1.tar", "2.tar", "manifest.json"), check=True)
    tree = tmp_path / "tree"
    tree.mkdir()
    unpack(whole, tree)
    assert (tree / "etc/os-release").read_text() == "ID=newer\n"
    assert not (tree / "etc/secret").exists()
    assert not list(tree.rglob(".wh.*"))
    assert (tree / "lib").is_symlink()


def test_an_image_cannot_write_outside_of_itself(tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "etc").symlink_to(tmp_path)
    whole = tmp_path / "evil.tar"
    subprocess.run(("tar", "-C", str(evil), "-cf", str(whole), "etc"), check=True)
    more = tmp_path / "more"
    (more / "etc").mkdir(parents=True)
    (more / "etc/stolen").touch()
    subprocess.run(("tar", "-C", str(more), "--append", "-f", str(whole), "etc/stolen"), check=True)
    tree = tmp_path / "tree"
    tree.mkdir()
    with pytest.raises(ValueError, match="leads out of the image"):
        unpack(whole, tree)
    assert not (tmp_path / "stolen").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="root file systems are made on Linux")
def test_a_tree_gets_the_agent_and_a_first_program(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    unpack(a_distribution(tmp_path / "base"), tree)
    add_agent(tree, tmp_path)
    first = (tree / "init").read_text()
    assert first.startswith("#!/bin/sh\nexec /opt/kici/lib/ld.so --library-path /opt/kici/lib /opt/kici/bin/python")
    assert first.endswith(" -m kici.agent.guest\n")
    assert list((tree / "opt/kici/lib").rglob("kici/agent/guest.py*"))
    assert (tree / ".kici/drive").is_dir()
    with pytest.raises(DeterministicRefusal, match="made no image of 1 MiB"):
        make_image(tree, tmp_path / "small.ext4", 1)


def test_a_tree_without_a_shell_is_refused(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    with pytest.raises(DeterministicRefusal, match="no /bin/sh"):
        add_agent(tree, tmp_path)
