"""Failed launches: how long a scaler is left alone, and what diagnosis tells of the last minutes."""

from dataclasses import replace

import pytest

from kici.apps.surface import surface_of
from kici.decide.backoff import BackoffSettings
from kici.domain import knobs
from kici.domain.ids import AgentId, Instant, JobId
from kici.domain.job import JobStatus
from kici.domain.verdict import SpawnFailed
from kici.observe.events import Event
from kici.ports.live_vms import BridgeState
from kici.services.launch_failures import JOBS_MAX, LaunchFailures
from kici.testing.builders import SCALER, a_spawn
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import FakeBackend, SpawnScript, fails, refuses
from kici.testing.sim_clock import SIM_START
from kici.web.surface import Check, CheckStatus

BACKOFF = knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name
LIMIT = knobs.SCALER_PROVISION_MAX_CONSECUTIVE_FAILURES.name


class HandClock:
    """Time as a test sets it; the wall clock may jump."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.jump_ms = 0

    def now(self) -> Instant:
        return Instant(SIM_START + round(self.seconds * 1000) + self.jump_ms)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


class Ledger:
    """The service, and what it counted."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.counted: list[tuple[str, bool]] = []
        self.failures = LaunchFailures(
            clock=self.clock,
            settings=lambda: BackoffSettings(base_ms=1_000, max_ms=4_000),
            on_failure=lambda backend, is_bound: self.counted.append((backend, is_bound)),
        )

    def fails(self, *, bound: bool = True, detail: str = "it did not work", at: int = 0) -> None:
        spawn = a_spawn(bound_job_id=JobId("job-1") if bound else None)
        self.failures.seen(spawn, detail, Instant(SIM_START + at))


async def diagnosis(bench: Bench) -> Check:
    (check,) = await surface_of(bench.coordinator, version="0", stop=lambda keep: None).scalers.diagnose(None)
    return check


@pytest.mark.spec("scaler 16.5.1")
def test_of_many_failures_the_latest_are_kept() -> None:
    ledger = Ledger()
    for number in range(300):
        ledger.fails(detail=f"failure {number}", at=number)
    recent = ledger.failures.recent(SCALER, Instant(SIM_START + 300))
    assert recent.bound == 256
    assert recent.last is not None
    assert recent.last.detail == "failure 299"
    assert len(ledger.counted) == 300


@pytest.mark.spec("scaler 16.5.3")
def test_a_failure_of_more_than_five_minutes_ago_is_past() -> None:
    ledger = Ledger()
    ledger.fails()
    assert ledger.failures.recent(SCALER, Instant(SIM_START + 300_000)).bound == 1
    assert ledger.failures.recent(SCALER, Instant(SIM_START + 301_000)).last is None


def test_failures_are_counted_by_backend_and_by_whether_a_job_waited() -> None:
    ledger = Ledger()
    ledger.fails()
    ledger.fails(bound=False)
    assert ledger.counted == [("bare-metal", True), ("bare-metal", False)]


def test_the_window_grows_with_each_agent_and_a_registration_ends_it() -> None:
    ledger = Ledger()
    for number, seconds in enumerate((1, 2, 4, 4)):
        ledger.failures.defer(SCALER, AgentId(f"agent-{number}"), "it did not work")
        refusal = ledger.failures.refusal(SCALER)
        assert refusal is not None
        assert refusal.until - ledger.clock.now() == seconds * 1000
    ledger.failures.clear(SCALER)
    assert ledger.failures.refusal(SCALER) is None


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_a_jump_of_the_wall_clock_moves_no_window(jump_ms: int) -> None:
    ledger = Ledger()
    ledger.failures.defer(SCALER, AgentId("agent"), "it did not work")
    ledger.clock.seconds += 0.4
    ledger.clock.jump_ms = jump_ms
    refusal = ledger.failures.refusal(SCALER)
    assert refusal is not None
    assert refusal.until - ledger.clock.now() == 600
    ledger.clock.seconds += 0.6
    assert ledger.failures.refusal(SCALER) is None


def test_of_two_reasons_to_wait_the_longer_one_counts_and_a_registration_ends_both() -> None:
    ledger = Ledger()
    for number in range(2):
        ledger.failures.stumbled(SCALER, f"bad luck {number}", started_at=ledger.clock.seconds + number)
        ledger.clock.seconds += 2
    assert ledger.failures.refusal(SCALER) is None
    ledger.failures.stumbled(SCALER, "bad luck again", started_at=ledger.clock.seconds)
    ledger.failures.defer(SCALER, AgentId("agent"), "refused")
    refusal = ledger.failures.refusal(SCALER)
    assert refusal is not None
    assert (refusal.last_error, refusal.until - ledger.clock.now()) == ("bad luck again", 2_000)
    ledger.failures.clear(SCALER)
    assert ledger.failures.refusal(SCALER) is None


