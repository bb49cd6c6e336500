"""How fast decisions are made: the matcher at three sizes, known and unknown demands, and admission."""

import sys
import time
from collections.abc import Callable, Iterator

from tests.bench.row import Row

from kici.decide.admit import Active, Cap, HostCaps, ScalerCaps, Usage, admit
from kici.decide.entries import Routable
from kici.decide.route import Router
from kici.domain.ids import ScalerName
from kici.domain.job import Demand
from kici.domain.labels import scaler_agent_labels
from kici.domain.platform import os_arch_labels
from kici.domain.resources import Amount

SIZES = ((10, 5), (100, 10), (1000, 10))
SECONDS = 0.3


def fleet(scalers: int, sets: int) -> list[Routable]:
    """Scalers that share plain labels, each with its own team label; every third is gated."""
    return [_routable(scaler, index) for scaler in range(scalers) for index in range(sets)]


def _routable(scaler: int, index: int) -> Routable:
    name = ScalerName(f"pool-{scaler}")
    declared = ("linux", f"team-{scaler % 50}", f"size-{index}", *(f"tool-{scaler}-{n}" for n in range(index)))
    agent = scaler_agent_labels(declared, backend_type="container", scaler=name, roles=None, taints=())
    return Routable(
        scaler=name,
        backend_type="container",
        set_index=index,
        label_set=declared,
        offers=frozenset((*agent, *os_arch_labels("linux", "x64"))),
        agent_labels=agent,
        gate=frozenset({f"team-{scaler % 50}"}) if scaler % 3 == 0 else frozenset(),
    )


def demands(scalers: int, sets: int) -> list[Demand]:
    """Plain, named and impossible demands in equal parts."""
    found = []
    for n in range(300):
        team = f"team-{n % min(scalers, 50)}"
        found.append(Demand(labels=frozenset({"linux", f"size-{n % sets}"})))
        found.append(Demand(labels=frozenset({"linux", team}), exclude=frozenset({f"size-{n % sets}"})))
        found.append(Demand(labels=frozenset({"linux", f"tool-{n % scalers}-0", "kici:os:linux", f"n-{n}"})))
    return found


def _rate(work: Callable[[], int]) -> float:
    """Units of work for each second: the best of three stretches."""
    best = 0.0
    for _ in range(3):
        done, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < SECONDS:
            done += work()
        best = max(best, done / spent)
    return best


def rows() -> Iterator[Row]:
    for scalers, sets in SIZES:
        entries, asked = fleet(scalers, sets), demands(scalers, sets)
        size = f"{scalers} scalers x {sets} sets"
        start = time.perf_counter()
        router = Router(entries)
        yield Row(f"compile {size}", (time.perf_counter() - start) * 1000, "ms", "once")

        def unknown(router: Router = router, asked: list[Demand] = asked) -> int:
            for demand in asked:
                next(router.candidates(demand), None)
            return len(asked)

        def mismatch(router: Router = router, asked: list[Demand] = asked) -> int:
            router._find_nearest(asked[2].labels, asked[2].exclude)
            return 1

        fresh = [demand for _ in range(100) for demand in demands(scalers, sets)]
        start = time.perf_counter()
        for demand in fresh:
            router.match(demand)
        known = len(fresh) / (time.perf_counter() - start)
        yield Row(f"match, known demand, {size}", known, "1/s", "900 demands 100 times, each its own object, once")
        yield Row(f"match, unknown demand, {size}", _rate(unknown), "1/s", "900 demands in turn, no memory, best of 3")
        yield Row(f"explain mismatch, {size}", _rate(mismatch), "1/s", "one demand, no memory, best of 3")
    yield Row("admit", _rate(_admissions), "1/s", "two caps of each kind, admitted, best of 3")


def _admissions() -> int:
    scaler = ScalerCaps(scaler=ScalerName("a"), agents_max=100, resources=Cap(cpus=100, memory_bytes=1 << 40))
    host = HostCaps(agents_max=1000, resources=Cap(cpus=1000, memory_bytes=1 << 42))
    here, total = Usage(agents=5, cpu_micros=5_000_000), Usage(agents=50, cpu_micros=50_000_000)
    active, requests = Active(here=4, total=40), Amount(cpus=2, memory_bytes=1 << 30)
    for _ in range(1000):
        assert admit(requests, scaler=scaler, host=host, here=here, total=total, active=active) is None
    return 1000


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(f"{row.measure:45} {row.value:14,.1f} {row.unit:4} {row.method}\n")
