"""What the backend of microVMs promises beyond the contract of all backends, on a host in memory."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tests.microvm.fake_bench import SETTINGS, FakeMicroVmBench, an_order, fake_microvms

from kici.backends.firecracker.plan import OnStep
from kici.decide.classify import StopOutcome, Tracker
from kici.decide.microvm import tap_of
from kici.domain.errors import DeterministicRefusal, Retryable
from kici.domain.ids import AgentId
from kici.domain.spawn import ScaleDownReason
from kici.testing.contracts.backend import Kind, an_id
from kici.testing.fake_microvms import BRIDGE
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import virtual

STEPS = ("record", "address", "files", "interface", "rules", "link", "vmm", "guest")
VM = an_id(1)


async def spawn(bench: FakeMicroVmBench, number: int = 1, kind: Kind = Kind.LIVES) -> None:
    await bench.backend.spawn(bench.order(an_id(number), kind), bench.heard.on_event)


@virtual
async def test_steps_wait_for_what_they_need_and_are_taken_back_in_reverse() -> None:
    told: list[tuple[str, str]] = []
    bench = FakeMicroVmBench()
    bench.on_step = lambda _, step, phase: told.append((step, phase))
    await bench.start()
    await spawn(bench)
    assert {step for step, phase in told if phase == "done"} == set(STEPS)
    order = ["record", "address", "interface", "rules", "link", "guest"]
    assert [step for step, phase in told if phase == "do" and step in order] == order
    for earlier, later in (*pairwise(order), ("record", "files"), ("files", "vmm"), ("vmm", "guest")):
        assert told.index((earlier, "done")) < told.index((later, "do"))
    assert told.index(("vmm", "do")) < told.index(("link", "done")), "the VMM starts while the network is made"
    told.clear()
    await bench.backend.destroy(VM, ScaleDownReason.IDLE)
    assert [step for step, phase in told if phase == "undone"] == list(reversed(STEPS))
    await bench.close()


@pytest.mark.spec("scaler 36.18.1", "scaler 49.6", "scaler 50.2")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("phase", ["do", "done"])
@virtual
async def test_an_abort_at_any_step_removes_each_thing_once(step: str, phase: str) -> None:
    undone: Counter[str] = Counter()
    bench = FakeMicroVmBench()
    task: asyncio.Task[object] | None = None

    def on_step(_: AgentId, at: str, how: str) -> None:
        if (at, how) == (step, phase) and task is not None:
            task.cancel()
        undone[at] += how == "undone"

    watch: OnStep = on_step
    bench.on_step = watch
    await bench.start()
    task = asyncio.create_task(bench.backend.spawn(bench.order(VM, Kind.SLOW), bench.heard.on_event))
    await asyncio.wait({task})
    assert task.cancelled()
    assert not bench.on_host()
    assert bench.backend.active_count() == 0
    assert set(undone.values()) <= {0, 1}
    await bench.close()
    assert len(bench.heard.failures(VM)) == 1


@pytest.mark.spec("scaler 36.18.18")
@virtual
async def test_boot_data_is_forgotten_once_the_agent_has_it() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        data = bench.host.processes[VM].boot_data
        assert data is not None
        assert data["latest"]["meta-data"]["kici-agent-token"] == "sesame"
        await bench.backend.boot_data_read(VM)
        assert bench.host.processes[VM].boot_data is None
        bench.host.processes[VM].end()
        await bench.backend.boot_data_read(VM)
        await bench.backend.boot_data_read(an_id(9))


@virtual
async def test_boot_data_that_cannot_be_forgotten_is_told() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        bench.host.faults["forget"] = Retryable("its metadata could not be emptied")
        with pytest.raises(Retryable, match="could not be emptied"):
            await bench.backend.boot_data_read(VM)


@virtual
async def test_boot_data_of_a_machine_that_could_not_be_taken_up_is_forgotten_all_the_same() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        await bench.restart()
        bench.host.processes[VM].is_confirmed = False
        assert await bench.backend.recover(frozenset({VM})) == ()
        await bench.backend.boot_data_read(VM)
        assert bench.host.processes[VM].boot_data is None
        bench.host.processes[VM].is_confirmed = True


@pytest.mark.spec("scaler 36.18.15", "scaler 50.13")
@virtual
async def test_a_process_that_cannot_be_ended_keeps_its_files_and_loses_its_network() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        bench.host.processes[VM].resists = True
        with pytest.raises(Retryable, match="another user's"):
            await bench.backend.destroy(VM, ScaleDownReason.IDLE)
        assert bench.backend.active_count() == 1, "it stays tracked, and is tried again"
        assert Path("/srv/jailer/firecracker") / VM in bench.host.folders
        assert not bench.host.taps
        assert not bench.host.rules
        assert VM in await bench.addresses.held()
        bench.host.processes[VM].resists = False
        await bench.backend.destroy(VM, ScaleDownReason.IDLE)
        assert not bench.on_host()


@virtual
async def test_a_guest_is_asked_first_only_when_its_agent_had_registered() -> None:
    async with fake_microvms() as bench:
        for number in (1, 2):
            await spawn(bench, number)
        bench.backend.mark_registered(an_id(2))
        await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
        assert "ask" not in bench.host.calls
        await bench.backend.destroy(an_id(2), ScaleDownReason.IDLE)
        assert bench.host.calls.count("ask") == 1


@virtual
async def test_a_guest_that_does_not_listen_is_ended_after_a_while() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        bench.backend.mark_registered(VM)
        bench.host.script = replace(bench.host.script, is_deaf=True)
        began = asyncio.get_running_loop().time()
        await bench.backend.destroy(VM, ScaleDownReason.IDLE)
        assert asyncio.get_running_loop().time() - began == pytest.approx(SETTINGS.stop_seconds)


@pytest.mark.spec("scaler 36.18.4")
@virtual
async def test_a_guest_that_ends_before_it_registers_fails_its_spawn_and_frees_its_place() -> None:
    async with fake_microvms() as bench:
        order = bench.order(VM, Kind.LIVES)
        bench.host.script = replace(bench.host.script, lives_seconds=5.0)
        await bench.backend.spawn(order, bench.heard.on_event)
        await asyncio.sleep(4.9)
        assert (bench.backend.active_count(), bench.heard.failures(VM)) == (1, [])
        await asyncio.sleep(2)
        assert (bench.backend.active_count(), len(bench.heard.failures(VM))) == (0, 1)
        assert not bench.on_host()
        assert bench.heard.exits == [], "it was told once, as a spawn that failed"


@pytest.mark.spec("scaler 36.18.5")
@virtual
async def test_a_guest_that_ends_after_it_registered_is_no_failed_spawn() -> None:
    async with fake_microvms() as bench:
        order = bench.order(VM, Kind.LIVES)
        bench.host.script = replace(bench.host.script, lives_seconds=5.0)
        await bench.backend.spawn(order, bench.heard.on_event)
        bench.backend.mark_registered(VM)
        await asyncio.sleep(7)
        assert bench.heard.failures(VM) == []
        assert [vm_id for vm_id, _ in bench.heard.exits] == [VM]
        assert not bench.on_host()


@virtual
async def test_a_bridge_that_breaks_is_mended_once_and_the_spawn_goes_on() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        bench.host.is_healthy = False
        bench.host.faults["make_tap"] = Retryable("Device kici-br0 does not exist")
        bench.host.calls.clear()

        def mended() -> None:
            bench.host.faults.pop("make_tap", None)

        bench.host.on_provision = mended
        await spawn(bench, 2)
        assert bench.host.calls.count("provision") == 1


@virtual
async def test_the_state_of_its_bridge_can_be_asked_for() -> None:
    async with fake_microvms() as bench:
        assert (await bench.backend.bridge_state()).faults == ()
        bench.host.is_healthy = False
        state = await bench.backend.bridge_state()
        assert (state.faults, state.heals) == (("it is broken",), True)
        assert state.name


@virtual
async def test_a_bridge_that_is_an_operators_is_not_mended() -> None:
    bench = FakeMicroVmBench()
    bench.with_settings(auto_provision=False)
    await bench.start()
    bench.host.is_healthy = False
    bench.host.faults["make_tap"] = Retryable("Device kici-br0 does not exist")
    with pytest.raises(Retryable, match="does not exist"):
        await spawn(bench)
    assert "provision" not in bench.host.calls
    bench.host.faults.clear()
    await bench.close()


@virtual
async def test_a_host_that_cannot_keep_guests_apart_makes_none() -> None:
    bench = FakeMicroVmBench()
    await bench.start()
    bench.host.is_healthy = False
    bench.host.faults["probe_isolation"] = DeterministicRefusal("this kernel cannot keep the ports of a bridge apart")
    assert await bench.backend.recover(frozenset()) == (), "what lives here is looked for all the same"
    bench.host.is_healthy = False
    with pytest.raises(DeterministicRefusal, match="cannot keep the ports"):
        await spawn(bench)
    assert not bench.on_host()
    bench.host.faults.clear()
    await bench.close()


@virtual
async def test_a_guest_that_could_not_reach_the_coordinator_is_not_made() -> None:
    async with fake_microvms() as bench:
        order = replace(an_order(VM, Kind.LIVES), orchestrator_url="ws://127.0.0.1:4000/ws")
        with pytest.raises(DeterministicRefusal, match="that is the guest itself"):
            await bench.backend.spawn(order, bench.heard.on_event)
        assert not bench.on_host()


@pytest.mark.spec("scaler 36.18.14")
@virtual
async def test_a_sweep_during_a_spawn_leaves_its_interface() -> None:
    async with fake_microvms() as bench:
        task = asyncio.create_task(bench.backend.spawn(bench.order(VM, Kind.SLOW), bench.heard.on_event))
        await asyncio.sleep(0.5)
        assert tap_of(VM) in bench.host.taps
        assert await bench.backend.sweep() == 0
        await task
        assert tap_of(VM) in bench.host.taps


@pytest.mark.spec("scaler 50.1")
@virtual
async def test_a_sweep_removes_the_dead_and_strays_and_leaves_the_living_and_others() -> None:
    async with fake_microvms() as bench:
        for number in (1, 2):
            await spawn(bench, number)
        await bench.restart()
        bench.host.processes[an_id(1)].end()
        bench.host.taps["kici-ffffffff"] = True
        bench.host.rules["10.0.0.99"] = ("scaler_firecracker_ffffffff", "kici-ffffffff")
        foreign = Path("/srv/jailer/firecracker/scaler-firecracker-eeeeeeee")
        bench.host.folders[foreign] = SimClock().now()
        released, release = [], bench.addresses.release

        async def seen(agent_id: AgentId) -> None:
            released.append(agent_id)
            assert tap_of(agent_id) not in {tap for _, tap in bench.host.rules.values()}, "the next one inherits them"
            await release(agent_id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.addresses, "release", seen)
            assert await bench.backend.sweep() == 1
        assert an_id(1) in released
        assert set(bench.host.running()) == {an_id(2)}
        assert tap_of(an_id(2)) in bench.host.taps
        assert "kici-ffffffff" not in bench.host.taps
        assert "10.0.0.99" not in bench.host.rules
        assert foreign in bench.host.folders, "another coordinator may be making it"
        await asyncio.sleep(7200)
        await bench.backend.sweep()
        assert foreign not in bench.host.folders


@virtual
async def test_sweeps_come_by_themselves_every_quarter_of_an_hour() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        await bench.restart()
        await bench.backend.recover(frozenset())
        bench.host.processes[VM].end()
        await asyncio.sleep(899)
        assert bench.on_host()
        await asyncio.sleep(2)
        assert not bench.on_host()


@pytest.mark.spec("scaler 36.18.13")
@virtual
async def test_what_is_not_on_this_host_is_not_reclaimed() -> None:
    async with fake_microvms() as bench:
        bench.addresses.restore(an_id(7), BRIDGE.cidr[7])  # a row, and nothing else
        assert not await bench.backend.reap_unowned(an_id(7))
        assert an_id(7) in await bench.addresses.held()
        await bench.addresses.release(an_id(7))
        await spawn(bench)
        assert not await bench.backend.reap_unowned(VM), "tracked machines are owned"


@virtual
async def test_a_machine_whose_guest_was_not_started_yet_is_not_waited_for_after_a_restart() -> None:
    async with fake_microvms() as bench:
        path = Path(f"/data/microvms/{an_id(2)}.json")
        found: list[bytes] = []

        def on_step(vm_id: AgentId, step: str, phase: str) -> None:
            if (vm_id, step, phase) == (an_id(2), "guest", "do"):
                found.append(bench.files.contents[path])

        bench.on_step = on_step
        await bench.restart()
        for number in (1, 2):
            await spawn(bench, number)
        await bench.restart()
        bench.files.contents[path] = found[0]  # what a kill at that moment leaves
        assert [one.agent_id for one in await bench.backend.recover(frozenset({VM, an_id(2)}))] == [VM]
        assert bench.on_host() == {VM}


@virtual
async def test_a_machine_without_a_started_guest_that_resists_does_not_keep_others_from_being_taken_up() -> None:
    async with fake_microvms() as bench:
        for number in (1, 2):
            await spawn(bench, number)
        await bench.restart()
        path = Path(f"/data/microvms/{VM}.json")
        record = msgspec.json.decode(bench.files.contents[path])
        bench.files.contents[path] = msgspec.json.encode({**record, "is_started": False})
        bench.host.processes[VM].resists = True
        found = await bench.backend.recover(frozenset({VM, an_id(2)}))
        assert [one.agent_id for one in found] == [VM, an_id(2)], "it is there still: whoever tracks it ends it"
        bench.host.processes[VM].resists = False


@virtual
async def test_an_unproven_process_is_neither_ended_nor_are_its_files_removed() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        await bench.restart()
        bench.host.processes[VM].is_confirmed = False
        assert await bench.backend.recover(frozenset({VM})) == ()
        assert not await bench.backend.reap_unowned(VM)
        assert await bench.backend.cleanup_orphans(frozenset()) == 0
        assert bench.on_host() == {VM}
        result = await bench.backend.stop_untracked(VM, list)
        assert (result.outcome, result.detail) == (StopOutcome.UNVERIFIED, "it is called 'bash'")
        assert VM in bench.host.running()
        bench.host.processes[VM].is_confirmed = True


@pytest.mark.spec("scaler 37.6.1")
@virtual
async def test_a_machine_that_becomes_tracked_at_the_last_moment_is_not_stopped() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        await bench.restart()
        asked: list[bool] = []

        def registered_meanwhile() -> list[Tracker]:
            asked.append(VM in bench.host.running())
            return [Tracker.REGISTERED]

        result = await bench.backend.stop_untracked(VM, registered_meanwhile)
        assert (result.outcome, asked) == (StopOutcome.TRACKED, [True])
        assert VM in bench.host.running()


@pytest.mark.spec("scaler 37.6.4")
@pytest.mark.spec("scaler 37.6.7")
@virtual
async def test_stops_and_sweeps_run_one_after_the_other() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        await spawn(bench, 2)
        await bench.restart()
        bench.host.processes[an_id(2)].end()
        assert (await bench.backend.stop_untracked(an_id(2), list)).outcome is StopOutcome.NOT_LIVE
        async with asyncio.TaskGroup() as group:
            first = group.create_task(bench.backend.stop_untracked(VM, list))
            group.create_task(bench.backend.sweep())
            second = group.create_task(bench.backend.stop_untracked(VM, list))
        assert first.result().outcome is StopOutcome.STOPPED
        assert second.result().outcome is StopOutcome.NOT_FOUND
        assert (await bench.backend.stop_untracked(AgentId("x/../y"), list)).outcome is StopOutcome.NOT_FOUND
        assert not bench.on_host()


@pytest.mark.spec("scaler 36.18.17")
@virtual
async def test_a_changed_entry_concerns_later_machines_only() -> None:
    async with fake_microvms() as bench:
        await spawn(bench)
        one_set = bench.settings.sets[:1]
        bench.with_settings(sets=one_set, max_agents=5)
        bench.backend.configure(bench.settings)
        assert VM in bench.host.running()
        with pytest.raises(Exception, match="has no label set"):
            await spawn(bench, 2, Kind.SLOW)