def test_an_agent_counts_once_however_many_report_it() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.failures.defer(SCALER, AgentId("agent"), "it did not work")
    refusal = ledger.failures.refusal(SCALER)
    assert refusal is not None
    assert refusal.failures == 1


def test_the_last_failure_of_each_job_is_remembered_within_a_bound() -> None:
    ledger = Ledger()
    for number in range(JOBS_MAX + 5):
        ledger.failures.of_job(a_spawn(bound_job_id=JobId(f"job-{number}")), SpawnFailed(text=f"{number}"))
    assert ledger.failures.last_of_job(JobId("job-0")) is None
    last = ledger.failures.last_of_job(JobId(f"job-{JOBS_MAX}"))
    assert last is not None
    assert last.text == f"{JOBS_MAX}"
    ledger.failures.job_over(JobId(f"job-{JOBS_MAX}"))
    assert ledger.failures.last_of_job(JobId(f"job-{JOBS_MAX}")) is None


# --- on the bench


@pytest.mark.spec("scaler 16.5.5")
@benched(a_scaler("local", max_agents=1), settings={BACKOFF: 60_000})
async def test_a_machine_that_ends_before_its_agent_registered_is_a_failed_launch(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(dies_after_seconds=2)])
    job = await bench.submits("linux")
    await bench.passes(5)
    await bench.is_clean()
    (failure,) = bench.told(Event.SPAWN_FAILED)
    assert "before it registered" in failure["error"]
    assert "before it registered" in ((await bench.job(job)).last_provisioning_error or "")
    await bench.passes(40)
    assert len(bench.orders) == 1
    await bench.machine(1)


@pytest.mark.spec("scaler 9.6.6")
@benched(a_scaler("local", max_agents=1))
async def test_launches_that_fail_by_chance_are_tried_again_at_once_and_then_ever_less_often(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("the registry hung up")] * 100)
    await bench.submits("linux", queue_timeout_ms=0)
    await bench.passes(0.9)
    assert len(bench.told(Event.SPAWN_FAILED)) == 2
    await bench.passes(60)
    assert len(bench.told(Event.SPAWN_FAILED)) == 7  # after pauses of 1, 2, 4, 8 and 16 seconds
    await bench.passes(300)
    assert len(bench.told(Event.SPAWN_FAILED)) == 17  # every 30 seconds


@benched(a_scaler("local", max_agents=8))
async def test_launches_that_fail_together_are_one_stroke_of_bad_luck(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("the registry hung up", after_seconds=1)] * 4)
    for _ in range(4):
        await bench.submits("linux", queue_timeout_ms=0)
    await bench.passes(1.5)
    assert len(bench.told(Event.SPAWN_FAILED)) == 4
    assert len(bench.told(Event.SPAWN_ADMITTED)) == 8


@pytest.mark.spec("scaler 16.5.6")
@benched(a_scaler())
async def test_a_machine_that_ends_after_its_agent_registered_is_none(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    bench.dies(agent)
    assert (await bench.ended(job)).status is JobStatus.FAILED
    assert not bench.told(Event.SPAWN_FAILED)
    assert (await diagnosis(bench)).status is CheckStatus.PASS
    await bench.submits("linux")
    await bench.machine(1)


@pytest.mark.spec("scaler 16.5.7")
@benched(a_scaler(), settings={BACKOFF: 60_000})
async def test_a_failure_that_is_told_and_raised_counts_once(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses()])
    await bench.submits("linux")
    await bench.passes(5)
    assert len(bench.told(Event.SPAWN_FAILED)) == 1
    assert bench.metric("kici_orch_scaler_spawn_failures_total", backend="bare-metal", bound="true") == 1


@benched(a_scaler(), settings={BACKOFF: 60_000})
async def test_an_event_that_comes_twice_ends_the_spawn_once(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(dies_after_seconds=2, repeats_events=True)])
    await bench.submits("linux")
    await bench.passes(10)
    assert len(bench.told(Event.SPAWN_FAILED)) == 1
    assert len(bench.told(Event.SPAWN_DESTROYED)) == 1
    await bench.is_clean()


