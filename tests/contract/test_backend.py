"""Every backend keeps the contract of backends."""

from pathlib import Path

import pytest
from tests.contract import backend_benches as benches

from kici.testing.contracts.backend import CASES, Case
from kici.testing.virtual_time import virtual

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@cases
@virtual
async def test_fake(case: Case) -> None:
    async with benches.fake() as bench:
        await case(bench)


@pytest.mark.spec("scaler 7.2")
@cases
@virtual
async def test_bare_metal_on_a_fake_host(case: Case) -> None:
    async with benches.bare_metal_on_a_fake_host() as bench:
        await case(bench)


@pytest.mark.spec("scaler 7.2")
@cases
async def test_bare_metal(case: Case, tmp_path: Path) -> None:
    async with benches.bare_metal(tmp_path) as bench:
        await case(bench)


@pytest.mark.engine("cgroups")
@pytest.mark.xdist_group("cgroups")
@cases
async def test_bare_metal_with_cgroups(case: Case, tmp_path: Path) -> None:
    async with benches.bare_metal_with_cgroups(tmp_path) as bench:
        await case(bench)


@cases
async def test_bare_metal_with_a_zygote(case: Case, tmp_path: Path) -> None:
    async with benches.bare_metal_with_a_zygote(tmp_path) as bench:
        await case(bench)
