"""The real programs on a host of microVMs in a network namespace: `kici up` with one scaler, as an operator runs it."""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.microvm.firecracker_download import firecracker_folder
from tests.microvm.lab import Namespace, around, namespace, until
from tests.microvm.linux_guest import linux_guest
from tests.microvm.real_bench import UID, guest_folder
from tests.microvm.stand_in_lab import stand_in_programs

from kici.testing.programs import CoordinatorProgram

GATEWAY = "10.200.0.1"
PORT = 4000
PYTHON = ("/opt/kici/lib/ld.so", "--library-path", "/opt/kici/lib", "/opt/kici/bin/python3.11", "-I", "-S", "-c")
"""What the agent itself runs with; the guest of these tests has no other."""


class Orchestra:
    """One coordinator, its host and what is around it."""

    def __init__(self, folder: Path, host: Namespace, entry: Mapping[str, Any], network: Mapping[str, Any]) -> None:
        self.folder = folder
        self.host = host
        self.base = folder / "jail"
        self.bridge = str(network["bridgeName"])
        scalers = folder / "scalers.yaml"
        scaler = {"name": "vms", "type": "firecracker", "maxAgents": 4, "chrootBaseDir": str(self.base), **entry}
        scalers.write_text(yaml.safe_dump({"version": 1, "firecracker": dict(network), "scalers": [scaler]}))
        self.coordinator = CoordinatorProgram(
            folder / "data",
            port=PORT,
            extra=("--host", "0.0.0.0", "--scalers", str(scalers)),
            env={"KICI_LOG_LEVEL": "debug"},
        )

    def leftovers(self) -> dict[str, set[str]]:
        """Everything of any machine that is on the host, by kind, seen without the code under test."""
        rules = self.host.run("nft", "list", "ruleset")
        names = set(self.host.interfaces()) - {self.bridge}
        found = {
            "processes": set(self.vm_processes()),
            "records": {path.stem for path in (self.folder / "data/microvms").glob("*.json")},
            "folders": {path.name for path in self.base.glob("*/scaler-*")},
            "interfaces": {name for name in names if name.startswith("kici-")},
            "rules": {
                word.strip(",") for word in rules.split() if word.startswith(("f_scaler", "i_scaler", "t_scaler"))
            },
            "control groups": self._groups(),
        }
        return {kind: each for kind, each in found.items() if each}

    def _groups(self) -> set[str]:
        """Of machines that this coordinator made: others on this machine have theirs in the same place."""
        log = self.log()
        found = Path("/sys/fs/cgroup").glob("*/firecracker/scaler-firecracker-*")
        return {str(path) for path in found if path.name in log}

    def vm_processes(self) -> dict[str, int]:
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            is_vmm = words[0] == "/firecracker" or "qemu-system" in words[0]
            if is_vmm and state != b"Z" and len(words) > 2 and list(self.base.glob(f"*/{words[2]}")):
                found[words[2]] = int(entry.name)
        return found

    def until_clean(self, seconds: float = 30.0) -> None:
        until(lambda: not self.leftovers(), seconds=seconds, what=f"nothing is left: {self.leftovers()}")

    def log(self) -> str:
        return self.coordinator.log.read_text()


@contextmanager
def orchestra(entry: Mapping[str, Any], *, with_world: bool = False) -> Iterator[Orchestra]:
    folder = Path(tempfile.mkdtemp(prefix="kici-orchestra-"))
    network = {"cidr": "10.200.0.0/24", "bridgeName": "kici-br0"}
    try:
        with namespace() as host, host.enter():
            one = Orchestra(folder, host, entry, network)
            world = around(host) if with_world else None
            if world is not None:
                world.__enter__()
            try:
                with one.coordinator:
                    yield one
                one.until_clean()
            except BaseException:
                print(one.log()[-6000:] if one.coordinator.log.exists() else "the coordinator did not start")
                raise
            finally:
                for pid in one.vm_processes().values():
                    subprocess.run(("kill", "-KILL", str(pid)), check=False)
                if world is not None:
                    world.__exit__(None, None, None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def firecracker_entry(
    *, env: Mapping[str, str] | None = None, policy: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A scaler of tiny guests by real firecracker."""
    programs, guest = firecracker_folder(), guest_folder()
    return {
        "firecrackerPath": str(programs / "firecracker"),
        "jailerPath": str(programs / "jailer"),
        "kernelPath": str(guest / "tiny-guest.elf"),
        "uid": UID,
        "gid": UID,
        "vcpuCount": 1,
        "memSizeMib": 64,
        "orchestratorUrl": f"ws://{GATEWAY}:{PORT}/ws",
        "labelSets": [
            {
                "labels": ["tiny"],
                "rootfsPath": str(guest / "rootfs.ext4"),
                "overlayDriveSizeMib": 8,
                "env": dict(env or {}),
                **({} if policy is None else {"networkPolicy": dict(policy)}),
            }
        ],
    }


def qemu_entry(**more: Any) -> dict[str, Any]:
    """A scaler of Linux guests by QEMU, emulated."""
    guest = linux_guest()
    return {
        "vmm": "qemu",
        "accel": "tcg",
        "kernelPath": str(guest / "vmlinux"),
        "vcpuCount": 1,
        "memSizeMib": 256,
        "orchestratorUrl": f"ws://{GATEWAY}:{PORT}/ws",
        "labelSets": [{"labels": ["vm"], "rootfsPath": str(guest / "rootfs.ext4"), "overlayDriveSizeMib": 64}],
        **more,
    }


def stand_in_entry() -> dict[str, Any]:
    """A scaler of Linux guests that our client of firecracker makes; what answers it starts QEMU."""
    programs, guest = stand_in_programs(), linux_guest()
    entry = firecracker_entry() | qemu_entry()
    del entry["vmm"], entry["accel"]
    return entry | {
        "firecrackerPath": str(programs / "firecracker"),
        "jailerPath": str(programs / "jailer"),
        "kernelPath": str(guest / "vmlinux"),
    }


def kill(one: Orchestra) -> None:
    one.coordinator.stop(signal.SIGKILL)