@pytest.mark.spec("T9.6", "scaler 16.5.2")
@benched(a_scaler(), settings={BACKOFF: 900_000})
async def test_a_failed_spawn_for_a_job_fails_the_diagnosis_for_five_minutes_and_names_the_reason(
    bench: Bench,
) -> None:
    assert (await diagnosis(bench)).status is CheckStatus.PASS
    bench.backends["local"].scripts = iter([refuses("no such program: kici-agent")])
    await bench.submits("linux")
    await bench.passes(5)
    check = await diagnosis(bench)
    assert check.status is CheckStatus.FAIL
    assert "no such program: kici-agent" in check.message
    await bench.passes(280)
    assert (await diagnosis(bench)).status is CheckStatus.FAIL
    await bench.passes(30)
    assert (await diagnosis(bench)).status is CheckStatus.PASS


@pytest.mark.spec("scaler 16.5.8")
@benched(a_scaler(), settings={BACKOFF: 900_000})
async def test_a_long_reason_is_cut_in_the_diagnosis(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses("x" * 500)])
    await bench.submits("linux")
    await bench.passes(5)
    message = (await diagnosis(bench)).message
    assert message.count("x") in range(110, 121)
    assert message.endswith("…")


@benched(a_scaler(), settings={BACKOFF: 60_000})
async def test_the_jobs_people_read_of_a_failed_spawn_in_its_output(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("the disk is full")])
    job = await bench.submits("linux")
    await bench.passes(2)
    text = b"".join(chunk.data for chunk in await bench.store.read_log(job.id, after=0, bytes_max=9999))
    assert b"the disk is full" in text


@benched(a_scaler("local", max_agents=1), settings={BACKOFF: 1_000, LIMIT: 3})
async def test_a_scaler_that_goes_on_failing_is_worth_a_warning(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses("no such program")] * 4)
    await bench.submits("linux", queue_timeout_ms=0)
    await bench.until(lambda: len(bench.told(Event.SPAWN_FAILED)) == 2, within=60)
    assert bench.told(Event.LAUNCHES_FAIL) == []
    await bench.until(lambda: len(bench.told(Event.SPAWN_FAILED)) == 4, within=60)
    assert [told["failures"] for told in bench.told(Event.LAUNCHES_FAIL)] == [3, 4]


@benched(a_scaler(), settings={BACKOFF: 900_000})
async def test_a_scaler_that_retires_still_says_what_failed(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(), refuses("no such program")])
    for _ in range(2):
        await bench.submits("linux", queue_timeout_ms=0)
    await bench.passes(5)
    bench.file = replace(bench._config(), scalers=())
    await bench.coordinator.reload_scalers()
    check = await diagnosis(bench)
    assert check.status is CheckStatus.FAIL
    assert check.message.startswith("retiring (1 agent(s) left) - 1 spawns for jobs")
    await bench.passes(310)
    (row, *_) = await surface_of(bench.coordinator, version="0", stop=lambda keep: None).scalers.diagnose(None)
    assert row.status is CheckStatus.PASS


@benched()
async def test_without_scalers_there_is_one_row_that_passes(bench: Bench) -> None:
    assert await diagnosis(bench) == Check(name="scaler", status=CheckStatus.PASS, message="no scaler is configured")


class Bridged(FakeBackend):
    """A backend of microVMs."""

    state = BridgeState(name="kici-br0", faults=(), heals=True)

    async def bridge_state(self) -> BridgeState:
        return self.state


@pytest.mark.parametrize(
    ("faults", "heals", "status", "message"),
    [
        ((), True, CheckStatus.PASS, "healthy"),
        (("it is down",), True, CheckStatus.WARN, "it is down (mended before the next machine)"),
        (("it is down", "no rules"), False, CheckStatus.FAIL, "it is down; no rules"),
    ],
)
@benched(a_scaler("a", ("a",)), a_scaler("b", ("b",)))
async def test_the_bridge_of_microvms_has_a_row_of_its_own(
    bench: Bench, faults: tuple[str, ...], heals: bool, status: CheckStatus, message: str
) -> None:
    for backend in bench.backends.values():
        backend.__class__ = Bridged
        backend.state = BridgeState(name="kici-br0", faults=faults, heals=heals)  # type: ignore[attr-defined]
    checks = await surface_of(bench.coordinator, version="0", stop=lambda keep: None).scalers.diagnose(None)
    assert [check for check in checks if check.name.startswith("firecracker:")] == [
        Check(name="firecracker:kici-br0", status=status, message=message)
    ]
