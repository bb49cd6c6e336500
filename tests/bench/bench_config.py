"""How long a scalers file takes to read and to take over, at three sizes, by processor time; two sizes have a budget.

A reload is measured on a coordinator with backends that do nothing: reading, checking, comparing and changing over,
when every scaler has a new cap.
"""

import sys
import time
from collections.abc import Iterator
from typing import Final

from tests.bench.row import Row

from kici.config.environment import read_settings
from kici.config.load import load_text
from kici.testing.coordinator_bench import Bench, benched

SIZES: Final = ((100, 10), (1000, 1), (1000, 10))
BUDGET_MS: Final = {(100, 10): 150, (1000, 1): 800}


def document(scalers: int, sets: int, *, agents: int = 10) -> bytes:
    lines = ["version: 1", "scalers:"]
    for scaler in range(scalers):
        lines += [f"  - name: pool-{scaler}", "    type: container", f"    maxAgents: {agents}", "    labelSets:"]
        for index in range(sets):
            lines += [
                f"      - labels: [linux, pool-{scaler}, size-{index}]",
                f"        image: ghcr.io/example/agent:{index}",
            ]
            lines += ["        resources: {memory: 4g, cpus: 4}", "        env: {MAKEFLAGS: -j4}"]
    return "\n".join(lines).encode()


def read_ms(data: bytes) -> float:
    """Processor time: the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        loaded = load_text(data)
        best = min(best, (time.process_time() - start) * 1000)
        assert loaded.config is not None
        assert loaded.warnings == ()
    return best


def reload_ms(scalers: int, sets: int) -> float:
    """Processor time from the text to the configuration in force: the best of five."""
    before = load_text(document(scalers, sets)).config
    assert before is not None
    best = float("inf")

    @benched(*before.scalers)
    async def measure(bench: Bench) -> None:
        nonlocal best
        for agents in range(11, 16):
            data = document(scalers, sets, agents=agents)
            start = time.process_time()
            config = load_text(data).config
            assert config is not None
            bench.file = config
            report = await bench.coordinator.reload_scalers()
            best = min(best, (time.process_time() - start) * 1000)
            assert report.outcome == "applied", report

    measure()
    return best


def rows() -> Iterator[Row]:
    for scalers, sets in SIZES:
        data = document(scalers, sets)
        budget = BUDGET_MS.get((scalers, sets))
        aim = "" if budget is None else f", budget {budget} ms"
        yield Row(
            f"read {scalers} scalers x {sets} sets", read_ms(data), "ms", f"{len(data) // 1024} KiB, best of 5{aim}"
        )
    for scalers, sets in BUDGET_MS:
        how = f"best of 5, budget {BUDGET_MS[scalers, sets]} ms"
        yield Row(f"load, check and reload {scalers} scalers x {sets} sets", reload_ms(scalers, sets), "ms", how)
    start = time.process_time()
    for _ in range(100):
        read_settings({"HOME": "/home/ci", "KICI_PORT": "4001"})
    yield Row("read settings", (time.process_time() - start) * 10, "ms", "mean of 100")


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(f"{row.measure:45} {row.value:14,.1f} {row.unit:4} {row.method}\n")
