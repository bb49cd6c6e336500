"""Warm pools: how many agents to start and which idle ones to let go, so that each pool has its size.

There is no pool to take from: a ready warm agent is an ordinary idle agent.  Counting uses the labels that a job
for the pool would name (declared ones and platform taints), making uses the declared set.

Jobs go first: while one is refused an agent by a limit that a pool takes part in, the pool is not filled, and its idle
agents give way, one for each class of waiting jobs at a time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from kici.config.model import ScalersConfig, WarmPool
from kici.decide.entries import Routable
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.job import Demand
from kici.domain.labels import set_key
from kici.domain.verdict import AtCap, CapName


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One label set that keeps agents warm."""

    key: str
    """Of the declared labels."""
    routable: Routable
    size: int
    idle_timeout_ms: int

    @property
    def scaler(self) -> ScalerName:
        return self.routable.scaler

    @property
    def demand(self) -> Demand:
        """What a job for this pool asks: an agent that serves it is ready."""
        return Demand(labels=frozenset((*self.routable.label_set, *self.routable.taints)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inert:
    """A label set whose pool cannot be filled, and why."""

    scaler: ScalerName
    label_set: tuple[str, ...]
    reason: str


def pools_of(config: ScalersConfig, routables: Iterable[Routable]) -> tuple[list[Pool], list[Inert]]:
    """The pools of a configuration, and those that it asks for in vain."""
    settings: dict[ScalerName, WarmPool] = {entry.name: entry.warm_pool for entry in config.scalers}
    pools: list[Pool] = []
    inert: list[Inert] = []
    for routable in routables:
        found = pool_of(routable, settings[routable.scaler])
        if isinstance(found, Pool):
            pools.append(found)
        elif found is not None:
            inert.append(found)
    return pools, inert


def pool_of(routable: Routable, warm: WarmPool) -> Pool | Inert | None:
    """The pool of one label set, or why it cannot be filled; None: nobody wants one."""
    if not warm.enabled:
        return None
    pool = Pool(
        key=set_key(routable.label_set),
        routable=routable,
        size=warm.size,
        idle_timeout_ms=round(warm.idle_timeout_seconds * 1000),
    )
    reason = _unfillable(pool)
    if reason is None:
        return pool
    return Inert(scaler=routable.scaler, label_set=routable.label_set, reason=reason)


def _unfillable(pool: Pool) -> str | None:
    routable = pool.routable
    closed = routable.gate - pool.demand.labels
    if closed:
        return f"its gate {', '.join(sorted(closed))} is not among its labels, so its own agents would not count"
    try:
        shape = routable.shape()
    except ValueError as error:
        return str(error)
    if not shape.requests:
        return "it declares no resources, so no job could be told to fit an agent made before it"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """One pool at one moment."""

    pool: Pool
    ready: int
    """Idle agents that could serve a job for the pool, however they came to be."""
    in_flight: int
    """Warm spawns of the pool whose agents are not connected, now or any more."""


def shares(short: AtCap, scaler: ScalerName, pools: Mapping[ScalerName, str | None]) -> bool:
    """Whether agents of `scaler` count under the limit that refused a job.

    `pools`: this host's scalers, with the machine pool of each.
    """
    if short.scaler not in pools:
        return False
    match short.cap:
        case CapName.GLOBAL_MAX_AGENTS | CapName.GLOBAL_RESOURCE_CAP:
            return True
        case CapName.MACHINE_POOL:
            return pools.get(scaler) == short.pool
        case CapName.MAX_AGENTS | CapName.RESOURCE_CAP:
            return scaler == short.scaler
        case _:
            assert_never(short.cap)


def fill(
    states: Sequence[PoolState],
    budgets: Mapping[ScalerName, int],
    *,
    total: int,
    held_back: Collection[ScalerName] = (),
) -> list[tuple[Pool, int]]:
    """How many agents to start for each pool.

    `budgets`: room left in each scaler, `total`: on this instance; `held_back`: scalers whose room jobs wait for.
    """
    left = {scaler: 0 if scaler in held_back else room for scaler, room in budgets.items()}
    plan = []
    for state in states:
        deficit = state.pool.size - state.ready - state.in_flight
        count = min(deficit, left.get(state.pool.scaler, 0), total)
        if count > 0:
            left[state.pool.scaler] -= count
            total -= count
            plan.append((state.pool, count))
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAgent:
    """A warm agent without a job."""

    agent_id: AgentId
    registered_at: Instant


def gives_way(
    short: AtCap, idle: Mapping[ScalerName, Sequence[IdleAgent]], pools: Mapping[ScalerName, str | None]
) -> tuple[ScalerName, AgentId] | None:
    """The idle warm agent to let go so that a refused job gets its room: the oldest that counts under that limit."""
    candidates = [
        (agent.registered_at, agent.agent_id, scaler)
        for scaler, agents in idle.items()
        if shares(short, scaler, pools)
        for agent in agents
    ]
    if not candidates:
        return None
    _, agent_id, scaler = min(candidates)
    return scaler, agent_id


def surplus(pool: Pool, idle: Iterable[IdleAgent], *, now: Instant, at_once: bool = False) -> list[AgentId]:
    """Agents to let go: only those above the size, oldest first, and only if they idled long enough.

    `at_once` is for a pool whose size a reload has lowered: the surplus goes whatever its age.
    """
    ordered = sorted(idle, key=lambda agent: (agent.registered_at, agent.agent_id))
    above = ordered[: max(0, len(ordered) - pool.size)]
    return [agent.agent_id for agent in above if at_once or now - agent.registered_at >= pool.idle_timeout_ms]
