"""Live settings as services read them: cached for ten seconds, and never a reason to stop.

While the store is unreachable the last values that were read stay in force (the configured defaults, if none
ever were); the failure is cached as long as a success, so that an outage costs one attempt in ten seconds.
Other coordinators see a change within that time.  `strict` is for those who must not act on remembered values.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Never

from kici.domain.errors import Misconfigured, StoreDown
from kici.domain.ids import OrgId
from kici.domain.knobs import KNOBS, Knob, SettingRow, Values, effective, patch_problems
from kici.kit.ticker import Ticker
from kici.ports.clock import Clock
from kici.ports.store import SettingsStore

CACHE_SECONDS: Final = 10.0
ORGS_CACHED_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsView:
    """One consistent reading.  `view[knob]` is the value in force."""

    org: Values
    cluster: Values
    configured: Values
    version: int
    """Rises with every real change of any setting."""

    def __getitem__(self, knob: Knob) -> int:
        return effective(knob, self.org, self.cluster, self.configured)

    def in_force(self) -> dict[str, int]:
        """Every knob by its name."""
        return {name: self[knob] for name, knob in KNOBS.items()}


@dataclass(slots=True)
class _Cached:
    view: SettingsView
    checked_at: float
    failure: StoreDown | None


class LiveSettings:
    """`configured` are defaults from the program's configuration, which beat the built-in ones."""

    def __init__(self, *, store: SettingsStore, clock: Clock, configured: Values | None = None) -> None:
        self._store = store
        self._clock = clock
        self._configured = dict(configured or {})
        self._cache: OrderedDict[OrgId | None, _Cached] = OrderedDict()
        self._peeked: dict[OrgId, None] = {}
        self._reading = asyncio.Lock()
        self.refresh_due = Ticker(CACHE_SECONDS)
        """The pace of `SettingsRefresh`."""

    async def view(self, org: OrgId | None = None) -> SettingsView:
        """The values in force for an org (None: the cluster's).  Never fails."""
        return (await self._current(org)).view

    async def get(self, knob: Knob, org: OrgId | None = None) -> int:
        """One value.  Never fails."""
        return (await self.view(org))[knob]

    def peek(self, knob: Knob, org: OrgId | None = None) -> int:
        """The value last read, for those who cannot wait; `SettingsRefresh` keeps it at most ten seconds old.

        Of an org that was never read this is the cluster's, until the refresh that this call asks for.
        """
        if org is not None:
            if org not in self._cache:
                self.refresh_due.nudge()
            if len(self._peeked) < ORGS_CACHED_MAX:
                self._peeked[org] = None
        return self._remembered(org)[knob]

    async def refresh(self) -> None:
        """Read the cluster's values and those of the orgs that somebody peeked at since the last time."""
        peeked, self._peeked = self._peeked, {}
        for org in (None, *peeked):
            async with self._reading:
                await self._read(org)

    async def strict(self, org: OrgId | None = None) -> SettingsView:
        """As `view`, but raises `StoreDown` when the values could not be read within the last ten seconds."""
        return _readable(await self._current(org))

    async def show(self, org: OrgId | None) -> tuple[int, list[SettingRow]]:
        """The version, and every knob with what is set and what is in force.  Raises `StoreDown`."""
        async with self._reading:
            view = _readable(await self._read(org))
        stored = view.cluster if org is None else view.org
        return view.version, [
            SettingRow(
                name=knob.name,
                value=stored.get(knob.name),
                effective=view[knob],
                default=effective(knob, view.configured),
                minimum=knob.minimum,
                unit=knob.unit,
                description=knob.doc,
            )
            for knob in KNOBS.values()
            if org is None or knob.per_org
        ]

    async def patch(self, org: OrgId | None, changes: Mapping[str, object]) -> int:
        """Set (None: clear) several knobs, all or none, for an org or (None) the cluster.  The version afterwards.

        Raises `Misconfigured` with everything that is wrong with the request, or `StoreDown`.
        """
        async with self._reading:
            stored = await self._store.settings(org)
            problems = patch_problems(changes, stored=stored, configured=self._configured, for_org=org is not None)
            if problems:
                raise Misconfigured("; ".join(problems))
            checked = {name: value for name, value in changes.items() if value is None or isinstance(value, int)}
            try:
                return await self._store.patch_settings(org, checked)
            finally:
                for cached in self._cache.values():
                    cached.checked_at = -CACHE_SECONDS

    async def _current(self, org: OrgId | None) -> _Cached:
        if (cached := self._fresh(org)) is not None:
            return cached
        async with self._reading:  # one attempt at a time; the others find its answer
            return self._fresh(org) or await self._read(org)

    def _fresh(self, org: OrgId | None) -> _Cached | None:
        cached = self._cache.get(org)
        is_fresh = cached is not None and self._clock.monotonic() < cached.checked_at + CACHE_SECONDS
        return cached if is_fresh else None

    async def _read(self, org: OrgId | None) -> _Cached:
        failure = None
        try:
            version = await self._store.settings_version()  # first: a change in between must not look older
            view = SettingsView(
                org={} if org is None else _known(await self._store.settings(org)),
                cluster=_known(await self._store.settings(None)),
                configured=self._configured,
                version=version,
            )
        except StoreDown as error:
            failure = error
            view = self._remembered(org)
        self._cache[org] = cached = _Cached(view, self._clock.monotonic(), failure)
        self._cache.move_to_end(org)
        if len(self._cache) > ORGS_CACHED_MAX:
            self._cache.popitem(last=False)
        return cached

    def _remembered(self, org: OrgId | None) -> SettingsView:
        if org in self._cache:
            return self._cache[org].view
        if None in self._cache:
            return self._cache[None].view
        return SettingsView(org={}, cluster={}, configured=self._configured, version=0)


def _readable(cached: _Cached) -> SettingsView:
    if cached.failure is not None:
        raise StoreDown("the live settings cannot be read: the store is unreachable") from cached.failure
    return cached.view


class SettingsRefresh:
    """Reads settings every ten seconds, for those who only peek."""

    def __init__(self, *, settings: LiveSettings) -> None:
        self._settings = settings

    async def run(self) -> Never:
        while True:
            await self.tick()
            await self._settings.refresh_due.next()

    async def tick(self) -> None:
        """One reading.  Never fails."""
        await self._settings.refresh()


def _known(values: Values) -> Values:
    """Without what a newer release stored and this one does not know."""
    return {name: value for name, value in values.items() if name in KNOBS}
