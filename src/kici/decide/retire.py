"""A reload as a plan: which scalers come, change, go, or return before they are gone.

Pure comparison of the running configuration with a new, already valid one.  A scaler keeps its backend as long as
it keeps its name; so its type cannot change, also not while it retires.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kici.config.model import BackendType, ScalerEntry, ScalersConfig
from kici.domain.ids import ScalerName


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadPlan:
    """Names in the order of the new file, those that go in the order of the old one."""

    added: tuple[ScalerEntry, ...] = ()
    updated: tuple[ScalerEntry, ...] = ()
    resurrected: tuple[ScalerEntry, ...] = ()
    """Were retiring; they serve again with what they still have."""
    kept: tuple[ScalerEntry, ...] = ()
    """Not changed at all."""
    retired: tuple[ScalerName, ...] = ()
    changes_host: bool = False
    """Caps over all scalers, defaults or pools differ."""

    @property
    def is_empty(self) -> bool:
        return not (self.added or self.updated or self.resurrected or self.retired or self.changes_host)


def plan_reload(
    old: ScalersConfig, new: ScalersConfig, *, retiring: Mapping[ScalerName, BackendType]
) -> ReloadPlan | tuple[str, ...]:
    """The plan, or every reason against it."""
    before = {entry.name: entry for entry in old.scalers}
    types = {**retiring, **{entry.name: entry.type for entry in old.scalers}}
    faults = tuple(
        f"scaler {entry.name}: its type cannot change from {types[entry.name]} to {entry.type} by a reload; "
        "give the new one another name, or restart the orchestrator"
        for entry in new.scalers
        if entry.name in types and types[entry.name] is not entry.type
    )
    if faults:
        return faults
    names = {entry.name for entry in new.scalers}
    return ReloadPlan(
        added=tuple(entry for entry in new.scalers if entry.name not in types),
        updated=tuple(entry for entry in new.scalers if entry.name in before and entry != before[entry.name]),
        resurrected=tuple(entry for entry in new.scalers if entry.name in retiring),
        kept=tuple(entry for entry in new.scalers if before.get(entry.name) == entry),
        retired=tuple(entry.name for entry in old.scalers if entry.name not in names),
        changes_host=_host(old) != _host(new),
    )


def _host(config: ScalersConfig) -> tuple[object, ...]:
    return (config.global_max_agents, config.global_resource_cap, config.defaults, config.machine_pools)
