"""Many containers at once, made and removed: as many at a time as were allowed, and nothing left of any."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.contract import container_benches as benches
from tests.contract.backend_benches import an_order
from tests.docker_engine import Lab, busybox_tree, lab
from tests.integration.docker_lab import BUSYBOX, a_pool, coordinator, import_images, rules, until_no_rules

from kici.backends.container.backend import SWEEP_AT_ONCE
from kici.decide.container_plan import AGENT
from kici.kit.crowd import each
from kici.testing.contracts.backend import Kind, an_id
from kici.testing.programs import until

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("docker-many"), pytest.mark.timeout(280)]

JOBS = 12
AT_ONCE = 4
ORPHANS = 60
OF_WHICH_RUN = 8


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        benches.import_kinds(running, busybox_tree(running.folder / "kinds"))
        yield running


def test_jobs_that_come_together_each_get_a_container_and_leave_none(engine: Lab) -> None:
    with coordinator(engine, "together", a_pool(engine, maxConcurrentSpawns=AT_ONCE)) as kici:
        with ThreadPoolExecutor(JOBS) as crowd:
            jobs = list(crowd.map(lambda number: kici.submit(f"echo {number}", "-l", "pool"), range(JOBS)))
        until(
            lambda: {one["status"] for one in kici.jobs(limit=JOBS).values()} == {"success"},
            seconds=120,
            what="all of them have run",
        )
        assert sorted(int(kici.output(job)) for job in jobs) == list(range(JOBS))
        kici.settle()
        until_no_rules(engine)
        until(
            lambda: "s_scaler" not in engine.run("nft", "list", "table", "bridge", "kici_agent_net"),
            seconds=60,
            what="nor of a frame",
        )


async def test_orphans_that_run_and_that_ended_are_all_removed_with_their_rules(engine: Lab, tmp_path: Path) -> None:
    """Those that run have rules, those that never did have none; somebody else's stand."""
    bench = benches.RealEngineBench(engine, tmp_path)
    bench.configure_for(OF_WHICH_RUN)
    await bench.start()
    try:
        await each(
            range(OF_WHICH_RUN),
            lambda number: bench.backend.spawn(an_order(an_id(number), Kind.LIVES), bench.heard.on_event),
            at_once=AT_ONCE,
        )
        (running, *_) = engine.containers(**{AGENT.replace("-", "_"): an_id(0)})
        for number in range(OF_WHICH_RUN, ORPHANS):
            labels = {**running["Labels"], AGENT: an_id(number)}
            body = {"Image": BUSYBOX, "Cmd": ["/bin/true"], "Labels": labels}
            engine.ask("POST", f"/containers/create?name={an_id(number)}", body)
        engine.ask("POST", "/containers/create?name=stranger", {"Image": BUSYBOX, "Cmd": ["/bin/true"]})
        assert len(bench.on_host()) == ORPHANS > 3 * SWEEP_AT_ONCE
        assert len(rules(engine)) == OF_WHICH_RUN
        await bench.restart()
        assert await bench.backend.cleanup_orphans(frozenset()) == OF_WHICH_RUN
        assert not bench.on_host()
        assert rules(engine) == set()
        assert engine.ask("GET", "/containers/stranger/json") is not None
    finally:
        await bench.close()
