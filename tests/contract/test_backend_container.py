"""Containers keep the contract of backends, on a fake engine and on a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract import container_benches as benches
from tests.docker_engine import Lab, busybox_tree, lab

from kici.testing.contracts.backend import CASES, Case
from kici.testing.virtual_time import virtual

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        benches.import_kinds(running, busybox_tree(running.folder / "busybox"))
        yield running


@pytest.mark.spec("scaler 7.2")
@cases
@virtual
async def test_fake_engine(case: Case) -> None:
    async with benches.fake_engine() as bench:
        await case(bench)


@pytest.mark.spec("scaler 7.2")
@pytest.mark.engine("docker")
@pytest.mark.xdist_group("docker-contract")
@cases
async def test_docker(case: Case, engine: Lab, tmp_path: Path) -> None:
    async with benches.docker(engine, tmp_path) as bench:
        await case(bench)
