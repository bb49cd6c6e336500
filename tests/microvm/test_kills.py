"""A coordinator that is killed at any step of making or ending a machine leaves nothing that is not found again."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.microvm.lab import Namespace, until
from tests.microvm.linux_guest import GIVEN, linux_guest
from tests.microvm.real_bench import vm_host
from tests.microvm.walker import BENCHES

from kici.domain.ids import AgentId
from kici.testing.contracts.backend import an_id

pytestmark = [pytest.mark.xdist_group("microvms"), pytest.mark.timeout(120)]
STEPS = ("record", "address", "files", "interface", "rules", "link", "vmm", "guest")
ROOT = Path(__file__).parents[2]


def jailers(folder: Path) -> list[str]:
    """Those that their coordinator left at work."""
    done = subprocess.run(("pgrep", "-f", f"jailer .*{folder}"), capture_output=True, text=True, check=False)
    return done.stdout.split()


WALKS = [(step, phase) for step in STEPS for phase in ("do", "done", "undo", "undone")]
MIDST = [("vmm", "3"), ("vmm", "10"), ("vmm", "25"), ("files", "2"), ("rules", "4")]
"""So many milliseconds after a step began: while somebody else's program works for it."""


QEMU_WALKS = [(step, phase) for step in ("vmm", "guest") for phase in ("done", "undo", "undone")]
QEMU_MIDST = [("vmm", "3"), ("vmm", "30"), ("vmm", "100"), ("guest", "2")]


@pytest.mark.engine("firecracker")
@pytest.mark.parametrize(("step", "phase"), WALKS + MIDST)
async def test_after_kill_9_the_tracked_machine_lives_and_the_rest_is_removed_once(step: str, phase: str) -> None:
    await is_walked("firecracker", step, phase)


@pytest.mark.engine("qemu")
@pytest.mark.parametrize(("step", "phase"), QEMU_WALKS + QEMU_MIDST)
async def test_after_kill_9_machines_of_qemu_are_told_apart_as_well(step: str, phase: str) -> None:
    """Where it differs: its own process is started by us, and proves its number by a lock."""
    await is_walked("qemu", step, phase, **{GIVEN: str(linux_guest())})


NOT_STARTED = [(step, phase) for step in ("files", "link", "vmm") for phase in ("do", "done")] + [("guest", "do")]


@pytest.mark.engine("firecracker")
@pytest.mark.parametrize(("step", "phase"), NOT_STARTED)
async def test_after_kill_9_a_machine_whose_guest_was_not_started_is_not_waited_for(step: str, phase: str) -> None:
    """Its spawn is known to the coordinator, and no agent will come of it."""
    with vm_host() as (folder, network):
        killed_at("firecracker", step, phase, folder, network)
        bench = BENCHES["firecracker"](folder, network)
        await bench.start()
        until(lambda: not jailers(folder), what="a jailer that was at work is done")
        try:
            found = await bench.backend.recover(frozenset({an_id(1), an_id(2)}))
            assert [one.agent_id for one in found] == [an_id(1)]
            assert bench.on_host() == {an_id(1)}, bench.leftovers()
        finally:
            await bench.close()
        assert not bench.on_host(), bench.leftovers()


def killed_at(vmm: str, step: str, phase: str, folder: Path, network: Namespace, **env: str) -> None:
    walker = subprocess.run(
        (sys.executable, "-m", "tests.microvm.walker", str(folder), network.name, step, phase, vmm),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), **env},  # it cannot tidy up after itself
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert walker.returncode == -signal.SIGKILL, walker.stderr


async def is_walked(vmm: str, step: str, phase: str, **env: str) -> None:
    with vm_host() as (folder, network):
        killed_at(vmm, step, phase, folder, network, **env)
        bench = BENCHES[vmm](folder, network)
        undone: Counter[tuple[AgentId, str]] = Counter()

        def on_step(vm_id: AgentId, at: str, how: str) -> None:
            if how == "undone":
                undone[vm_id, at] += 1

        bench.on_step = on_step
        await bench.start()
        until(lambda: not jailers(folder), what="a jailer that was at work is done")
        try:
            before = bench.vmm_pids()[an_id(1)]
            found = await bench.backend.recover(frozenset({an_id(1)}))
            assert [one.agent_id for one in found] == [an_id(1)]
            await bench.backend.cleanup_orphans(frozenset({an_id(1)}))
            assert bench.on_host() == {an_id(1)}, bench.leftovers()
            assert bench.vmm_pids() == {an_id(1): before}
            assert set(await bench.addresses.held()) == {an_id(1)}
            assert all(count == 1 for count in undone.values()), undone
            assert await bench.backend.sweep() == 0, "there is nothing left to sweep"
        finally:
            await bench.close()
        assert not bench.on_host(), bench.leftovers()
