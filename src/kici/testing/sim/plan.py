"""What one seed decides before anything runs: how large the world is, which faults it knows, and how often.

Each seed knows only some of the faults, and a few seeds know none or one: a fault that is always there hides
what happens without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kici.domain import knobs
from kici.testing.seeded_entropy import SeededEntropy

EVERY_SECONDS: Final[Mapping[str, tuple[float, float]]] = {
    "cut": (2, 30),
    "half-open": (10, 60),
    "blackhole": (20, 90),
    "outage": (20, 90),
    "kill": (15, 90),
    "stop": (30, 120),
    "shutdown": (40, 150),
    "jump": (20, 90),
    "crash": (10, 60),
    "death": (5, 60),
    "freeze": (10, 60),
    "term": (15, 60),
    "drain": (30, 90),
    "drain-agent": (15, 60),
    "revoke": (20, 90),
    "reload": (15, 60),
    "cancel-job": (2, 20),
    "cancel-run": (3, 30),
}
"""What happens now and then, and the range of its mean interval."""
ODDS: Final[Mapping[str, tuple[float, float]]] = {
    "error-before": (0.002, 0.08),
    "error-after": (0.002, 0.08),
    "slow-store": (0.002, 0.05),
    "kill-before-commit": (0.0002, 0.002),
    "kill-after-commit": (0.0002, 0.002),
    "kill-in-backend": (0.005, 0.05),
    "slow-boot": (0.1, 0.6),
    "never-registers": (0.02, 0.3),
    "dies-before": (0.05, 0.4),
    "dies-after": (0.05, 0.4),
    "refuses": (0.02, 0.3),
    "fails": (0.05, 0.3),
    "fails-after-making": (0.05, 0.3),
    "hangs": (0.01, 0.1),
    "slow-settle": (0.1, 0.5),
    "slow-destroy": (0.1, 0.8),
    "destroy-fails": (0.1, 0.5),
    "repeats": (0.1, 0.5),
    "exit-lost": (0.1, 1.0),
    "exit-late": (0.1, 1.0),
    "power-loss": (0.1, 0.8),
    "reload-fails": (0.1, 0.5),
    "hint-lost": (0.1, 1.0),
}
"""What may happen whenever there is an occasion, and the range of its probability."""
LATER_EVERY_SECONDS: Final[Mapping[str, tuple[float, float]]] = {
    "lie": (1, 20),
    "pause": (10, 60),
    "partition": (15, 60),
}
"""As `EVERY_SECONDS`, drawn by themselves: seeds that do not know them do what they did before there were any."""
LATER_ODDS: Final[Mapping[str, tuple[float, float]]] = {
    "ledger-fails": (0.01, 0.1),
}
CLOUD_EVERY_SECONDS: Final[Mapping[str, tuple[float, float]]] = {
    "pause": (8, 60),
    "partition": (10, 60),
    "cloud-cut": (10, 60),
    "cloud-death": (5, 40),
}
"""Of seeds with a cloud."""
CLOUD_ODDS: Final[Mapping[str, tuple[float, float]]] = {
    "cloud-slow": (0.05, 0.6),
    "cloud-loses": (0.02, 0.3),
    "cloud-refuses": (0.02, 0.3),
    "cloud-lies": (0.02, 0.3),
    "cloud-duplicates": (0.05, 0.5),
    "cloud-never-boots": (0.02, 0.3),
    "cloud-boots-twice": (0.05, 0.5),
    "cloud-kills": (0.02, 0.3),
}
CLOUD_SETTLE_SECONDS: Final = 2400.0
"""The grace of the reaper twice over, after the time for which an agent may be away."""
CLOUD_SETTINGS: Final[Mapping[str, int]] = {
    knobs.SCALER_REAP_INTERVAL_MS.name: 10_000,
    knobs.SCALER_REAP_STRANDED_TIMEOUT_MS.name: 240_000,
    knobs.SCALER_REAP_REATTEMPT_INTERVAL_MS.name: 60_000,
}
WORKER_EVERY_SECONDS: Final[Mapping[str, tuple[float, float]]] = {
    "worker-kill": (10, 60),
    "worker-cut": (5, 40),
    "worker-dark": (10, 60),
    "worker-death": (5, 40),
}
"""Of seeds with workers."""
WORKER_SEEDS: Final = 0.2
CLOUD_SEEDS: Final = 0.25
CLOUD_FAULT_SEEDS: Final = 0.4
POOLED_SEEDS: Final = 0.3
LATER_SEEDS: Final = 0.2
"""How many of the seeds with several kinds of faults know each of them."""
LARGEST_CPUS: Final = 4.0
"""What the largest job requests."""
CALM_SEEDS: Final = 0.06
ONE_FAULT_SEEDS: Final = 0.12
SECOND_MS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything is drawn from `seed`; fields may be replaced to look at something in particular."""

    seed: int
    jobs: int = 40
    coordinators: int = 1
    static_agents: int = 4
    warm_agents: int = 0
    """Size of the warm pool; 0: there is none."""
    cloud_agents: int = 0
    """How many machines the cloud makes at most; 0: there is no cloud."""
    is_balanced: bool = False
    """Machines of the cloud reach any coordinator, as behind a load balancer."""
    skew_ms_max: int = 0
    """How far the clocks of several coordinators may differ from that of their store."""
    workers: int = 0
    """Hosts that spawn for coordinators."""
    worker_agents: int = 3
    """How many agents each of them makes at most."""
    agents_max: int = 20
    """Of all scalers together."""
    pool_cpus: float = 0.0
    """Of the machine pool, if all coordinators are on one host and share one; 0: there is none."""
    chaos_seconds: float = 120.0
    """How long jobs are submitted and faults happen."""
    settle_seconds: float = 1200.0
    """Within which everything must come to rest once faults have stopped."""
    store_seconds: tuple[float, float] = (0.0002, 0.004)
    link_seconds: tuple[float, float] = (0.001, 0.020)
    every: Mapping[str, float]
    """Mean seconds between faults of a kind; kinds that are absent never happen."""
    odds: Mapping[str, float]
    settings: Mapping[str, int]
    """Live settings of the coordinator."""

    @property
    def is_calm(self) -> bool:
        return not self.every and not self.odds


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    entropy = SeededEntropy(seed).fork("plan")
    kinds = _kinds(entropy)
    later = SeededEntropy(seed).fork("later")
    plan = Plan(
        seed=seed,
        coordinators=entropy.choice([1, 1, 1, 1, 1, 1, 1, 2, 2, 3]),
        jobs=round(entropy.uniform(15, 60)),
        static_agents=round(entropy.uniform(1, 6)),
        warm_agents=entropy.choice([0, 0, 1, 2, 3]),
        agents_max=round(entropy.uniform(4, 22)),
        chaos_seconds=entropy.uniform(40, 160),
        store_seconds=(0.0002, entropy.choice([0.001, 0.004, 0.1])),
        link_seconds=(0.001, entropy.choice([0.005, 0.02, 1.0])),
        every={
            **{kind: entropy.uniform(*span) for kind, span in EVERY_SECONDS.items() if kind in kinds},
            **_later(LATER_EVERY_SECONDS, later, kinds),
        },
        odds={
            **{kind: entropy.uniform(*span) for kind, span in ODDS.items() if kind in kinds},
            **_later(LATER_ODDS, later, kinds),
        },
        settings=_settings(entropy),
    )
    plan = replace(plan, pool_cpus=_pool_cpus(plan, later))
    plan = _with_cloud(plan, later.fork("cloud"), is_calm=len(kinds) < 2)
    return _with_workers(plan, later.fork("workers"), is_calm=len(kinds) < 2)


