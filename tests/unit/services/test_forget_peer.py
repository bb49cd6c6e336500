"""Forgetting coordinators and workers that are gone for good, on coordinators that share a store."""

from ipaddress import IPv4Address

import pytest

from kici.decide.forget import ForgetOutcome
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.domain.worker import Worker
from kici.ports.addresses import AddressRow
from kici.testing.cloud_bench import CloudBench, clouded
from kici.testing.coordinator_bench import a_scaler
from kici.testing.faulty_store import StoreFaults
from kici.wire.worker_proof import hash_of


async def forget(bench: CloudBench, peer: str, *, by: int = 0, acknowledged: bool = False) -> ForgetOutcome:
    forgetting = bench.nodes[by].coordinator.cluster.forget_peer
    return (await forgetting.forget(peer, is_acknowledged=acknowledged)).outcome


@pytest.mark.spec("scaler 44", "D4", "scaler 26.9.5")
@clouded(nodes=2)
async def test_a_leader_that_is_alone_reaps_again_once_the_last_other_one_is_forgotten(bench: CloudBench) -> None:
    assert await forget(bench, "node-1") is ForgetOutcome.CONNECTED
    await bench.submits()
    agent = await bench.made(at=1)
    await agent.starts()
    await bench.nodes[1].is_killed()
    await bench.passes(100)
    assert await forget(bench, "node-1", acknowledged=True) is ForgetOutcome.RECENT, "the agent may still come here"
    await bench.passes(600)
    assert bench.node.metric("kici_orch_scaler_reap_blocked") == 1
    assert await forget(bench, "node-1") is ForgetOutcome.ACKNOWLEDGEMENT_REQUIRED
    assert await forget(bench, "node-1", acknowledged=True) is ForgetOutcome.FORGOTTEN
    assert await forget(bench, "node-1", acknowledged=True) is ForgetOutcome.NOT_FOUND
    await bench.all_gone()
    assert bench.node.metric("kici_orch_scaler_reap_blocked") == 0


@pytest.mark.spec("scaler 44", "D4")
@clouded(a_scaler(), nodes=3)
async def test_what_a_forgotten_host_held_is_free_but_not_what_went_on_elsewhere(bench: CloudBench) -> None:
    await bench.passes(5)
    await bench.submits("linux")
    await bench.submits("linux")
    moved, lost = await bench.made_by(0, 0), await bench.made_by(0, 1)
    jobs = [await moved.starts(), await lost.starts()]
    address = AddressRow(
        ip=IPv4Address("172.30.0.10"),
        vm_id=AgentId("vm-1"),
        scaler=ScalerName("vms"),
        owner_instance_id=InstanceId("node-0"),
        tap_device="tap1",
        mac_address="02:00",
    )
    await bench.store.insert_address(address)
    await bench.nodes[0].is_killed()
    bench.moves(moved, 1)
    await moved.registers((jobs[0], "running"))
    await bench.passes(170)
    assert await forget(bench, "node-0", by=1) is ForgetOutcome.FORGOTTEN
    assert await bench.store.addresses(limit=9) == []
    assert [row.agent_id for row in await bench.spawns()] == [moved.agent_id]
    assert [row.id for row in await bench.store.instances(limit=9)] == ["node-1", "node-2"]
    moved.ends(jobs[0])
    await bench.passes()
    moved.leaves()
    await bench.passes(2)
    assert await bench.spawns() == [], "the maker is not waited for"
    assert await bench.store.sessions(instance_id=None, limit=9) == []


@clouded(nodes=1)
async def test_a_store_that_does_not_answer_is_the_outcome(bench: CloudBench) -> None:
    faults: StoreFaults = bench.node.faults
    faults.is_down = True
    assert await forget(bench, "node-1") is ForgetOutcome.ERROR
    faults.is_down = False


@pytest.mark.spec("scaler 44")
@clouded(nodes=1)
async def test_a_worker_that_is_gone_for_good_is_forgotten_with_its_rows(bench: CloudBench) -> None:
    parts = bench.node.coordinator.workers
    _, plain = await parts.create_join_token(by="test", ttl_ms=60_000)
    worker = Worker(id="w1", name="build-7", joined_at=bench.clock.now())
    assert await bench.store.join_worker(worker, token_hash=hash_of(plain), role="worker", credential_hash="c")
    await bench.store.link_workers(["w1"], InstanceId("node-0"))
    assert await forget(bench, "w1") is ForgetOutcome.CONNECTED
    await bench.passes(61)
    assert await forget(bench, "w1") is ForgetOutcome.FORGOTTEN
    found = await bench.store.worker("w1")
    assert found is not None
    assert found.revoked_at is not None


@pytest.mark.spec("T4.11", "scaler 44")
@pytest.mark.parametrize("is_forgotten", [False, True])
@clouded(nodes=3)
async def test_forgetting_an_adopter_brings_no_teardown_before_the_grace(bench: CloudBench, is_forgotten: bool) -> None:
    await bench.submits()
    agent = await bench.made(at=1)
    await agent.starts()
    await bench.passes(10)
    await bench.nodes[1].is_killed()
    killed_at = bench.clock.monotonic()
    if is_forgotten:
        while await forget(bench, "node-1") is not ForgetOutcome.FORGOTTEN:
            await bench.passes(1)
        assert bench.clock.monotonic() - killed_at >= 100
    await bench.until(lambda: bench.cloud.told("kici.scaler.scale-down"), within=600)
    assert bench.clock.monotonic() - killed_at >= 120
    assert bench.cloud.told("kici.scaler.scale-down")[0]["reason"] == "heartbeat-timeout"
    await bench.all_gone()
