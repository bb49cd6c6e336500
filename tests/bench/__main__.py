"""All measurements, each with its method, next to reference figures and targets.

The references come from another program on a machine of this kind (PostgreSQL with fsync, two shared cores): an
order of magnitude, not a rival.  Run it on a quiet machine; every figure is a median or a best of several.  Behind
many stands the same figure by processor time, of this process (`ours`) and of the database (`server`): what it would
be if nothing else took time, which a loaded machine changes little.

    python -m tests.bench [store] [decide] [config] [scaler] [events] [reaper] [spawn] [container]
        [microvm] [microvm_jobs] [snapshots] [cluster] [coordinator]
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.bench.row import Row
from tests.engines import migrated_database, postgres_server

from kici.testing import engines


class Known(NamedTuple):
    """What a measure is compared with; `part` is found in its name."""

    part: str
    reference: str
    target: str


KNOWN = (
    Known("start to ready", "2.0 s", "<= 0.8 s"),
    Known("RSS idle", "213-252 MB", "<= 65 (postgres: 80) MB"),
    Known("submit to job received, fresh agent by zygote, p50", "1.73 s", "<= 0.1 s"),
    Known("submit to job received, fresh agent by exec, p50", "1.73 s", "<= 0.3 s"),
    Known("submit to first output, fresh agent by zygote, p50", "3.5 s", "<= 0.15 s"),
    Known("submit to first output, fresh agent by exec, p50", "3.5 s", "<= 0.35 s"),
    Known("submit to job received, idle agent, p50", "0.020 s", "<= 0.005 s"),
    Known("submit to job received, idle agent, p99", "-", "<= 0.020 s"),
    Known("submit to first output, idle agent, p50", "1.54 s", "<= 0.015 s"),
    Known("burst of 8 cold jobs", "14 s", "<= 1 s"),
    Known("RSS of an idle agent by exec", "218 MB", "<= 35 MB"),
    Known("PSS of an agent by zygote", "218 MB", "<= 12 MB"),
    Known("submit, one at a time", "0.8-1.0 k/s", ">= 1.5 k/s"),
    Known("submit, multi-row", "2.0-2.6 k/s", ">= 5 k/s"),
    Known("claim, one at a time", "650 /s", ">= 1 k/s"),
    Known("claim, ten at once", "1.0 k/s", ">= 2 k/s"),
    Known("match 10 scalers", "70 k/s", ">= 200 k/s"),
    Known("match 100 scalers", "3.8 k/s", ">= 200 k/s"),
    Known("match 1000 scalers", "0.4 k/s", ">= 200 k/s"),
    Known("requestScale, no store, 1x1", "10-32 k/s", ">= 10 k/s"),
    Known("requestScale, no store, 10x5", "5-8 k/s", ">= 10 k/s"),
    Known("requestScale, no store, 100x10", "0.4-0.5 k/s", ">= 10 k/s"),
    Known("requestScale, no store, 1000x10", "-", ">= 10 k/s"),
    Known("requestScale, durable", "2.1-2.5 k/s", ">= 3 k/s"),
    Known("one tick of 100 pools", "60 ms", "<= 3 ms"),
    Known("recovery of 10 000", "0.13-0.16 s", "<= 0.25 s"),
    Known("enqueue to first output / docker run, p50", "-", "<= 1.3"),
    Known("spawn to registered, ours / by hand", "-", "<= 1.5"),
    Known("at once, ours / by hand", "-", "<= 1.5"),
    Known("our own CPU for each spawn", "-", "<= 60 ms"),
    Known("VM job by booting / the same VM by hand", "-", "<= 1.15"),
    Known("real process spawns with tokens and rows", "178-234/s", ">= 250/s"),
    Known("whole agents", "-", ">= 60/s"),
    Known("requestScale of an event scaler, one at a time", "400/s", ">= 500/s"),
    Known("requestScale of an event scaler, concurrent", "478/s", ">= 800/s"),
    Known("claim registered and redeemed with its token, one at a time", "600/s", ">= 800/s"),
    Known("claim registered and redeemed with its token, concurrent", "1.3 k/s", ">= 2 k/s"),
    Known("emit to delivery, the same coordinator, p50", "-", "<= 5 ms"),
    Known("emit to delivery, the same coordinator, p99", "-", "<= 30 ms"),
    Known("emit to delivery, another coordinator, p50", "-", "<= 5 ms"),
    Known("emit to delivery, another coordinator, p99", "-", "<= 30 ms"),
    Known("reaper tick, 10000 spared", "50-93 ms", "<= 80 ms"),
    Known("reaper tick, 10000 torn down", "2.5 k/s", ">= 4 k/s"),
    Known("reaper tick, 100000 spared", "-", "<= 800 ms"),
    Known("jobs per second, 1 coordinator", "-", "does not fall with the number"),
    Known("jobs per second, 2 coordinators", "-", ">= with 1"),
    Known("jobs per second, 3 coordinators", "-", ">= with 1"),
    Known("one presence beat", "-", "<= 100 ms of database time"),
    Known("reconnect storm of 10000", "-", "<= 30 s"),
    Known("jobs lost in the storm", "-", "0"),
    Known("RSS with 2000 connected agents", "-", "<= 150 MB"),
    Known("load, check and reload 100 scalers x 10 sets", "100-120 ms", "<= 150 ms"),
    Known("load, check and reload 1000 scalers x 1 sets", "-", "<= 800 ms"),
)


def known(measure: str) -> Known | None:
    return next((each for each in KNOWN if each.part in measure), None)


def show(rows: Iterable[Row]) -> None:
    for row in rows:
        found = known(row.measure)
        compared = f"  [reference {found.reference}, target {found.target}]" if found else ""
        ours = "" if row.ours is None else f"; ours {row.ours:.6g}"
        servers = "" if row.servers is None else f", server {row.servers:.6g}"
        print(
            f"  {row.measure:58} {row.store:9} {row.value:12.3f} {row.unit:6} {row.method}{ours}{servers}{compared}",
            flush=True,
        )


@contextmanager
def stores() -> Iterator[dict[str, str | None]]:
    """The embedded store, and a new database of PostgreSQL (with fsync) where this machine has one."""
    reason = engines.absence("postgres")
    if reason is not None:
        print(f"  PostgreSQL: {reason}; its figures are left out", flush=True)
        yield {"sqlite": None}
        return
    with postgres_server(fsync=True) as server, migrated_database(server) as url:
        yield {"sqlite": None, "postgres": url}


def coordinator_rows(say: Callable[[str], None]) -> Iterable[Row]:
    bench = importlib.import_module("tests.bench.bench_coordinator")
    with stores() as chosen:
        return list(bench.rows(chosen, say))


def main(chosen: list[str]) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"  ... {text} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    for name in (
        "decide",
        "config",
        "store",
        "scaler",
        "events",
        "reaper",
        "cluster",
        "spawn",
        "container",
        "microvm",
        "microvm_jobs",
        "snapshots",
        "coordinator",
    ):
        if chosen and name not in chosen:
            continue
        module = importlib.import_module(f"tests.bench.bench_{name}")
        print(f"\n{name}: {(module.__doc__ or '').strip().splitlines()[0]}", flush=True)
        show(coordinator_rows(say) if name == "coordinator" else module.rows())
    load = os.getloadavg()[0]
    print(f"\n{os.cpu_count()} processors, load {load:.1f} at the end, {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
