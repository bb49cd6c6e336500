"""The contract of every backend: the rules of `ports.backend.Backend`, as cases that run on any implementation.

A `Bench` is one scaler on one host, made for a test: the backend, what it told, and ways to make things happen
that no backend does by itself.  A test parametrises `CASES` over factories of benches.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Protocol

from kici.domain.errors import DeterministicRefusal, KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, scaler_agent_id
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import Backend, Compute, ComputeState, SpawnEvent, SpawnEventType, SpawnOrder

MAX_AGENTS: Final = 3
"""What a bench configures."""
STRANGE_SET: Final = ("no", "such", "set")
_UNTIL_SECONDS: Final = 20.0


class Kind(StrEnum):
    """What the agent of an order does; a bench knows how to ask for it."""

    LIVES = "lives"
    """Starts, and lives until it is ended.  Prints one line, `ready`, if it can print at all."""
    DIES = "dies"
    """Starts, and soon ends by itself."""
    REFUSED = "refused"
    """The host refuses to start it."""
    SLOW = "slow"
    """Takes a moment to start; then it lives."""


@dataclass
class Heard:
    """What a backend told."""

    events: list[SpawnEvent] = field(default_factory=list)
    exits: list[tuple[AgentId, str]] = field(default_factory=list)

    def on_event(self, event: SpawnEvent) -> None:
        self.events.append(event)

    def on_exit(self, agent_id: AgentId, how: str) -> None:
        self.exits.append((agent_id, how))

    def failures(self, agent_id: AgentId) -> list[SpawnEvent]:
        return [one for one in self.events if one.agent_id == agent_id and one.type is SpawnEventType.FAILED]


class Bench(Protocol):
    @property
    def backend(self) -> Backend: ...

    @property
    def heard(self) -> Heard: ...

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder: ...

    def on_host(self) -> frozenset[AgentId]:
        """Agents of which anything is on the host: running, or a file, or a name that is taken."""
        ...

    async def die(self, agent_id: AgentId) -> None:
        """End this compute from outside, as a crash would."""
        ...

    async def restart(self) -> None:
        """The coordinator is gone without a word; another one has started on the same host."""
        ...


BenchFactory = Callable[[], AbstractAsyncContextManager[Bench]]
Case = Callable[[Bench], Coroutine[Any, Any, None]]


def an_id(number: int) -> AgentId:
    return scaler_agent_id("bare-metal", f"{number:08x}")


async def tells_progress_and_tracks(bench: Bench) -> None:
    """A spawn tells that it starts and that the agent is to be expected, and is tracked."""
    compute = await _spawn(bench, 1)
    assert compute.agent_id == an_id(1)
    assert compute.ref
    assert bench.backend.computes() == (compute,)
    assert bench.backend.active_count() == 1
    told = [one.type for one in bench.heard.events]
    assert told[0] is SpawnEventType.PROVISIONING
    assert told[-1] is SpawnEventType.CONNECTING
    assert SpawnEventType.FAILED not in told
    await until(lambda: bench.on_host() == {an_id(1)})


async def finds_settings_by_equality_of_sets(bench: Bench) -> None:
    """Order, case and repetition of the declared labels do not matter; anything else is not served."""
    order = bench.order(an_id(1), Kind.LIVES)
    turned = tuple(label.upper() for label in reversed(order.label_set)) + order.label_set[:1]
    _ = await bench.backend.spawn(_with_set(order, turned), bench.heard.on_event)
    strange = _with_set(bench.order(an_id(2), Kind.LIVES), STRANGE_SET)
    assert type(await _error_of(bench.backend.spawn(strange, bench.heard.on_event))) is Permanent
    assert len(bench.heard.failures(an_id(2))) == 1
    assert bench.backend.active_count() == 1


async def checks_capacity_before_its_first_await(bench: Bench) -> None:
    """Spawns that start together cannot pass the maximum together; what did not start leaves room."""
    tries = [_attempt(bench, number) for number in range(MAX_AGENTS + 2)]
    errors = [error for error in await _together(tries) if error is not None]
    assert [type(error) for error in errors] == [NoCapacity, NoCapacity]
    assert bench.backend.active_count() == MAX_AGENTS
    await bench.backend.destroy(an_id(0), ScaleDownReason.IDLE)
    _ = await _spawn(bench, MAX_AGENTS + 5)


async def refuses_with_one_failure(bench: Bench) -> None:
    """A launch that the host refuses: told once, then raised as what it is; nothing stays."""
    error = await _attempt(bench, 1, Kind.REFUSED)
    assert isinstance(error, DeterministicRefusal), repr(error)
    assert [one.detail for one in bench.heard.failures(an_id(1))] == [str(error)]
    assert bench.backend.active_count() == 0
    assert not bench.on_host()


async def undoes_a_cancelled_spawn(bench: Bench) -> None:
    """Called off at any moment: nothing tracked, nothing on the host, told once; room for the next."""
    for turns in range(12):
        agent_id = an_id(turns)
        task = asyncio.create_task(bench.backend.spawn(bench.order(agent_id, Kind.SLOW), bench.heard.on_event))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            _ = await task
            await bench.backend.destroy(agent_id, ScaleDownReason.SHUTDOWN)
            continue
        _ = await asyncio.wait({task})
        assert task.cancelled(), task
        started = any(one.agent_id == agent_id for one in bench.heard.events)
        assert len(bench.heard.failures(agent_id)) == (1 if started else 0)
        assert bench.backend.active_count() == 0
        assert not bench.on_host()


async def reports_an_early_death_once(bench: Bench) -> None:
    """Gone before its agent registered: a failed launch, told through the spawn's own callback."""
    _ = await _spawn(bench, 1, Kind.DIES)
    await until(lambda: bench.backend.active_count() == 0)
    await until(lambda: len(bench.heard.failures(an_id(1))) == 1)
    assert "before it registered" in bench.heard.failures(an_id(1))[0].detail
    assert not bench.heard.exits
    assert not bench.on_host()


