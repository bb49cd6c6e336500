"""The event backend: what it sends, in which order, and what it never sends."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from kici.backends.event.backend import EventBackend, EventSettings
from kici.decide.prune import EVENT
from kici.domain.errors import DeterministicRefusal, KiciError, StoreDown
from kici.domain.event import ScaleUp
from kici.domain.ids import AgentId, JobId, ScalerName
from kici.domain.resources import NOTHING, Amount
from kici.domain.spawn import ScaleDownReason, SpawnState
from kici.ports.backend import Backend, SpawnOrder
from kici.ports.events import NoSubscriber
from kici.testing.builders import a_spawn
from kici.testing.contracts import backend as contract
from kici.testing.contracts.backend import Heard, Kind, an_id
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import virtual

CLOUD = ScalerName("cloud")
ONE = AgentId("scaler-event-00000001")


@dataclass
class Bus:
    """Scale events and claim codes, as they were asked for."""

    told: list[tuple[str, str]] = field(default_factory=list)
    ups: list[ScaleUp] = field(default_factory=list)
    targets: list[tuple[str, ...]] = field(default_factory=list)
    machines: set[AgentId] = field(default_factory=set)
    fails: dict[str, KiciError] = field(default_factory=dict)
    slow: set[AgentId] = field(default_factory=set)
    refused: set[AgentId] = field(default_factory=set)

    async def scale_up(self, payload: ScaleUp, targets: Sequence[str], *, expires_in_ms: int) -> None:
        agent_id = AgentId(payload.agent_id)
        if agent_id in self.slow:
            await asyncio.sleep(5)
        self._fail("up")
        if agent_id in self.refused:
            raise NoSubscriber("nobody subscribes")
        self.told.append(("up", agent_id))
        self.ups.append(payload)
        self.targets.append(tuple(targets))
        self.machines.add(agent_id)

    async def scale_down(
        self, agent_id: AgentId, scaler: ScalerName, reason: ScaleDownReason, *, targets: Sequence[str]
    ) -> bool:
        await asyncio.sleep(0.01)
        self._fail("down")
        self.told.append((f"down {reason}", agent_id))
        self.targets.append(tuple(targets))
        self.machines.discard(agent_id)
        return True

    async def register(self, order: SpawnOrder, *, scaler: ScalerName, ttl_ms: int, agent_token_ttl_ms: int) -> str:
        self._fail("claim")
        self.told.append(("claim", order.agent_id))
        return f"code of {order.agent_id} for {ttl_ms}"

    async def invalidate(self, agent_id: AgentId) -> None:
        self._fail("invalidate")
        self.told.append(("invalidate", agent_id))

    def _fail(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]


class EventBench:
    """As the contract of backends wants it; the machines are those that the bus knows of."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.heard = Heard()
        self.event_backend = EventBackend(
            settings=EventSettings(
                scaler=CLOUD, sets=tuple(("linux", kind.value) for kind in Kind), targets=("acme/a",)
            ),
            events=self.bus,
            claims=self.bus,
            clock=SimClock(),
            entropy=SeededEntropy(),
        )

    @property
    def backend(self) -> Backend:
        return self.event_backend

    def order(self, agent_id: AgentId, kind: Kind = Kind.LIVES) -> SpawnOrder:
        if kind is Kind.SLOW:
            self.bus.slow.add(agent_id)
        if kind is Kind.REFUSED:
            self.bus.refused.add(agent_id)
        return SpawnOrder(
            agent_id=agent_id,
            label_set=("linux", kind.value),
            labels=("linux", kind.value, "windows-x64", "kici:scaler:cloud"),
            gate=frozenset({"windows"}),
            token=None,
            orchestrator_url="ws://127.0.0.1:4000/ws",
            limits=Amount(cpus=2.0, memory_bytes=1024),
            requests=NOTHING,
            bound_job_id=JobId("job-1"),
        )

    def on_host(self) -> frozenset[AgentId]:
        return frozenset(self.bus.machines)

    async def die(self, agent_id: AgentId) -> None:
        self.bus.machines.discard(agent_id)

    async def restart(self) -> None:
        raise NotImplementedError("machines outlive us by themselves")

    async def spawns(self, agent_id: AgentId = ONE, kind: Kind = Kind.LIVES) -> None:
        await self.event_backend.spawn(self.order(agent_id, kind), self.heard.on_event)


APPLICABLE = [
    contract.tells_progress_and_tracks,
    contract.finds_settings_by_equality_of_sets,
    contract.refuses_with_one_failure,
    contract.undoes_a_cancelled_spawn,
    contract.destroys_in_silence,
    contract.destroys_twice_and_strangers,
    contract.finishes_a_destroy_whose_caller_left,
]
"""The others need a machine that can be looked at, or a cap of one host."""


@pytest.mark.spec("scaler 7.2")
@pytest.mark.parametrize("case", APPLICABLE, ids=lambda case: case.__name__)
@virtual
async def test_contract(case: contract.Case) -> None:
    await case(EventBench())


@pytest.mark.spec("scaler 25.6.1", "scaler 25.6.9")
@virtual
async def test_the_claim_is_there_before_the_event_that_carries_it() -> None:
    bench = EventBench()
    await bench.spawns()
    assert [what for what, _ in bench.bus.told] == ["claim", "up"]
    (up,) = bench.bus.ups
    assert up.claim_code == f"code of {ONE} for 300000"
    assert "windows-x64" in up.labels
    assert up.mandatory_labels == ["windows"]
    assert (up.job_id, up.resources and up.resources.mem_bytes) == ("job-1", 1024)


