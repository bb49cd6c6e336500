"""Containers keep the contract of backends on a Podman, by the part of its interface that is Docker's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract import container_benches as benches
from tests.docker_engine import Lab, busybox_tree
from tests.podman_engine import podman_lab

from kici.testing.contracts.backend import CASES, Case

pytestmark = [pytest.mark.engine("podman"), pytest.mark.xdist_group("podman-contract"), pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with podman_lab() as running:
        benches.import_kinds(running, busybox_tree(running.folder / "busybox"))
        yield running


@pytest.mark.spec("scaler 7.2")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_podman(case: Case, engine: Lab, tmp_path: Path) -> None:
    async with benches.docker(engine, tmp_path) as bench:
        await case(bench)


async def test_a_podman_says_what_it_is_and_where_its_disk_is(engine: Lab, tmp_path: Path) -> None:
    async with benches.docker(engine, tmp_path) as bench:
        client = bench.houses.at(bench.address).engine
        info = await client.info()
        assert (info.system, info.machine) == ("linux", "x86_64")
        assert await client.folder() == str(engine.folder / "root")