async def reports_a_later_death_as_exit(bench: Bench) -> None:
    """Gone after its agent registered: proof of death, and no failed launch."""
    _ = await _spawn(bench, 1)
    bench.backend.mark_registered(an_id(1))
    assert bench.backend.computes()[0].registered
    await bench.die(an_id(1))
    await until(lambda: bool(bench.heard.exits))
    assert [agent_id for agent_id, _ in bench.heard.exits] == [an_id(1)]
    assert not bench.heard.failures(an_id(1))
    assert bench.backend.active_count() == 0
    assert not bench.on_host()


async def destroys_in_silence(bench: Bench) -> None:
    """What was asked to end is neither a failed launch nor a death; it is gone when the call returns."""
    _ = await _spawn(bench, 1)
    await bench.backend.destroy(an_id(1), ScaleDownReason.JOB_COMPLETE)
    assert bench.backend.active_count() == 0
    assert not bench.on_host()
    await asyncio.sleep(0.1)
    assert not bench.heard.exits
    assert not bench.heard.failures(an_id(1))


async def destroys_twice_and_strangers(bench: Bench) -> None:
    """An unknown id is nothing to destroy, and two calls at once are as good as one."""
    await bench.backend.destroy(an_id(9), ScaleDownReason.IDLE)
    bench.backend.mark_registered(an_id(9))
    _ = await _spawn(bench, 1)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(bench.backend.destroy(an_id(1), ScaleDownReason.IDLE))
    assert not bench.on_host()


async def destroys_what_is_still_starting(bench: Bench) -> None:
    task = asyncio.create_task(bench.backend.spawn(bench.order(an_id(1), Kind.SLOW), bench.heard.on_event))
    await asyncio.sleep(0)
    await bench.backend.destroy(an_id(1), ScaleDownReason.DRAIN)
    with suppress(Retryable):  # it may have been called off
        _ = await task
    assert bench.backend.active_count() == 0
    assert not bench.on_host()


async def finishes_a_destroy_whose_caller_left(bench: Bench) -> None:
    _ = await _spawn(bench, 1)
    task = asyncio.create_task(bench.backend.destroy(an_id(1), ScaleDownReason.IDLE))
    await asyncio.sleep(0)
    task.cancel()
    _ = await asyncio.wait({task})
    assert task.cancelled(), task
    assert bench.backend.active_count() == 0
    assert not bench.on_host()


async def recovers_what_is_known(bench: Bench) -> None:
    """After a crash the known live ones are tracked again; the rest stays until somebody decides."""
    for number in range(3):
        _ = await _spawn(bench, number)
    before = {one.agent_id: one for one in bench.backend.computes()}
    await bench.restart()
    assert bench.backend.active_count() == 0
    found = await bench.backend.recover(frozenset({an_id(0), an_id(1), an_id(77)}))
    assert {one.agent_id for one in found} == {an_id(0), an_id(1)}
    for one in found:
        assert one.ref == before[one.agent_id].ref
        assert one.spawned_at == before[one.agent_id].spawned_at
        assert one.label_set == before[one.agent_id].label_set
        assert one.state is ComputeState.RUNNING
    assert bench.on_host() == {an_id(0), an_id(1), an_id(2)}
    assert await bench.backend.recover(frozenset({an_id(0), an_id(1)})) == ()
    await bench.backend.destroy(an_id(0), ScaleDownReason.IDLE)
    assert bench.on_host() == {an_id(1), an_id(2)}


