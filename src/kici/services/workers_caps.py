"""What is in use under whose caps: scalers of this host share its caps, scalers of a worker those of its host."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from kici.decide.admit import NO_USAGE, Active, Book, HostCaps, Usage
from kici.decide.entries import Routable
from kici.domain.ids import ScalerName
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.spawn_book import SpawnBook


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What admission to one scaler compares."""

    caps: HostCaps
    here: Usage
    total: Usage
    active: Active


def load_of(
    runtime: ScalerRuntime, fleet: Fleet, book: Book, spawns: SpawnBook, active_total: Callable[[Fleet], int]
) -> Load:
    here = book.of(runtime.name).with_others(spawns.resisting(runtime.name))
    host = runtime.elsewhere
    if host is None:
        total = used_here(fleet, book).with_others(spawns.resisting() - _resisting(spawns, fleet.remote))
        active = Active(here=runtime.backend.active_count(), total=active_total(fleet))
        return Load(caps=fleet.caps, here=here, total=total, active=active)
    counts = {name: fleet.runtimes[name].backend.active_count() for name in host.names if name in fleet.runtimes}
    theirs, all_theirs = host.others(runtime.name), host.others(None)
    total = plus(_sum(book, host.names), all_theirs).with_others(_resisting(spawns, host.names))
    active = Active(here=runtime.backend.active_count() + theirs.agents, total=sum(counts.values()) + all_theirs.agents)
    return Load(caps=host.caps, here=plus(here, theirs), total=total, active=active)


def used_here(fleet: Fleet, book: Book) -> Usage:
    """What the reservations of this host's scalers hold together, those that left the file too."""
    if not fleet.remote:
        return book.total
    remote, total = _sum(book, fleet.remote), book.total
    return Usage(
        agents=total.agents - remote.agents,
        cpu_micros=total.cpu_micros - remote.cpu_micros,
        memory_bytes=total.memory_bytes - remote.memory_bytes,
    )


def spread(
    candidates: Iterable[Routable], remote: frozenset[ScalerName], free: Callable[[ScalerName], int]
) -> Iterator[Routable]:
    """In the given order, but among equal label sets of workers those with the most room first."""
    for _, equals in groupby(candidates, key=lambda entry: (entry.scaler in remote, len(entry.offers))):
        in_turn = sorted(equals, key=lambda entry: -free(entry.scaler) if entry.scaler in remote else 0)
        yield from in_turn  # a stable order: as given, where there is no difference


def plus(one: Usage, other: Usage) -> Usage:
    if other is NO_USAGE:
        return one
    return Usage(
        agents=one.agents + other.agents,
        cpu_micros=one.cpu_micros + other.cpu_micros,
        memory_bytes=one.memory_bytes + other.memory_bytes,
    )


def _sum(book: Book, names: Iterable[ScalerName]) -> Usage:
    total = NO_USAGE
    for name in names:
        total = plus(total, book.of(name))
    return total


def _resisting(spawns: SpawnBook, names: Iterable[ScalerName]) -> int:
    return sum(spawns.resisting(name) for name in names)
