"""Verdicts: why a job is where it is, as values that explain themselves.

Each step of routing and admission answers with one of these.  One is stored for each job and instance; people
see the one nearest to running (`nearness`), put into words by `domain.say`.
They are structs, not dataclasses, because a closed union of tagged structs is what JSON decodes to by itself:
`{"kind": "at-cap", ...}`.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from kici.domain.ids import AgentId, Instant, JobId, ScalerName


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class _Verdict(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_kebab, rename="camel", omit_defaults=True
):
    """Base of all verdicts: the JSON form."""


class NearMiss(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The label set of one scaler that comes nearest to a demand, and what stands between."""

    scaler: ScalerName
    label_set: tuple[str, ...]
    """As declared in the configuration."""
    missing: tuple[str, ...] = ()
    """Labels that the job asks for and the set lacks."""
    excluded: tuple[str, ...] = ()
    """Labels that the set has and the job excludes."""
    gate: tuple[str, ...] = ()
    """Labels that a job must name to use the set, and this one does not."""

    @property
    def distance(self) -> int:
        """Obstacles between the job and the set; a closed gate is one, however many labels it wants."""
        return len(self.missing) + len(self.excluded) + bool(self.gate)


class CapName(StrEnum):
    """The limits that can refuse a spawn, as the configuration calls them."""

    MAX_AGENTS = "maxAgents"
    GLOBAL_MAX_AGENTS = "globalMaxAgents"
    RESOURCE_CAP = "resourceCap"
    GLOBAL_RESOURCE_CAP = "globalResourceCap"
    MACHINE_POOL = "machinePool"


class Dimension(StrEnum):
    AGENTS = "agents"
    CPUS = "cpus"
    MEMORY = "memory"
    """In bytes."""


class Running(_Verdict, frozen=True, kw_only=True):
    agent_id: AgentId


class Dispatched(_Verdict, frozen=True, kw_only=True):
    agent_id: AgentId


class SpawnBooting(_Verdict, frozen=True, kw_only=True):
    """An agent for this very job is being made."""

    agent_id: AgentId
    scaler: ScalerName
    since: Instant
    trouble: str | None = None
    """What was said last of why it takes long: a provider that is asked again, a try before this one."""


class AgentsBusy(_Verdict, frozen=True, kw_only=True):
    """Agents that fit are connected, and none has a free slot."""

    count: int
    labels: tuple[str, ...] = ()


class AtCap(_Verdict, frozen=True, kw_only=True):
    """A limit is reached: `used + requested` would be more than `limit`."""

    cap: CapName
    dimension: Dimension
    used: float
    requested: float
    limit: float
    scaler: ScalerName
    pool: str | None = None
    """The machine pool, where it is the one that refused."""

    @property
    def is_hopeless(self) -> bool:
        """No end of other agents could make room."""
        return self.requested > self.limit


class InBackoff(_Verdict, frozen=True, kw_only=True):
    """The scaler failed to provide agents and is not asked until a moment."""

    scaler: ScalerName
    failures: int
    until: Instant
    last_error: str = ""
    is_repeated: bool = False
    """As many failures in a row as call for a person."""
    is_external: bool = False
    """A provisioning workflow makes the agents, not this host."""


class SpawnFailed(_Verdict, frozen=True, kw_only=True):
    text: str
    scaler: ScalerName | None = None


class Draining(_Verdict, frozen=True, kw_only=True):
    """The coordinator starts nothing new."""


class QueueFull(_Verdict, frozen=True, kw_only=True):
    depth: int
    limit: int


class WaitingForNeeds(_Verdict, frozen=True, kw_only=True):
    needs: tuple[JobId, ...]


class AgentDoesNotFit(_Verdict, frozen=True, kw_only=True):
    """The agent nearest to fitting, and what rules it out."""

    agent_id: AgentId
    reason: str


class NoScalerMatches(_Verdict, frozen=True, kw_only=True):
    labels: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    nearest: tuple[NearMiss, ...] = ()
    """Nearest first; empty when no scaler is configured."""


class Unroutable(_Verdict, frozen=True, kw_only=True):
    """No agent and no scaler anywhere could run it, and it ends when that stays so."""

    labels: tuple[str, ...] = ()
    since: Instant
    ends_at: Instant | None = None
    """None: it may wait for ever."""


Verdict = (
    Running
    | Dispatched
    | SpawnBooting
    | AgentsBusy
    | AtCap
    | InBackoff
    | SpawnFailed
    | Draining
    | QueueFull
    | WaitingForNeeds
    | AgentDoesNotFit
    | NoScalerMatches
    | Unroutable
)

_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[Verdict]] = msgspec.json.Decoder(Verdict)


def encode(verdict: Verdict) -> bytes:
    return _encoder.encode(verdict)


def decode(text: bytes | str) -> Verdict | None:
    """None for what this version does not know: a newer coordinator may have written it."""
    try:
        return _decoder.decode(text)
    except msgspec.ValidationError:
        return None


_ORDER: Final[tuple[type[_Verdict], ...]] = (
    Running,
    Dispatched,
    SpawnBooting,
    AgentsBusy,
    AtCap,
    InBackoff,
    SpawnFailed,
    Draining,
    QueueFull,
    WaitingForNeeds,
    AgentDoesNotFit,
    NoScalerMatches,
    Unroutable,
)
_PLACE: Final = {kind: place for place, kind in enumerate(_ORDER)}
_HOPELESS: Final = len(_ORDER)
_FAR: Final = 1_000_000


def nearness(verdict: Verdict) -> tuple[int, int]:
    """Sorts verdicts of one job: the nearest to running first."""
    place = _PLACE[type(verdict)]
    match verdict:
        case AtCap() if verdict.is_hopeless:
            return _HOPELESS, 0
        case InBackoff(until=until):
            return place, until
        case SpawnBooting(since=since):
            return place, since
        case NoScalerMatches(nearest=nearest):
            return place, nearest[0].distance if nearest else _FAR
        case _:
            return place, 0


def nearest_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=nearness)
