"""`make sim`: replay one seed with its story, or run many and say what happened in them.

python -m kici.testing.sim --seed 7 [--of job-0123…]... [--lines]
python -m kici.testing.sim --count 500 [--first 1000] [--workers 2]
"""

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from kici.observe.story import Stories
from kici.testing.sim.run import Report, run_seed
from kici.testing.sim.trace import WORLD

COUNT: Final = 100
FAILURES_SHOWN: Final = 10
CHUNK: Final = 4
COLLECT_EVERY: Final = 50
"""Seeds after which what they left is collected."""
PROGRESS_SECONDS: Final = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was violated."""
    parser = argparse.ArgumentParser(prog="python -m kici.testing.sim", description="Replay one seed, or run many.")
    parser.add_argument("--seed", type=int, help="replay this one, and tell its story")
    parser.add_argument("--of", action="append", default=[], help="tell the story of this job or agent, too")
    parser.add_argument("--lines", action="store_true", help="print everything that happens")
    parser.add_argument("--count", type=int, default=COUNT, help=f"how many seeds to run (default {COUNT})")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    chosen = parser.parse_args(arguments)
    _hasten()
    if chosen.seed is not None:
        return replay(chosen.seed, of=chosen.of, lines=chosen.lines)
    return run_many(range(chosen.first, chosen.first + chosen.count), workers=chosen.workers)


def replay(seed: int, *, of: Iterable[str], lines: bool) -> int:
    """One seed, told."""
    report = run_seed(seed, keeps_lines=lines)
    for line in report.lines:
        print(line)
    plan = report.plan
    print(
        f"seed {seed}: {plan.coordinators} coordinators, {plan.workers} workers, {plan.jobs} jobs, "
        f"{plan.static_agents} static agents, {plan.cloud_agents} machines of a cloud at most, "
        f"a machine pool of {plan.pool_cpus:.1f} cpus"
    )
    for title, faults in (("every so many seconds", plan.every), ("with a probability of", plan.odds)):
        shown = ", ".join(f"{kind} {value:.3g}" for kind, value in faults.items())
        print(f"  faults {title}: {shown or 'none'}")
    print(report.stories.text(WORLD))
    for name in of:
        print(report.stories.text(name))
    print(_counts(report.counts))
    print(f"{report.virtual_seconds:.0f} virtual seconds in {report.cpu_seconds:.2f} s; trace {report.digest}")
    print(report.failure or "nothing was violated")
    return 1 if report.violation else 0


@dataclass(slots=True)
class _Tally:
    """What is known of the seeds that have run."""

    total: int
    begun: float
    seeds: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed_seeds: list[int] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.virtual_seconds += report.virtual_seconds
        self.cpu_seconds += report.cpu_seconds
        self.counts.update(report.counts)
        if report.failure is not None:
            self.failures.append(report.failure)
            self.failed_seeds.append(report.plan.seed)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    @property
    def line(self) -> str:
        rate = self.seeds / max(0.001, self.seconds)
        hours = self.virtual_seconds / 3600
        return (
            f"{self.seeds} of {self.total} seeds, {len(self.failures)} violated; {rate:.1f} seeds per second, "
            f"{hours:.1f} virtual hours"
        )


def run_many(seeds: range, *, workers: int) -> int:
    """Many seeds: progress, what happened in all of them, and what was violated."""
    tally = _Tally(len(seeds), time.monotonic())
    told_at = 0.0
    for report in _reports(seeds, workers):
        tally.add(report)
        if report.failure is not None and len(tally.failures) <= FAILURES_SHOWN:
            print(f"\n{report.failure}\n", flush=True)
        if tally.seconds - told_at >= PROGRESS_SECONDS:
            told_at = tally.seconds
            print(tally.line, flush=True)
    print(tally.line)
    print(f"{tally.cpu_seconds / max(1, tally.seeds):.3f} s of processor time for each seed")
    print(_counts(tally.counts))
    if tally.failures:
        print(f"\nviolated: {len(tally.failures)} of {tally.seeds} seeds: {tally.failed_seeds[:50]}")
        return 1
    print("nothing was violated")
    return 0


def _reports(seeds: range, workers: int) -> Iterator[Report]:
    if workers <= 1:
        yield from map(_run, seeds)
        return
    with ProcessPoolExecutor(workers, initializer=_hasten) as pool:
        yield from pool.map(_run, seeds, chunksize=CHUNK)


def _run(seed: int) -> Report:
    """One of many, without its stories: a failure has those that it needs."""
    report = replace(run_seed(seed), stories=Stories())
    if seed % COLLECT_EVERY == 0:
        _ = gc.collect()
    return report


def _hasten() -> None:
    """A tenth of the time went into garbage that a world, which lives for a second, does not make, and into log records
    that say in which line and thread they were made, which nobody reads."""
    gc.freeze()
    gc.disable()
    logging._srcfile = None  # as its own documentation advises
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _counts(counts: Counter[str]) -> str:
    """What happened how often, in columns."""
    cells = [f"{count:>8} {what}" for what, count in sorted(counts.items())]
    width = max((len(cell) for cell in cells), default=0) + 2
    return "\n".join(
        "".join(cell.ljust(width) for cell in cells[row : row + 3]).rstrip() for row in range(0, len(cells), 3)
    )


if __name__ == "__main__":
    sys.exit(main())
