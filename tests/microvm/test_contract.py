"""MicroVMs keep the contract of backends."""

import pytest
from tests.microvm.fake_bench import fake_microvms
from tests.microvm.linux_guest import linux_guest
from tests.microvm.qemu_bench import QemuBench
from tests.microvm.real_bench import real_microvms

from kici.testing.contracts.backend import CASES, Case
from kici.testing.virtual_time import virtual

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@pytest.mark.spec("scaler 7.2")
@cases
@virtual
async def test_microvms_on_a_host_in_memory(case: Case) -> None:
    async with fake_microvms() as bench:
        await case(bench)


@pytest.mark.engine("firecracker")
@pytest.mark.xdist_group("microvms")
@pytest.mark.spec("scaler 7.2")
@cases
async def test_microvms_by_real_firecracker(case: Case) -> None:
    async with real_microvms() as bench:
        await case(bench)


FROM_INSIDE = {"reports_an_early_death_once", "shows_last_output"}
"""Cases in which a guest has to have booted, which takes an emulated one too long for them."""
outside = pytest.mark.parametrize(
    "case", [case for case in CASES if case.__name__ not in FROM_INSIDE], ids=lambda case: case.__name__
)


@pytest.mark.engine("qemu")
@pytest.mark.xdist_group("microvms")
@pytest.mark.timeout(120)
@outside
async def test_microvms_by_qemu(case: Case) -> None:
    linux_guest()  # made while there is still a way out
    async with real_microvms(QemuBench) as bench:
        await case(bench)
