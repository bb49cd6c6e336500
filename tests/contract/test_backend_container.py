"""Containers keep the contract of backends, on a fake engine and on a real one."""

from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from tests.contract import container_benches as benches
from tests.docker_engine import Lab, busybox_tree, lab

from kici.backends.container.fencing import AgentNetwork
from kici.domain.errors import DeterministicRefusal
from kici.testing.contracts.backend import CASES, Case, Kind, an_id
from kici.testing.virtual_time import virtual

FAR = "tcp://127.0.0.1:2375"
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab(FAR) as running:
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


@pytest.mark.spec("scaler 29.10.10")
@pytest.mark.engine("docker")
@pytest.mark.xdist_group("docker-contract")
@cases
async def test_docker_by_tcp(case: Case, engine: Lab, tmp_path: Path) -> None:
    async with benches.far_docker(engine, tmp_path, FAR) as bench:
        assert not bench.backend.spawns_on_local_host
        await case(bench)


@pytest.mark.spec("scaler 31.7.6")
@pytest.mark.engine("docker")
@pytest.mark.xdist_group("docker-contract")
async def test_a_table_without_chains_is_completed(engine: Lab, tmp_path: Path) -> None:
    """Somebody, or an earlier version, made the table and no more of it."""
    network = AgentNetwork(name="kici-half", subnet=IPv4Network("172.28.0.0/24"), bridge="kici-half")
    hook = "{ type filter hook input priority -10; policy accept; }"
    engine.run("nft", f"add table inet kici_half; add chain inet kici_half input {hook}")
    bench = benches.RealEngineBench(engine, tmp_path, network=network)
    await bench.start()
    try:
        _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
        listed = engine.run("nft", "list", "table", "inet", "kici_half")
        assert "type filter hook forward" in listed
        assert "jump f_scaler" in listed
    finally:
        await bench.close()


@pytest.mark.engine("docker")
@pytest.mark.xdist_group("docker-contract")
async def test_a_real_engine_says_where_its_disk_is_and_a_full_one_makes_nothing(engine: Lab, tmp_path: Path) -> None:
    asked: list[Path] = []

    def nothing_left(path: Path) -> int:
        asked.append(path)
        return 2**20

    async with benches.docker(engine, tmp_path, free_bytes=nothing_left) as bench:
        with pytest.raises(DeterministicRefusal, match="only 1 MiB are free for the container engine"):
            _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
        assert not bench.on_host()
    assert set(asked) == {engine.folder / "root"}
