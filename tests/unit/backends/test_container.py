"""What containers promise beyond the contract of backends, on a fake engine."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import IO, Any

import pytest
from tests.contract.container_benches import AnArchive, FakeEngineBench

from kici.backends.container.runtime import Archive
from kici.decide.container_plan import AGENT
from kici.domain.errors import DeterministicRefusal, JobRefused, KiciError, Retryable
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import JobContainer, SpawnOrder
from kici.testing.contracts.backend import Kind, an_id, until
from kici.testing.fake_engine import ImageScript, InRegistry
from kici.testing.virtual_time import virtual


async def a_bench(bench: FakeEngineBench | None = None) -> FakeEngineBench:
    bench = bench or FakeEngineBench()
    await bench.start()
    return bench


def in_image(bench: FakeEngineBench, number: int, image: str, password: str | None = None) -> SpawnOrder:
    container = JobContainer(image=image, username="ci", password=password, registry="r.example")
    return replace(bench.order(an_id(number), Kind.LIVES), container=container)


async def error_of(call: Coroutine[Any, Any, object]) -> KiciError:
    try:
        _ = await call
    except KiciError as error:
        return error
    raise AssertionError("it was to fail")


@pytest.mark.spec("scaler 27.4.5")
@virtual
async def test_agents_that_start_together_fill_one_volume_once_and_pull_one_image_once() -> None:
    bench = await a_bench()
    bench.room.registry["r.example/tool:1"] = InRegistry(seconds=1.0)
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(bench.backend.spawn(in_image(bench, number, "r.example/tool:1"), bench.heard.on_event))
    assert bench.room.pulls == ["r.example/tool:1"]
    assert len(bench.room.archives_put) == 1
    await bench.close()


@pytest.mark.spec("scaler 27.4.6")
@virtual
async def test_a_fill_that_dies_half_way_is_done_again_and_nobody_mounted_the_half() -> None:
    bench = await a_bench()
    bench.room.put_fails.append("the engine lost its disk")
    error = await error_of(bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event))
    assert type(error) is Retryable
    assert not bench.room.containers
    _ = await bench.backend.spawn(bench.order(an_id(2), Kind.LIVES), bench.heard.on_event)
    assert len(bench.room.archives_put) == 2
    await bench.close()


class Replaced(AnArchive):
    """Of an installation that was upgraded since it was looked at."""

    async def open(self) -> IO[bytes]:
        raise Retryable("this installation changed while its runtime was being made")


@virtual
async def test_an_installation_that_changes_before_its_runtime_is_made_is_looked_at_again() -> None:
    bench = FakeEngineBench()
    found: list[Archive] = [Replaced("v1"), AnArchive("v2")]

    async def find() -> Archive:
        return found.pop(0)

    bench.find_archive = find
    bench = await a_bench(bench)
    assert (
        type(await error_of(bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event))) is Retryable
    )
    _ = await bench.backend.spawn(bench.order(an_id(2), Kind.LIVES), bench.heard.on_event)
    assert bench.room.volume_files.keys() == {"kici-runtime-v2"}
    await bench.close()


@pytest.mark.spec("scaler 27.4.7")
@virtual
async def test_a_volume_that_another_process_completed_is_used_and_its_lock_given_back() -> None:
    first = await a_bench()
    _ = await first.backend.spawn(first.order(an_id(1), Kind.LIVES), first.heard.on_event)
    second = await a_bench(FakeEngineBench(first.room, first.packets))
    _ = await second.backend.spawn(second.order(an_id(2), Kind.LIVES), second.heard.on_event)
    assert len(first.room.archives_put) == 1
    assert {one.spec.name for one in first.room.containers.values()} == {an_id(1), an_id(2)}
    await first.close()
    await second.close()


@virtual
async def test_a_lock_that_its_owner_left_is_broken() -> None:
    bench = await a_bench()
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    spec = next(iter(bench.room.containers.values())).spec
    volume = spec.binds[-1].split(":")[0]
    left = bench.room.add(replace(spec, name=f"{volume}-fill", labels={}), ImageScript())
    later = await a_bench(FakeEngineBench(bench.room, bench.packets))
    _ = await later.backend.spawn(later.order(an_id(2), Kind.LIVES), later.heard.on_event)
    assert left.id not in bench.room.containers
    await bench.close()
    await later.close()


@virtual
async def test_a_refused_image_is_its_jobs_fault_and_a_pools_is_the_scalers() -> None:
    bench = await a_bench()
    bench.room.registry["r.example/private:1"] = InRegistry(log_in=("ci", "right"))
    wrong = await error_of(
        bench.backend.spawn(in_image(bench, 1, "r.example/private:1", "wrong-9"), bench.heard.on_event)
    )
    assert type(wrong) is JobRefused
    assert "wrong-9" not in str(wrong)
    assert not any("wrong-9" in event.detail for event in bench.heard.events)
    del bench.room.images["ci/lives:latest"]
    pool = await error_of(bench.backend.spawn(bench.order(an_id(2), Kind.LIVES), bench.heard.on_event))
    assert type(pool) is DeterministicRefusal
    _ = await bench.backend.spawn(in_image(bench, 3, "r.example/private:1", "right"), bench.heard.on_event)
    await bench.close()


@virtual
async def test_a_registry_that_is_away_for_a_moment_is_asked_again() -> None:
    bench = await a_bench()
    bench.room.registry["r.example/tool:1"] = InRegistry(failures=2)
    _ = await bench.backend.spawn(in_image(bench, 1, "r.example/tool:1"), bench.heard.on_event)
    assert len(bench.room.pulls) == 3
    await bench.close()


@pytest.mark.spec("scaler 29.10.7")
@virtual
async def test_an_early_death_is_told_with_the_last_that_was_printed() -> None:
    bench = await a_bench()
    bench.room.images["ci/dies:latest"] = ImageScript(
        output=tuple(f"line {number}" for number in range(80)), lives_seconds=0.1, exit_code=3, oom=True
    )
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.DIES), bench.heard.on_event)
    await until(lambda: bench.heard.failures(an_id(1)))
    detail = bench.heard.failures(an_id(1))[0].detail
    assert "more memory than it may" in detail
    assert detail.split("--- captured output ---\n")[1].splitlines() == [f"line {number}" for number in range(30, 80)]
    await bench.close()


@virtual
async def test_an_engine_that_is_away_refuses_new_agents_and_the_end_of_old_ones_is_told_when_it_is_back() -> None:
    bench = await a_bench()
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    bench.backend.mark_registered(an_id(1))
    bench.room.stop_engine()
    refused = await error_of(bench.backend.spawn(bench.order(an_id(2), Kind.LIVES), bench.heard.on_event))
    assert type(refused) is DeterministicRefusal
    assert isinstance(await error_of(bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)), Retryable)
    bench.room.start_engine()
    await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
    assert bench.backend.active_count() == 0
    await bench.close()


@virtual
async def test_a_death_while_the_engine_was_away_is_found_when_it_is_back() -> None:
    bench = await a_bench()
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    bench.backend.mark_registered(an_id(1))
    bench.room.stop_engine()
    await asyncio.sleep(60)
    assert not bench.heard.exits
    bench.room.start_engine()
    await until(lambda: bench.heard.exits)
    assert bench.heard.exits[0][0] == an_id(1)
    await bench.close()


@virtual
async def test_a_restart_while_the_engine_is_away_gives_nobody_up() -> None:
    bench = await a_bench()
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    bench.room.is_down = True
    await bench.restart()
    assert [one.agent_id for one in await bench.backend.recover(frozenset({an_id(1)}))] == [an_id(1)]
    bench.room.start_engine()
    await asyncio.sleep(60)
    assert not bench.heard.exits
    await bench.close()


@pytest.mark.spec("scaler 29.10.6")
@virtual
async def test_rules_of_a_dead_container_go_with_the_sweep_and_a_neighbours_stand() -> None:
    bench = await a_bench()
    for number in (1, 2):
        _ = await bench.backend.spawn(bench.order(an_id(number), Kind.LIVES), bench.heard.on_event)
    assert len(bench.packets.addresses()) == 2
    await bench.restart()
    gone = bench.room.find(an_id(1))
    assert gone is not None
    bench.room.remove(gone)
    assert await bench.backend.recover(frozenset({an_id(2)}))
    assert await bench.backend.cleanup_orphans(frozenset()) == 0
    assert len(bench.packets.addresses()) == 1
    await bench.close()


@virtual
async def test_a_full_disk_of_the_engine_is_cleared_first_and_then_refuses_new_agents_until_there_is_room() -> None:
    bench = await a_bench()
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    left = next(iter(bench.room.containers.values()))
    ended = bench.room.add(replace(left.spec, name="left", labels={**left.spec.labels, AGENT: an_id(9)}), ImageScript())
    stranger = bench.room.add(replace(left.spec, name="stranger", labels={}), ImageScript())
    for name in ("kici-runtime-old", "kici-runtime-used", "somebodys"):
        bench.room.volume_files[name] = {}
        bench.room.volume_labels[name] = {"kici-managed": "true"}
    _ = bench.room.add(
        replace(left.spec, name="user", labels={}, binds=("kici-runtime-used:/opt/kici",)), ImageScript()
    )
    bench.free_bytes = 2**20
    refused = await error_of(bench.backend.spawn(bench.order(an_id(2), Kind.LIVES), bench.heard.on_event))
    assert type(refused) is DeterministicRefusal
    assert "only 1 MiB are free for the container engine in /fake" in str(refused)
    assert "2 leftovers were removed" in str(refused)
    assert ended.id not in bench.room.containers
    assert {left.id, stranger.id} <= bench.room.containers.keys()
    assert bench.room.volume_files.keys() == {"kici-runtime-v1", "kici-runtime-used", "somebodys"}
    bench.free_bytes = 2**40
    _ = await bench.backend.spawn(bench.order(an_id(3), Kind.LIVES), bench.heard.on_event)
    await bench.close()
