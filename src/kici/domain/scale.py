"""Answers of a scaler that was asked to make an agent for a job."""

from dataclasses import dataclass

from kici.domain.ids import AgentId
from kici.domain.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawning:
    """An agent for this job is being made, or was already."""

    agent_id: AgentId
    backend_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AtCapacity:
    verdict: Verdict
    is_burst: bool = False
    """Agents that are admitted but not yet made are what fills the cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBackend:
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Not now: draining, or the scaler backs off."""

    verdict: Verdict
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    error: str


ScaleAnswer = Spawning | AtCapacity | NoBackend | Skipped | Failed
