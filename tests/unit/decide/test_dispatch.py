import pytest

from kici.decide.dispatch import (
    Await,
    Drop,
    End,
    HeldJob,
    ListedJob,
    LossCause,
    LossPlan,
    LostAgent,
    OfferAgain,
    Phase,
    Recover,
    Requeue,
    Resume,
    ReturnCommand,
    Start,
    Teardown,
    reconcile,
    triage,
)
from kici.domain.ids import AgentId, Instant, JobId
from kici.domain.job import JobStatus
from kici.domain.spawn import ScaleDownReason

NOW = Instant(1_000_000)
GRACE_MS = 60_000
DEADLINE = Instant(NOW + GRACE_MS)
AGENT = AgentId("scaler-container-0000000a")
JOB = JobId("job")
HOW = "its connection closed"
LOST = f"agent {AGENT} was lost: {HOW}"
_S = JobStatus


def lost(
    *statuses: JobStatus,
    cause: LossCause = LossCause.CONNECTION_CLOSED,
    scaler_managed: bool = True,
    grace_ms: int = GRACE_MS,
) -> LossPlan:
    jobs = tuple(HeldJob(job_id=JobId(f"job-{status}"), status=status) for status in statuses)
    agent = LostAgent(agent_id=AGENT, jobs=jobs, scaler_managed=scaler_managed, grace_ms=grace_ms)
    return triage(agent, cause=cause, how=HOW, now=NOW)


def returned(phase: Phase | None, status: JobStatus | None, *, scaler_managed: bool = True) -> list[ReturnCommand]:
    listed = [] if phase is None else [ListedJob(job_id=JOB, phase=phase)]
    held = [] if status is None else [HeldJob(job_id=JOB, status=status)]
    return reconcile(AGENT, scaler_managed=scaler_managed, listed=listed, held=held)


@pytest.mark.spec("T1.14")
@pytest.mark.parametrize("cause", sorted(set(LossCause) - {LossCause.STOPPING}))
@pytest.mark.parametrize("scaler_managed", [True, False])
def test_a_job_that_was_not_started_goes_back_to_the_queue_once_its_agent_is_given_up(
    cause: LossCause, scaler_managed: bool
) -> None:
    plan = lost(_S.DISPATCHED, cause=cause, scaler_managed=scaler_managed)
    if scaler_managed and cause in (LossCause.CONNECTION_CLOSED, LossCause.HEARTBEAT_TIMEOUT, LossCause.HANDED_OVER):
        assert plan == LossPlan(may_return=True, compute=Await(deadline=DEADLINE))
        plan = lost(_S.DISPATCHED, cause=cause, grace_ms=0)
    assert plan.jobs == (Requeue(job_id=JobId("job-dispatched"), reason=f"{LOST}, before it started the job"),)
    assert not plan.may_return


@pytest.mark.spec("T2.8")
@pytest.mark.parametrize("status", [_S.RUNNING, _S.CANCELLING])
@pytest.mark.parametrize("scaler_managed", [True, False])
def test_a_started_job_waits_for_an_agent_that_may_return(status: JobStatus, scaler_managed: bool) -> None:
    plan = lost(status, scaler_managed=scaler_managed)
    assert plan.jobs == (Recover(job_id=JobId(f"job-{status}"), deadline=DEADLINE),)
    assert plan.compute == (Await(deadline=DEADLINE) if scaler_managed else None)


def test_a_job_that_waits_already_keeps_its_deadline() -> None:
    assert lost(_S.RECOVERING) == LossPlan(may_return=True, compute=Await(deadline=DEADLINE))


@pytest.mark.parametrize(
    "cause",
    [
        LossCause.COMPUTE_ENDED,
        LossCause.TOKEN_REVOKED,
        LossCause.LEFT,
        LossCause.DISMISSED,
        LossCause.GRACE_OVER,
    ],
)
def test_started_jobs_end_at_once_when_the_agent_cannot_return(cause: LossCause) -> None:
    plan = lost(_S.RUNNING, _S.RECOVERING, _S.CANCELLING, cause=cause)
    assert plan.jobs == (
        End(job_id=JobId("job-running"), status=_S.FAILED, reason=LOST),
        End(job_id=JobId("job-recovering"), status=_S.FAILED, reason=LOST),
        End(job_id=JobId("job-cancelling"), status=_S.CANCELLED, reason=LOST),
    )
    assert plan.compute == Teardown(reason=ScaleDownReason.SHUTDOWN)


