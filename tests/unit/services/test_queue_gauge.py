"""The depth of the queue as it is scraped, and the line in the log when it stays deep."""

import pytest

from kici.observe.events import Event
from kici.services.queue_gauge import DEEP_JOBS, QueueGauge
from kici.testing.coordinator_bench import Bench, a_request, benched

DEPTH = "kici_orch_dispatch_queue_depth"


@benched()
async def test_the_depth_is_shown_within_seconds(bench: Bench) -> None:
    for _ in range(3):
        await bench.submits("linux")
    await bench.passes(6)
    assert bench.metric(DEPTH, status="queued") == 3


@benched()
async def test_an_outage_leaves_the_last_depth_on_show(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.passes(6)
    bench.faults.is_down = True
    await bench.passes(20)
    assert bench.metric(DEPTH, status="queued") == 1
    bench.faults.is_down = False


@pytest.mark.parametrize(("jobs", "lines"), [(DEEP_JOBS, 1), (DEEP_JOBS - 1, 0)])
@benched()
async def test_a_queue_that_stays_deep_is_told_once(bench: Bench, jobs: int, lines: int) -> None:
    await bench.submits_run({f"job-{number}": a_request(f"job-{number}") for number in range(jobs)})
    await bench.passes(4)
    assert not bench.told(Event.QUEUE_DEEP)
    await bench.passes(60)
    assert len(bench.told(Event.QUEUE_DEEP)) == lines


@pytest.mark.parametrize(("deep_jobs", "lines"), [(2, 1), (4, 0), (0, 0)])
@benched()
async def test_how_deep_is_deep_is_for_the_operator_to_say(bench: Bench, deep_jobs: int, lines: int) -> None:
    for _ in range(3):
        await bench.submits("nobody")
    gauge = QueueGauge(store=bench.store, clock=bench.clock, gauges=bench.coordinator.metrics, deep_jobs=deep_jobs)
    for _ in range(3):
        await gauge.tick()
    assert len(bench.told(Event.QUEUE_DEEP)) == lines