def _kinds(entropy: SeededEntropy) -> frozenset[str]:
    all_kinds = [*EVERY_SECONDS, *ODDS]
    sort = entropy.uniform(0, 1)
    if sort < CALM_SEEDS:
        return frozenset()
    if sort < CALM_SEEDS + ONE_FAULT_SEEDS:
        return frozenset([entropy.choice(all_kinds)])
    share = entropy.uniform(0.1, 0.6)
    return frozenset(kind for kind in all_kinds if entropy.chance(share))


def _later(spans: Mapping[str, tuple[float, float]], entropy: SeededEntropy, kinds: frozenset[str]) -> dict[str, float]:
    drawn = {kind: (entropy.chance(LATER_SEEDS), entropy.uniform(*span)) for kind, span in spans.items()}
    return {kind: value for kind, (is_known, value) in drawn.items() if is_known and len(kinds) > 1}


def _with_cloud(plan: Plan, entropy: SeededEntropy, *, is_calm: bool) -> Plan:
    """The same in a cluster with a cloud, for some seeds."""
    if not entropy.chance(CLOUD_SEEDS):
        return plan
    share = 0.0 if is_calm else CLOUD_FAULT_SEEDS
    every = {kind: entropy.uniform(*span) for kind, span in CLOUD_EVERY_SECONDS.items() if entropy.chance(share)}
    odds = {kind: entropy.uniform(*span) for kind, span in CLOUD_ODDS.items() if entropy.chance(share)}
    return replace(
        plan,
        coordinators=entropy.choice([1, 2, 2, 3]),
        jobs=min(plan.jobs, 40),
        cloud_agents=round(entropy.uniform(2, 6)),
        is_balanced=entropy.chance(0.5),
        skew_ms_max=entropy.choice([0, 3000, 600_000]),
        settle_seconds=CLOUD_SETTLE_SECONDS,
        every={**plan.every, **every},
        odds={**plan.odds, **odds},
        settings={**plan.settings, **CLOUD_SETTINGS},
    )


def _with_workers(plan: Plan, entropy: SeededEntropy, *, is_calm: bool) -> Plan:
    """The same with workers, for some seeds."""
    if not entropy.chance(WORKER_SEEDS):
        return plan
    share = 0.0 if is_calm else CLOUD_FAULT_SEEDS
    every = {kind: entropy.uniform(*span) for kind, span in WORKER_EVERY_SECONDS.items() if entropy.chance(share)}
    return replace(
        plan,
        workers=entropy.choice([1, 1, 2]),
        jobs=min(plan.jobs, 40),
        worker_agents=round(entropy.uniform(1, 4)),
        every={**plan.every, **every},
    )


def _pool_cpus(plan: Plan, entropy: SeededEntropy) -> float:
    """Enough for the largest job beside all warm agents."""
    is_pooled, spare = entropy.chance(POOLED_SEEDS), entropy.uniform(1, 8)
    return LARGEST_CPUS + plan.warm_agents * plan.coordinators + spare if is_pooled else 0.0


def _settings(entropy: SeededEntropy) -> Mapping[str, int]:
    return {
        knobs.AGENT_RECONNECT_GRACE_MS.name: entropy.choice([0, 10 * SECOND_MS, 60 * SECOND_MS]),
        knobs.DISPATCH_ACK_TIMEOUT_MS.name: entropy.choice([2 * SECOND_MS, 10 * SECOND_MS]),
        knobs.SCALER_SPAWN_TIMEOUT_MS.name: entropy.choice([30 * SECOND_MS, 120 * SECOND_MS]),
        knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name: entropy.choice([1 * SECOND_MS, 5 * SECOND_MS]),
        knobs.SCALER_PROVISION_BACKOFF_MAX_MS.name: 30 * SECOND_MS,
        knobs.UNROUTABLE_GRACE_MS.name: 20 * SECOND_MS,
    }