def test_without_grace_a_closed_connection_ends_the_job() -> None:
    plan = lost(_S.RUNNING, grace_ms=0)
    assert plan == LossPlan(
        jobs=(End(job_id=JobId("job-running"), status=_S.FAILED, reason=LOST),),
        compute=Teardown(reason=ScaleDownReason.SHUTDOWN),
    )


@pytest.mark.spec("T1.4")
def test_an_agent_that_did_not_acknowledge_is_not_waited_for_unless_it_runs_another_job() -> None:
    silent = lost(_S.DISPATCHED, cause=LossCause.ACK_TIMEOUT)
    busy = lost(_S.DISPATCHED, _S.RUNNING, cause=LossCause.ACK_TIMEOUT)
    assert silent.compute == Teardown(reason=ScaleDownReason.SHUTDOWN)
    assert busy.compute == Await(deadline=DEADLINE)


def test_an_idle_agent_is_torn_down_at_once() -> None:
    assert lost() == LossPlan(compute=Teardown(reason=ScaleDownReason.SHUTDOWN))
    silent = lost(cause=LossCause.HEARTBEAT_TIMEOUT)
    assert silent.compute == Teardown(reason=ScaleDownReason.HEARTBEAT_TIMEOUT)


def test_an_idle_static_agent_just_leaves() -> None:
    assert lost(scaler_managed=False) == LossPlan()


def test_a_connection_that_we_close_while_stopping_is_no_loss() -> None:
    assert lost(_S.RUNNING, _S.DISPATCHED, cause=LossCause.STOPPING) == LossPlan()


@pytest.mark.parametrize(
    ("phase", "status", "expected"),
    [
        (Phase.ACKED, _S.DISPATCHED, Start(job_id=JOB)),
        (Phase.ACKED, _S.RUNNING, Start(job_id=JOB)),
        (Phase.ACKED, _S.RECOVERING, Start(job_id=JOB)),
        (Phase.RUNNING, _S.RUNNING, Resume(job_id=JOB)),
        (Phase.RUNNING, _S.RECOVERING, Resume(job_id=JOB)),
        (Phase.RUNNING, _S.DISPATCHED, Resume(job_id=JOB)),
        (Phase.FINISHED, _S.RECOVERING, Resume(job_id=JOB)),
        (Phase.RUNNING, _S.CANCELLING, Resume(job_id=JOB, cancels=True)),
        (Phase.FINISHED, _S.CANCELLING, Resume(job_id=JOB, cancels=True)),
    ],
)
def test_a_listed_job_that_the_agent_holds_goes_on(phase: Phase, status: JobStatus, expected: ReturnCommand) -> None:
    assert returned(phase, status) == [expected]


def test_a_cancelled_job_that_had_not_begun_is_dropped_and_over() -> None:
    assert returned(Phase.ACKED, _S.CANCELLING) == [
        Drop(job_id=JOB),
        End(job_id=JOB, status=_S.CANCELLED, reason="cancelled before it began"),
    ]


@pytest.mark.parametrize("phase", Phase)
def test_a_listed_job_that_the_agent_does_not_hold_is_dropped(phase: Phase) -> None:
    assert returned(phase, None) == [Drop(job_id=JOB)]


@pytest.mark.parametrize(
    ("status", "ends"),
    [(_S.RUNNING, _S.FAILED), (_S.RECOVERING, _S.FAILED), (_S.CANCELLING, _S.CANCELLED)],
)
def test_a_started_job_that_the_agent_comes_back_without_is_over(status: JobStatus, ends: JobStatus) -> None:
    reason = f"agent {AGENT} came back without the job"
    assert returned(None, status) == [End(job_id=JOB, status=ends, reason=reason)]


def test_an_offer_that_the_agent_comes_back_without_returns_to_the_queue() -> None:
    reason = f"agent {AGENT} came back without the job"
    assert returned(None, _S.DISPATCHED, scaler_managed=False) == [Requeue(job_id=JOB, reason=reason)]


@pytest.mark.spec("D9")
def test_an_offer_that_a_made_agent_comes_back_without_is_told_again() -> None:
    assert returned(None, _S.DISPATCHED) == [OfferAgain(job_id=JOB)]
