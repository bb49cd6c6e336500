"""A network that is cut in silence between a coordinator and PostgreSQL: calls end soon, and so does the program."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kici.stores.postgres.connection import UNANSWERED_SECONDS
from kici.stores.postgres.engine import ANSWER_MARGIN_SECONDS
from kici.stores.postgres.open import STATEMENT_TIMEOUT_SECONDS
from kici.testing.network_lab import NETWORK, NetworkLab
from kici.testing.postgres_cluster import Cluster

pytestmark = [pytest.mark.engine("postgres"), pytest.mark.engine("namespaces")]
ROOT = Path(__file__).parents[2]
CALLER = """
import asyncio, sys, time
from kici.domain.errors import StoreDown
from kici.stores.postgres.open import open_postgres

async def main():
    store = open_postgres(sys.argv[1])
    await store.ping()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        await store.ping()
    except StoreDown:
        print("down", time.monotonic() - began, flush=True)
    await store.close()
    print("closed", time.monotonic() - began, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def lab() -> Iterator[NetworkLab]:
    with NetworkLab(("caller", "database")) as lab:
        yield lab


@pytest.fixture
def postgres(lab: NetworkLab) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="kici-cut-"))
    folder.chmod(0o711)
    cluster = Cluster(folder, address=lab.address("database"), port=5432, within=lab.within("database"))
    try:
        cluster.make({"listen_addresses": "*", "fsync": "off"})
        cluster.lets_in(NETWORK)
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_call_over_a_network_that_was_cut_in_silence_ends_soon(lab: NetworkLab, postgres: Cluster) -> None:
    caller = await asyncio.create_subprocess_exec(
        *lab.within("caller"),
        *(sys.executable, "-c", CALLER, postgres.url),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert caller.stdin is not None
    assert caller.stdout is not None
    try:
        assert await caller.stdout.readline() == b"ready\n"
        lab.cut(("caller", "database"))
        caller.stdin.write(b"\n")
        told: dict[bytes, float] = {}
        while line := await caller.stdout.readline():
            what, seconds = line.split()
            told[what] = float(seconds)
    finally:
        if caller.returncode is None:
            caller.kill()
        await caller.wait()
    waits_for_the_driver = STATEMENT_TIMEOUT_SECONDS + ANSWER_MARGIN_SECONDS
    assert told[b"down"] < (UNANSWERED_SECONDS + waits_for_the_driver) / 2, "nobody looked after the peer"
    assert told[b"closed"] < waits_for_the_driver