@pytest.mark.spec("scaler 25.6.2")
@pytest.mark.parametrize("what", ["claim", "up"])
@virtual
async def test_a_failed_spawn_is_not_tracked(what: str) -> None:
    bench = EventBench()
    bench.bus.fails[what] = StoreDown("gone")
    with pytest.raises(StoreDown):
        await bench.spawns()
    assert bench.backend.active_count() == 0
    assert len(bench.heard.failures(ONE)) == 1


@pytest.mark.spec("D12")
@virtual
async def test_nobody_to_ask_is_a_refusal_by_the_host() -> None:
    bench = EventBench()
    with pytest.raises(DeterministicRefusal):
        await bench.spawns(kind=Kind.REFUSED)
    await bench.backend.destroy(ONE, ScaleDownReason.SPAWN_TIMEOUT)
    assert [what for what, _ in bench.bus.told] == ["claim"]


@virtual
async def test_a_scale_up_that_may_have_left_is_taken_back() -> None:
    bench = EventBench()
    bench.bus.fails["up"] = StoreDown("no answer")
    with pytest.raises(StoreDown):
        await bench.spawns()
    await bench.backend.destroy(ONE, ScaleDownReason.SPAWN_TIMEOUT)
    assert ("down spawn-timeout", ONE) in bench.bus.told


@pytest.mark.spec("scaler 25.6.3")
@virtual
async def test_two_destroys_at_once_send_one_scale_down() -> None:
    bench = EventBench()
    await bench.spawns()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(bench.backend.destroy(ONE, ScaleDownReason.IDLE))
    assert [what for what, _ in bench.bus.told].count("down idle") == 1


@pytest.mark.spec("scaler 25.6.4")
@virtual
async def test_a_claim_that_cannot_be_deleted_does_not_keep_the_machine() -> None:
    bench = EventBench()
    await bench.spawns()
    bench.bus.fails["invalidate"] = StoreDown("gone")
    await bench.backend.destroy(ONE, ScaleDownReason.IDLE)
    assert not bench.bus.machines


@pytest.mark.spec("scaler 25.6.5")
@virtual
async def test_a_shutdown_sends_nothing_and_forgets_nothing() -> None:
    bench = EventBench()
    for number in range(3):
        await bench.spawns(an_id(number))
    await bench.backend.shutdown_all()
    assert not [what for what, _ in bench.bus.told if what.startswith("down")]
    await bench.backend.destroy(an_id(0), ScaleDownReason.SHUTDOWN)
    assert [what for what, _ in bench.bus.told if what.startswith("down")] == ["down shutdown"]


@pytest.mark.spec("scaler 25.6.6", "scaler 25.6.8")
@virtual
async def test_an_adopted_agent_is_ended_by_the_targets_recorded_at_its_spawn() -> None:
    bench = EventBench()
    row = a_spawn(agent_id=ONE, backend_type=EVENT, provisioning_targets=("acme/old",), state=SpawnState.REGISTERED)
    bench.event_backend.adopt(row)
    bench.event_backend.adopt(row)
    assert bench.backend.active_count() == 1
    assert bench.backend.computes()[0].registered
    await bench.backend.destroy(ONE, ScaleDownReason.JOB_COMPLETE)
    assert bench.bus.targets == [("acme/old",)]


@pytest.mark.spec("scaler 25.6.7")
@virtual
async def test_what_was_forgotten_is_not_ended() -> None:
    bench = EventBench()
    await bench.spawns()
    bench.event_backend.forget(ONE)
    await bench.backend.destroy(ONE, ScaleDownReason.IDLE)
    assert not [what for what, _ in bench.bus.told if what.startswith("down")]


@pytest.mark.spec("scaler 25.6.10")
@virtual
async def test_a_spawn_called_off_before_it_began_stores_no_claim() -> None:
    bench = EventBench()
    task = asyncio.create_task(bench.spawns())
    task.cancel()
    _ = await asyncio.wait({task})
    assert bench.bus.told == []


@virtual
async def test_a_scale_down_that_cannot_be_written_can_be_tried_again() -> None:
    bench = EventBench()
    await bench.spawns()
    bench.bus.fails["down"] = StoreDown("gone")
    with pytest.raises(KiciError, match="could not be written"):
        await bench.backend.destroy(ONE, ScaleDownReason.IDLE)
    assert bench.backend.active_count() == 1
    del bench.bus.fails["down"]
    await bench.backend.destroy(ONE, ScaleDownReason.IDLE)
    assert not bench.bus.machines


@pytest.mark.spec("scaler 24.7.6")
@virtual
async def test_a_reload_changes_what_new_spawns_get() -> None:
    bench = EventBench()
    await bench.spawns(an_id(1))
    bench.event_backend.settings = replace(bench.event_backend.settings, targets=("acme/new",), claim_ttl_ms=60_000)
    await bench.spawns(an_id(2))
    assert bench.bus.targets == [("acme/a",), ("acme/new",)]
    assert bench.bus.ups[1].claim_code.endswith("60000")
    await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
    assert bench.bus.targets[-1] == ("acme/a",)


@pytest.mark.spec("scaler 20.6.1")
@virtual
async def test_known_ones_are_taken_up_again_after_a_restart() -> None:
    bench = EventBench()
    (found,) = await bench.backend.recover(frozenset({ONE}))
    assert found.agent_id == ONE
    assert await bench.backend.recover(frozenset({ONE})) == ()
    assert not await bench.backend.reap_unowned(ONE)
    assert await bench.backend.cleanup_orphans(frozenset()) == 0
    await bench.backend.release_all()
    assert bench.backend.active_count() == 0
    assert bench.backend.tail(ONE, 5) == []
