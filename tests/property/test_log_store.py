"""Whatever the store, the links and the agent do: every byte is stored once, in order."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, JobId
from kici.domain.job import JobStatus, Outcome
from kici.domain.logs import NewChunk, Stream
from kici.ports.store import Claim
from kici.services.log_store import LogGap, LogStore
from kici.testing.builders import AGENT, HERE, a_new_job, a_new_run
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import run_virtual

JOBS = [JobId(f"job-{number}") for number in range(3)]
STREAMS = (Stream.STDOUT, Stream.STDERR)


class Agent:
    """Sends one stream of a job in chunks of any size, goes back at random, and moves between coordinators."""

    def __init__(self, job_id: JobId, stream: Stream, output: bytes, entropy: SeededEntropy) -> None:
        self.job_id = job_id
        self.stream = stream
        self.output = output
        self.entropy = entropy.fork(f"{job_id}/{stream.name}")
        self.acknowledged = 0

    async def send_all(self, coordinators: list[LogStore]) -> None:
        here = coordinators[0]
        while self.acknowledged < len(self.output):
            if self.entropy.chance(0.1):
                here = self.entropy.choice(coordinators)
                await self.patiently_resume(here)
            start = max(0, self.acknowledged - round(self.entropy.uniform(0, 20)))
            data = self.output[start : start + round(self.entropy.uniform(1, 60))]
            try:
                end = await here.append(NewChunk(job_id=self.job_id, stream=self.stream, offset=start, data=data))
            except StoreDown:
                continue
            except LogGap as gap:
                self.acknowledged = gap.expected
                continue
            assert end >= start + len(data)
            self.acknowledged = max(self.acknowledged, end)

    async def patiently_resume(self, here: LogStore) -> None:
        while True:
            try:
                self.acknowledged = (await here.resume(self.job_id))[self.stream]
            except StoreDown:
                continue
            return


async def one_life(seed: int, chance: float) -> None:
    entropy = SeededEntropy(seed)
    async with a_store() as store:
        claims = [a_new_job(job_id, claimed_by=AGENT) for job_id in JOBS]
        await store.submit(a_new_run(), claims, claim=Claim(agent_id=AGENT, instance_id=HERE, ack_ms=10**9))
        coordinators = [
            LogStore(
                store=faulty(
                    store,
                    StoreFaults(
                        entropy=entropy.fork(f"store-{number}"),
                        chance_before=chance,
                        chance_after=chance,
                        delay_seconds=(0.001, 0.1),
                    ),
                ),
                entropy=entropy.fork(f"notes-{number}"),
            )
            for number in range(2)
        ]
        agents = [
            Agent(job_id, stream, entropy.bytes(round(entropy.uniform(0, 600))), entropy)
            for job_id in JOBS
            for stream in STREAMS
        ]
        notes = [f"note {number}" for number in range(5)]
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.send_all(coordinators))
            kept = [
                group.create_task(coordinators[number % 2].note(JOBS[0], note)) for number, note in enumerate(notes)
            ]

        reader = LogStore(store=store, entropy=entropy)
        for job_id in JOBS:
            await store.start_job(job_id, AgentId(AGENT))
            await store.finish_job(
                job_id, Outcome(status=JobStatus.SUCCESS), from_statuses=frozenset({JobStatus.RUNNING})
            )
            read: dict[Stream, bytes] = dict.fromkeys(Stream, b"")
            async for chunk in reader.follow(job_id):
                if chunk.stream is not Stream.SYSTEM:
                    assert chunk.offset == len(read[chunk.stream]), "a gap or an overlap"
                read[chunk.stream] += chunk.data
            for agent in agents:
                if agent.job_id == job_id:
                    assert read[agent.stream] == agent.output
            if job_id == JOBS[0]:
                lines = read[Stream.SYSTEM].decode().splitlines()
                promised = {note for note, task in zip(notes, kept, strict=True) if task.result()}
                assert promised <= set(lines) <= set(notes)
                assert len(lines) == len(set(lines))


@given(seed=st.integers(0, 10**9), chance=st.sampled_from([0.0, 0.02, 0.2]))
@settings(max_examples=40, deadline=None)
def test_every_byte_is_stored_once_and_in_order(seed: int, chance: float) -> None:
    run_virtual(lambda: one_life(seed, chance))


@pytest.mark.parametrize("seed", range(5))
def test_pinned_seeds(seed: int) -> None:
    run_virtual(lambda: one_life(seed, 0.1))
