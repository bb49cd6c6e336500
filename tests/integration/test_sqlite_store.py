"""The embedded store on a real disk: what a killed process had been promised is there, and nothing is half there."""

import asyncio
import sys
from pathlib import Path

import pytest

from kici.ports.store import JobFilter
from kici.stores.sqlite.open import open_sqlite
from kici.testing.contracts.store_rules import check_rules

ROOT = Path(__file__).parents[2]
PROMISED = 300


@pytest.mark.parametrize("time", range(3))
async def test_keeps_what_it_promised_when_it_is_killed(tmp_path: Path, time: int) -> None:
    path = str(tmp_path / "kici.db")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.integration.sqlite_writer", path),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    promised = [(await process.stdout.readline()).decode().strip() for _ in range(PROMISED + 17 * time)]
    process.kill()
    rest = await process.stdout.read()
    await process.wait()
    promised += rest.decode().split("\n")[:-1]
    store = open_sqlite(path)
    assert await store.migrate() == []
    jobs = {job.id for job in await store.jobs(JobFilter(limit=100_000))}
    assert jobs.issuperset(promised)
    runs = await store.runs(before=None, limit=100_000)
    assert len(jobs) == 2 * len(runs), "a unit was cut in half"
    assert len(runs) < len(promised) + 200
    await check_rules(store)
    await store.close()
