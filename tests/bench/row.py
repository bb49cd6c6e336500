"""One measured figure."""

from dataclasses import dataclass

from tests.bench.meter import Meter


@dataclass(frozen=True, slots=True)
class Row:
    measure: str
    value: float
    unit: str
    method: str
    store: str = ""
    ours: float | None = None
    """The same figure by processor time of this process alone; what it would be if all else cost nothing."""
    servers: float | None = None
    """The same figure by processor time of the database server alone."""


def rate(measure: str, count: int, meter: Meter, method: str, store: str = "", *, unit: str = "/s") -> Row:
    """So many of something, for each second."""
    servers = count / meter.servers if meter.servers else None
    return Row(measure, count / meter.wall, unit, method, store, count / max(meter.ours, 1e-6), servers)


def duration(measure: str, meter: Meter, method: str, store: str = "", *, unit: str = "s") -> Row:
    """How long one thing took."""
    by = {"s": 1.0, "ms": 1000.0}[unit]
    servers = meter.servers * by if meter.servers else None
    return Row(measure, meter.wall * by, unit, method, store, meter.ours * by, servers)
