"""Scalers as operators see them: each of them once, whoever tells of it."""

from collections.abc import Iterable
from dataclasses import replace

from kici.domain.ids import InstanceId
from kici.web.surface import ScalerRow


def once_each(rows: Iterable[ScalerRow]) -> list[ScalerRow]:
    """One row for each scaler of each host, in order of appearance.

    Every coordinator that a worker is joined to tells of that worker's scalers, and each knows its own agents there.
    """
    found: dict[tuple[InstanceId, str], ScalerRow] = {}
    for row in rows:
        key = (row.instance_id, row.name)
        found[key] = _together(found[key], row) if key in found else row
    return list(found.values())


def _together(one: ScalerRow, other: ScalerRow) -> ScalerRow:
    """What both know of a scaler: it can be used if either can use it."""
    shown = other if one.state != "ready" and other.state == "ready" else one
    return replace(
        shown,
        active=one.active + other.active,
        booting=one.booting + other.booting,
        warm_ready=one.warm_ready + other.warm_ready,
        warm_target=max(one.warm_target, other.warm_target),
        cpus_used=one.cpus_used + other.cpus_used,
        memory_bytes_used=one.memory_bytes_used + other.memory_bytes_used,
        last_error=one.last_error or other.last_error,
    )