async def reports_the_death_of_a_recovered_one_as_exit(bench: Bench) -> None:
    _ = await _spawn(bench, 1)
    await bench.restart()
    _ = await bench.backend.recover(frozenset({an_id(1)}))
    await bench.die(an_id(1))
    await until(lambda: [agent_id for agent_id, _ in bench.heard.exits] == [an_id(1)])
    assert not bench.heard.failures(an_id(1))
    assert not bench.on_host()


async def does_not_recover_the_dead(bench: Bench) -> None:
    _ = await _spawn(bench, 1)
    await bench.restart()
    await bench.die(an_id(1))
    assert await bench.backend.recover(frozenset({an_id(1)})) == ()
    assert bench.backend.active_count() == 0
    assert not bench.on_host()


async def reaps_what_nobody_owns(bench: Bench) -> None:
    """Only by evidence on this host, only this id."""
    for number in (1, 2):
        _ = await _spawn(bench, number)
    await bench.restart()
    assert not await bench.backend.reap_unowned(an_id(77))
    assert await bench.backend.reap_unowned(an_id(1))
    assert bench.on_host() == {an_id(2)}
    assert not await bench.backend.reap_unowned(an_id(1))


async def cleans_up_orphans(bench: Bench) -> None:
    """Neither what is tracked nor what the caller says is owned."""
    _ = await _spawn(bench, 1)
    await bench.restart()
    _ = await _spawn(bench, 2)
    await bench.restart()
    _ = await bench.backend.recover(frozenset({an_id(2)}))
    _ = await _spawn(bench, 3)
    assert await bench.backend.cleanup_orphans(frozenset({an_id(1)})) == 0
    assert bench.on_host() == {an_id(1), an_id(2), an_id(3)}
    assert await bench.backend.cleanup_orphans(frozenset()) == 1
    assert bench.on_host() == {an_id(2), an_id(3)}
    assert bench.backend.active_count() == 2


async def shuts_down_all(bench: Bench) -> None:
    for number in range(MAX_AGENTS):
        _ = await _spawn(bench, number)
    await bench.backend.shutdown_all()
    assert bench.backend.active_count() == 0
    assert not bench.on_host()
    assert not bench.heard.exits


async def releases_all(bench: Bench) -> None:
    """Forgotten but alive, in silence; the next start finds them."""
    for number in (1, 2):
        _ = await _spawn(bench, number)
    await bench.backend.release_all()
    assert bench.backend.active_count() == 0
    assert bench.on_host() == {an_id(1), an_id(2)}
    await bench.restart()
    assert len(await bench.backend.recover(frozenset({an_id(1), an_id(2)}))) == 2
    assert not bench.heard.exits


async def shows_last_output(bench: Bench) -> None:
    """As many lines as asked; also of one that has just gone."""
    _ = await _spawn(bench, 1)
    await until(lambda: bool(bench.backend.tail(an_id(1), 10)))
    shown = bench.backend.tail(an_id(1), 1)
    assert len(shown) == 1
    assert bench.backend.tail(an_id(1), 0) == []
    await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
    assert bench.backend.tail(an_id(1), 1) == shown


CASES: Final[tuple[Case, ...]] = (
    tells_progress_and_tracks,
    finds_settings_by_equality_of_sets,
    checks_capacity_before_its_first_await,
    refuses_with_one_failure,
    undoes_a_cancelled_spawn,
    reports_an_early_death_once,
    reports_a_later_death_as_exit,
    destroys_in_silence,
    destroys_twice_and_strangers,
    destroys_what_is_still_starting,
    finishes_a_destroy_whose_caller_left,
    recovers_what_is_known,
    reports_the_death_of_a_recovered_one_as_exit,
    does_not_recover_the_dead,
    reaps_what_nobody_owns,
    cleans_up_orphans,
    shuts_down_all,
    releases_all,
    shows_last_output,
)


async def until(holds: Callable[[], object]) -> None:
    """Wait for something that a backend does by itself."""
    async with asyncio.timeout(_UNTIL_SECONDS):
        while not holds():  # noqa: ASYNC110  # there is nothing to subscribe to
            await asyncio.sleep(0.01)


async def _spawn(bench: Bench, number: int, kind: Kind = Kind.LIVES) -> Compute:
    return await bench.backend.spawn(bench.order(an_id(number), kind), bench.heard.on_event)


async def _attempt(bench: Bench, number: int, kind: Kind = Kind.LIVES) -> KiciError | None:
    return await _error_of(_spawn(bench, number, kind))


async def _error_of(call: Coroutine[Any, Any, object]) -> KiciError | None:
    try:
        _ = await call
    except KiciError as error:
        return error
    return None


async def _together(tries: Sequence[Coroutine[Any, Any, KiciError | None]]) -> list[KiciError | None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in tries]
    return [task.result() for task in tasks]


def _with_set(order: SpawnOrder, label_set: tuple[str, ...]) -> SpawnOrder:
    return replace(order, label_set=label_set)
