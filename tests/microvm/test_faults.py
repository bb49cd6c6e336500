"""Whatever goes wrong with a microVM is told once in words that help, and leaves nothing behind."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.microvm.faults import FAULTS, VM, Fault, plain, play
from tests.microvm.real_bench import RealMicroVmBench, vm_host

pytestmark = [pytest.mark.engine("firecracker"), pytest.mark.xdist_group("microvms"), pytest.mark.timeout(120)]
PAGE = Path(__file__).parents[2] / "docs/microvms.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
told: dict[str, str] = {}


@pytest.mark.spec("scaler 36.18.1")
@pytest.mark.spec("scaler 36.18.2")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_a_fault_is_told_once_and_nothing_is_left(fault: Fault) -> None:
    with vm_host() as (folder, network):
        bench = RealMicroVmBench(folder, network)
        try:
            text = await play(bench, fault)
            assert re.search(fault.told, text), text
            told[fault.name] = plain(text, bench)
            if fault.runs:
                assert bench.backend.active_count() == 1
                assert bench.vmm_pids()
                assert (await bench.host_network.health()).is_healthy
                assert await bench.host_network.admitted()
            else:
                assert bench.backend.active_count() == 0
                assert _left(bench, fault) == {}
        finally:
            await bench.close()
            for pid in bench.vmm_pids().values():
                os.kill(pid, signal.SIGKILL)
            subprocess.run(("umount", "-q", str(folder / "small")), check=False)


def _left(bench: RealMicroVmBench, fault: Fault) -> dict[str, set[str]]:
    found = bench.leftovers()
    if fault.name == "an interface of its name exists":
        assert found["interfaces"] == {f"kici-{VM[-8:]}"}, "what was somebody else's stays"
        found["interfaces"] = set()
    return {kind: each for kind, each in found.items() if each}


def test_the_table_of_faults_is_what_the_tests_saw() -> None:
    """Set KICI_WRITE_FAULTS to write it anew."""
    if set(told) != {fault.name for fault in FAULTS}:
        pytest.skip("needs all of the tests above in one process")
    table = "| what goes wrong | what the operator sees | afterwards |\n| --- | --- | --- |\n"
    for fault in FAULTS:
        text = told[fault.name].replace("|", "\\|").replace("\n", "<br>") or fault.seen
        table += f"| {fault.name} | {text} | {fault.after} |\n"
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    current, _, after = rest.partition(END)
    if os.environ.get("KICI_WRITE_FAULTS"):
        PAGE.write_text(before + BEGIN + table + END + after)
        return
    assert current == table, "the page is not what the tests saw: KICI_WRITE_FAULTS=1 writes it"
