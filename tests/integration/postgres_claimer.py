"""A process of ten claimers, for `test_postgres_store`: prints each job that one of them won."""

import asyncio
import sys

from kici.domain.ids import AgentId, ClassId, InstanceId
from kici.ports.store import Claim
from kici.stores.postgres.open import open_postgres

CLAIMERS = 10


async def main(url: str, name: str, classes: list[ClassId]) -> None:
    store = open_postgres(url)
    await store.ping()
    print("ready", flush=True)
    sys.stdin.readline()

    async def claimer(number: int) -> None:
        claim = Claim(agent_id=AgentId(f"{name}-{number}"), instance_id=InstanceId(f"instance-{name}"), ack_ms=10_000)
        while (job := await store.claim_oldest(classes, claim)) is not None:
            print(job.id, flush=True)

    async with asyncio.TaskGroup() as group:
        for number in range(CLAIMERS):
            group.create_task(claimer(number))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], [ClassId(int(text)) for text in sys.argv[3:]]))
