"""A coordinator that ends by SIGKILL at a given step of making, or ending, the guest that a snapshot is made of.

python -m tests.microvm.template_walker FOLDER NETWORK STEP PHASE
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.microvm.lab import Namespace
from tests.microvm.snapshot_bench import SnapshotBench

from kici.domain.ids import AgentId


async def walk(bench: SnapshotBench, step: str, phase: str) -> None:
    def on_step(_: AgentId, at: str, how: str) -> None:
        if (at, how) == (step, phase):
            os.kill(os.getpid(), signal.SIGKILL)

    bench.on_step = on_step
    await bench.start()
    sys.exit("the step was never reached")


if __name__ == "__main__":
    netns = Namespace("given")
    netns.name = sys.argv[2]
    asyncio.run(walk(SnapshotBench(Path(sys.argv[1]), netns), sys.argv[3], sys.argv[4]))
