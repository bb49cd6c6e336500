"""A coordinator's half of a host that ends by SIGKILL at a given step.

    python -m tests.microvm.walker FOLDER NETWORK STEP PHASE VMM

`PHASE` is one that a plan tells of, or so many milliseconds after the step began.

It makes one machine that stays (number 1), says so, then makes number 2 and, if it gets that far, destroys it.
"""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

from tests.microvm.lab import Namespace
from tests.microvm.qemu_bench import QemuBench
from tests.microvm.real_bench import RealMicroVmBench

from kici.domain.ids import AgentId
from kici.domain.spawn import ScaleDownReason
from kici.testing.contracts.backend import Kind, an_id

BENCHES = {"firecracker": RealMicroVmBench, "qemu": QemuBench}


async def walk(bench: RealMicroVmBench, step: str, phase: str) -> None:
    bench.configure(stop_seconds=0.0)
    doomed = an_id(2)

    def on_step(vm_id: AgentId, at: str, how: str) -> None:
        if (vm_id, at, how) == (doomed, step, phase):
            os.kill(os.getpid(), signal.SIGKILL)
        if (vm_id, at, how) == (doomed, step, "do") and phase.isdigit():
            threading.Timer(int(phase) / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()

    bench.on_step = on_step
    await bench.start()
    await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    await bench.backend.spawn(bench.order(doomed, Kind.LIVES), bench.heard.on_event)
    await bench.backend.destroy(doomed, ScaleDownReason.IDLE)
    sys.exit("the step was never reached")


if __name__ == "__main__":
    netns = Namespace("given")
    netns.name = sys.argv[2]
    asyncio.run(walk(BENCHES[sys.argv[5]](Path(sys.argv[1]), netns), sys.argv[3], sys.argv[4]))
