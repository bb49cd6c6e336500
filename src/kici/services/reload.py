"""A new scalers file takes effect without a restart: all of it or nothing.

Plan, build, commit.  Nothing that runs is touched until everything that is needed exists; the commit is one step
without an await, so nobody ever sees half of a configuration.  A scaler that is taken out retires: it gets no new
work at once, its idle warm agents go at once, its jobs finish, and its backend goes when its last agent has.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Never, Protocol

from kici.config.model import BackendType, ScalerEntry, ScalersConfig
from kici.decide.entries import Routable, host_caps, routables
from kici.decide.pool import Pool, pools_of
from kici.decide.retire import ReloadPlan, plan_reload
from kici.decide.route import Router
from kici.domain.errors import KiciError
from kici.domain.ids import ScalerName
from kici.domain.platform import Host
from kici.domain.resources import ResourceRequest
from kici.domain.spawn import Spawn
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.services.scaler_runtime import Fleet, ScalerRuntime

RETIREMENT_SECONDS: Final = 30.0


class Builder(Protocol):
    """Makes and changes backends for entries of the configuration."""

    defaults: ResourceRequest
    """Of the configuration in force: what those have that declare no resources."""

    def build(self, entry: ScalerEntry) -> ScalerRuntime:
        """Raises a `KiciError` when this host cannot serve the entry."""
        ...

    def check(self, entry: ScalerEntry) -> None:
        """Raises a `KiciError` when a running backend could not take over the changed entry."""
        ...

    def apply(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        """Take over a changed entry that `check` passed.  Does not fail, does not wait."""
        ...

    def build_retired(self, row: Spawn) -> ScalerRuntime | None:
        """A scaler that left the file, able to look after its agents; None where its type is not made here."""
        ...


class Serving(Protocol):
    """Who makes agents by the configuration that is in force."""

    @property
    def local(self) -> Fleet: ...

    @local.setter
    def local(self, fleet: Fleet) -> None: ...


class PoolKeeper(Protocol):
    def configure(self, pools: Sequence[Pool]) -> None: ...


class Tracked(Protocol):
    """An agent of this host."""

    @property
    def runtime(self) -> ScalerRuntime: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadReport:
    """What a reload came to."""

    outcome: str
    """`applied`, `unchanged` or `rejected`; `unanswered` of another coordinator that did not say."""
    added: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    resurrected: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


Read = Callable[[], Awaitable[ScalersConfig | tuple[str, ...]]]
"""Reads the files anew: a valid configuration, or every problem."""


class Reload:
    def __init__(
        self,
        *,
        config: ScalersConfig,
        read: Read,
        builder: Builder,
        host: Host,
        manager: Serving,
        pools: PoolKeeper,
        spawns: Iterable[Tracked],
        clock: Clock,
        on_result: Callable[[str], None],
        capacity_changed: Callable[[], None],
    ) -> None:
        """`on_result` counts attempts, successes and failures; `capacity_changed()` offers waiting jobs again."""
        self._config = config
        self._read = read
        self._builder = builder
        self._host = host
        self._manager = manager
        self._pools = pools
        self._spawns = spawns
        self._clock = clock
        self._on_result = on_result
        self._capacity_changed = capacity_changed
        self._retiring: dict[ScalerName, BackendType] = {}
        self._retiring_since: dict[ScalerName, float] = {}
        """Monotonic seconds."""
        self._ticker = Ticker(RETIREMENT_SECONDS)
        self._is_busy = False

    @property
    def retiring(self) -> frozenset[ScalerName]:
        return frozenset(self._retiring)

    def agent_gone(self) -> None:
        """It may have been the last one of a retiring scaler."""
        if self._retiring:
            self._ticker.nudge()

    async def reload(self) -> ReloadReport:
        """Read the files and take them over, or leave everything as it is and say why."""
        if self._is_busy:
            return self._rejected(("another reload is under way; ask again when it is done",))
        self._is_busy = True
        self._on_result("attempted")
        try:
            new = await self._read()
            if not isinstance(new, ScalersConfig):
                return self._rejected(new)
            plan = plan_reload(self._config, new, retiring=self._retiring)
            if not isinstance(plan, ReloadPlan):
                return self._rejected(plan)
            if plan.is_empty:
                return self._report("unchanged", plan)
            return await self._apply(new, plan)
        finally:
            self._is_busy = False

    async def run(self) -> Never:
        """Let go of scalers that have retired.  Leave by cancellation."""
        while True:
            await self._ticker.next()
            await self.tick()

    async def tick(self) -> int:
        """Drop every retiring scaler whose last agent is gone.  How many."""
        gone = [name for name in self._retiring if not self._has_agents(name)]
        for name in gone:
            runtime = self._forget(name)
            try:
                await runtime.backend.shutdown_all()
            except KiciError as error:
                emit(Event.BACKEND_STUCK, level=logging.WARNING, scaler=name, error=str(error))
            seconds = round(self._clock.monotonic() - self._retiring_since.pop(name), 1)
            emit(Event.SCALER_RETIRED, scaler=name, seconds=seconds)
        return len(gone)

    def _forget(self, name: ScalerName) -> ScalerRuntime:
        """Before its end is awaited, so that nobody ends it twice and no reload brings back what is ending."""
        del self._retiring[name]
        fleet = self._manager.local
        left = {key: kept for key, kept in fleet.runtimes.items() if key != name}
        self._manager.local = Fleet(runtimes=left, router=fleet.router, caps=fleet.caps)
        return fleet.runtimes[name]

    async def _apply(self, new: ScalersConfig, plan: ReloadPlan) -> ReloadReport:
        built: dict[ScalerName, ScalerRuntime] = {}
        problems: list[str] = []
        for entry in (*plan.updated, *plan.resurrected):
            try:
                self._builder.check(entry)
            except KiciError as error:
                problems.append(str(error))
        for entry in plan.added:
            try:
                built[entry.name] = self._builder.build(entry)
            except KiciError as error:
                problems.append(str(error))
        if problems:
            for runtime in built.values():
                await runtime.backend.shutdown_all()
            return self._rejected(tuple(problems))
        self._commit(new, plan, built)
        self._ticker.nudge()
        self._capacity_changed()
        return self._report("applied", plan)

    def _commit(self, new: ScalersConfig, plan: ReloadPlan, built: dict[ScalerName, ScalerRuntime]) -> None:
        """One step: the old configuration before it, the new one after it."""
        before = self._manager.local.runtimes
        self._builder.defaults = new.defaults.resources
        for entry in (*plan.updated, *plan.resurrected):
            self._builder.apply(before[entry.name], entry)
            self._retiring.pop(entry.name, None)
            self._retiring_since.pop(entry.name, None)
        types = {entry.name: entry.type for entry in self._config.scalers}
        self._retiring.update({name: types[name] for name in plan.retired})
        self._retiring_since.update(dict.fromkeys(plan.retired, self._clock.monotonic()))
        entries = routables(new, self._host)
        serving = {entry.name: built.get(entry.name) or before[entry.name] for entry in new.scalers}
        leaving = {name: before[name] for name in self._retiring}
        self._manager.local = Fleet(runtimes={**serving, **leaving}, router=Router(entries), caps=host_caps(new))
        self._config = new
        self._pools.configure(warm_pools(new, entries))

    def _has_agents(self, name: ScalerName) -> bool:
        runtime = self._manager.local.runtimes[name]
        return runtime.backend.active_count() > 0 or any(tracked.runtime is runtime for tracked in self._spawns)

    def _rejected(self, problems: tuple[str, ...]) -> ReloadReport:
        for problem in problems:
            emit(Event.RELOAD_REJECTED, level=logging.ERROR, problem=problem)
        self._on_result("failed")
        return ReloadReport(outcome="rejected", problems=problems)

    def _report(self, outcome: str, plan: ReloadPlan) -> ReloadReport:
        self._on_result("success")
        report = ReloadReport(
            outcome=outcome,
            added=tuple(entry.name for entry in plan.added),
            updated=tuple(entry.name for entry in plan.updated),
            retired=plan.retired,
            resurrected=tuple(entry.name for entry in plan.resurrected),
        )
        emit(
            Event.RELOAD_APPLIED,
            outcome=outcome,
            added=report.added,
            updated=report.updated,
            retired=report.retired,
            resurrected=report.resurrected,
        )
        return report


def warm_pools(config: ScalersConfig, entries: tuple[Routable, ...]) -> list[Pool]:
    """The pools of a configuration; one that could never be filled is named once and left out."""
    pools, inert = pools_of(config, entries)
    for refused in inert:
        emit(
            Event.POOL_REFUSED,
            level=logging.WARNING,
            scaler=refused.scaler,
            label_set=refused.label_set,
            reason=refused.reason,
        )
    return pools
