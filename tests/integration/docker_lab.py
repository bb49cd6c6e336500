"""A coordinator beside a Docker engine of our own, for tests of whole jobs."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.docker_engine import Lab, busybox_tree, empty_tree

from kici.testing.programs import CoordinatorProgram, until

TABLE: Final = "kici_agent_net"
BUSYBOX: Final = "ci/busybox:1"
EMPTY: Final = "ci/empty:1"
DEBIAN: Final = "ci/debian:1"
USER: Final = "ci/user:1"
CARRIES: Final = "ci/carries:1"
DIES: Final = "ci/dies:1"
TELLS: Final = "ci/tells:1"
"""Its agent prints whatever it is given, and dies of it."""


def import_images(lab: Lab) -> None:
    """One of each kind: with a C library and a shell of its own, static, empty, of another user, with its own agent."""
    tree = busybox_tree(lab.folder / "busybox")
    (tree / "etc").mkdir()
    (tree / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\nbuild:x:1234:1235:build:/:/bin/sh\n")
    lab.import_image(BUSYBOX, tree)
    lab.import_image(USER, tree, "USER build")
    lab.import_image(EMPTY, empty_tree(lab.folder / "empty"))
    lab.import_image(DEBIAN, debian_tree(lab.folder / "debian", tree), "ENV GREETING=hello")
    tells = '["/bin/sh", "-c", "env; read token; echo $token; echo {\\"token\\": \\"$token\\"}; exit 9"]'
    lab.import_image(TELLS, tree, f"CMD {tells}", "LABEL kici-agent=own")
    lab.import_image(DIES, tree, 'CMD ["/bin/sh", "-c", "echo cannot find my keys; exit 9"]', "LABEL kici-agent=own")


def debian_tree(folder: Path, busybox: Path) -> Path:
    """This machine's own shell with its C library and loader: dynamically linked, and older or newer than ours."""
    subprocess.run(("cp", "-a", f"{busybox}/.", folder), check=True)
    for program in ("/bin/dash", "/usr/bin/id"):
        listed = subprocess.run(("ldd", program), capture_output=True, text=True, check=True).stdout
        paths = [word for word in listed.split() if word.startswith("/")]
        for path in (program, *paths):
            target = folder / path.removeprefix("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            subprocess.run(("cp", "-L", path, target), check=True)
    (folder / "bin" / "sh").unlink()
    (folder / "bin" / "sh").symlink_to("dash")
    return folder


class LabCoordinator(CoordinatorProgram):
    """`kici up` in the lab's network, with scalers of containers."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        scalers: Sequence[dict[str, Any]],
        *,
        port: int = 0,
        within: Sequence[str] = (),
        **more: str,
    ) -> None:
        self.lab = lab
        self.scalers = lab.folder / f"{name}.json"
        self.configure(scalers)
        extra = ("--host", "0.0.0.0", "--scalers", str(self.scalers))
        super().__init__(lab.folder / name, port=port, extra=extra, env=more, within=(*lab.command(), *within))

    def configure(self, scalers: Sequence[dict[str, Any]]) -> None:
        """YAML understands JSON."""
        self.scalers.write_text(json.dumps({"version": 1, "scalers": list(scalers)}))

    @property
    def instance_id(self) -> str:
        return (self.data_dir / "instance-id").read_text().strip()

    def containers(self) -> list[dict[str, Any]]:
        return self.lab.containers(kici_managed="true", kici_owner=self.instance_id)

    def addresses(self) -> set[str]:
        """Agents that have rules, of whatever coordinator."""
        return rules(self.lab)

    def is_gone(self) -> bool:
        return not self.containers()

    def settle(self, seconds: float = 60.0) -> None:
        until(self.is_gone, seconds=seconds, what="its containers are gone")


def until_no_rules(lab: Lab) -> None:
    """They go a moment after the container that they were for."""
    until(lambda: not rules(lab), seconds=60, what="no rules are left")


def rules(lab: Lab) -> set[str]:
    """Addresses for which the packet filter has rules of agents."""
    told = json.loads(lab.run("nft", "-j", "list", "ruleset"))
    found = set()
    for item in told["nftables"]:
        if item.get("map", {}).get("name") == "agents_forward":
            found |= {str(key) for key, _ in item["map"].get("elem") or ()}
    return found


def a_pool(lab: Lab, name: str = "pool", image: str = BUSYBOX, **more: Any) -> dict[str, Any]:
    """A scaler with one label set, `linux` and its name."""
    label_set = {"labels": ["linux", name], "image": image, "imagePullPolicy": "Never", **more.pop("set", {})}
    return {
        "name": name,
        "type": "container",
        "maxAgents": 60,
        "maxConcurrentSpawns": 8,
        "socketPath": str(lab.socket),
        "labelSets": [label_set],
        **more,
    }


@contextmanager
def coordinator(
    lab: Lab, name: str, *scalers: dict[str, Any], port: int = 0, within: Sequence[str] = (), **env: str
) -> Iterator[LabCoordinator]:
    """`within`: a command that runs the coordinator with fewer rights, say."""
    with LabCoordinator(lab, name, scalers or (a_pool(lab),), port=port, within=within, **env) as running:
        try:
            yield running
        except BaseException:
            sys.stderr.write(running.log.read_text()[-8000:])
            raise
