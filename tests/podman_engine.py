"""A Podman of our own for tests, under the same roof as `docker_engine.Lab`: its API on a socket in a folder of ours.

It lives in namespaces of its own for the network and for mounts, since it keeps locks and addresses in fixed places of
the machine.  Limits are those that this process has itself: without the right to raise them nothing would start.
"""

import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docker_engine import Lab

PIDS_MAX = 32_768
_FIXED_PLACES = ("/var/lib/cni", "/etc/cni", "/dev/shm", "/run/libpod", "/run/crun")
"""Of every Podman of a machine; here each is a folder of the lab."""


class PodmanLab(Lab):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.socket = folder / "podman.sock"

    @property
    def log(self) -> Path:
        return self.folder / "podman.log"

    def daemon(self) -> tuple[str, ...]:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        pids = min(PIDS_MAX, resource.getrlimit(resource.RLIMIT_NPROC)[1])
        settings = self.folder / "containers.conf"
        settings.write_text(f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={pids}:{pids}"]\n')
        binds = []
        for place in _FIXED_PLACES:
            own = self.folder / "places" / place.strip("/").replace("/", "-")
            own.mkdir(parents=True, exist_ok=True)
            binds.append(f"mkdir -p {place} && mount --bind {own} {place}")
        run = (
            f"exec podman --root {self.folder}/root --runroot {self.folder}/run --storage-driver overlay "
            f"--cgroup-manager cgroupfs --runtime runc system service --time 0 unix://{self.socket}"
        )
        script = " && ".join((*binds, f"export CONTAINERS_CONF={settings}", run))
        return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script)

    def import_image(self, name: str, tree: Path, *changes: str) -> None:
        super().import_image(name, tree, *changes)
        repo, _, tag = name.rpartition(":")
        if tag != "latest":  # as it is called whatever was asked for
            self.ask("POST", f"/images/{repo}:latest/tag?repo={repo}&tag={tag}")


@contextmanager
def podman_lab() -> Iterator[PodmanLab]:
    """A lab for as long as the block runs.  Ask `engines.absence("podman")` first."""
    subprocess.run(("podman", "--version"), check=True, stdout=subprocess.DEVNULL)
    made = PodmanLab(Path(tempfile.mkdtemp(prefix="kici-podman-")))
    try:
        made.up()
        yield made
    finally:
        made.down()
