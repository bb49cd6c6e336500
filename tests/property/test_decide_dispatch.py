"""A job starts once, whatever agents and connections do."""

from hypothesis import given
from hypothesis import strategies as st

from kici.decide.dispatch import (
    End,
    HeldJob,
    ListedJob,
    LossCause,
    LostAgent,
    OfferAgain,
    Phase,
    Recover,
    Requeue,
    Resume,
    Start,
    reconcile,
    triage,
)
from kici.domain.ids import AgentId, Instant, JobId
from kici.domain.job import HELD_BY_AGENT, JOB_MOVES, STARTED, JobStatus

AGENT = AgentId("agent")
held_jobs = st.lists(
    st.builds(
        HeldJob,
        job_id=st.sampled_from([JobId(f"job-{number}") for number in range(5)]),
        status=st.sampled_from(sorted(HELD_BY_AGENT)),
    ),
    unique_by=lambda job: job.job_id,
)
listed_jobs = st.lists(
    st.builds(
        ListedJob,
        job_id=st.sampled_from([JobId(f"job-{number}") for number in range(5)]),
        phase=st.sampled_from(Phase),
    )
)
losses = st.builds(
    LostAgent,
    agent_id=st.just(AGENT),
    jobs=held_jobs.map(tuple),
    scaler_managed=st.booleans(),
    grace_ms=st.sampled_from((0, 60_000)),
)


@given(losses, st.sampled_from(LossCause))
def test_a_lost_agents_started_jobs_never_return_to_the_queue_and_others_never_fail(
    agent: LostAgent, cause: LossCause
) -> None:
    plan = triage(agent, cause=cause, how="gone", now=Instant(0))
    statuses = {job.job_id: job.status for job in agent.jobs}
    for command in plan.jobs:
        status = statuses[command.job_id]
        match command:
            case Requeue():
                assert status is JobStatus.DISPATCHED
            case Recover(deadline=deadline):
                assert status in STARTED
                assert deadline > 0
            case End(status=end):
                assert status in STARTED
                assert end in JOB_MOVES[status]
    if not agent.scaler_managed or cause is LossCause.STOPPING:
        assert plan.compute is None
    else:
        assert plan.compute is not None


@given(listed_jobs, held_jobs, st.booleans())
def test_every_job_that_is_listed_or_held_is_decided_and_legally(
    listed: list[ListedJob], held: list[HeldJob], scaler_managed: bool
) -> None:
    commands = reconcile(AGENT, scaler_managed=scaler_managed, listed=listed, held=held)
    statuses = {job.job_id: job.status for job in held}
    assert {command.job_id for command in commands} == {job.job_id for job in listed} | statuses.keys()
    for command in commands:
        status = statuses.get(command.job_id)
        match command:
            case Start() | Resume():
                assert status in HELD_BY_AGENT
                assert command.job_id in {job.job_id for job in listed}
            case Requeue() | OfferAgain():
                assert status is JobStatus.DISPATCHED
            case End(status=end):
                assert status is not None
                assert end in JOB_MOVES[status]
            case _:
                assert status is None or status is JobStatus.CANCELLING
