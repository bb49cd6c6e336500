"""A process that submits jobs until it is killed, for `test_sqlite_store`: prints each one that was committed."""

import asyncio
import sys

from kici.domain.ids import RunId
from kici.stores.sqlite.open import open_sqlite
from kici.testing.builders import a_new_job, a_new_run

CALLERS = 8


async def main(path: str) -> None:
    store = open_sqlite(path)
    await store.migrate()

    async def submit(caller: int) -> None:
        number = 0
        while True:
            id = f"{caller}-{number}"
            await store.submit(a_new_run(id=RunId(id)), [a_new_job(id), a_new_job(f"{id}-b")])
            print(id, flush=True)
            number += 1

    async with asyncio.TaskGroup() as group:
        for caller in range(CALLERS):
            group.create_task(submit(caller))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
