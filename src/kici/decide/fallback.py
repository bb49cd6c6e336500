"""When the best scaler for a job refuses, the next one that matches is asked: which refusal speaks for all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kici.domain.scale import AtCapacity, Failed, NoBackend, ScaleAnswer, Skipped
from kici.domain.verdict import SpawnFailed, Verdict, nearness

SCALERS_MAX: Final = 16
"""So many scalers are asked for one job at one time."""


def is_refusal(answer: ScaleAnswer) -> bool:
    """Whether another scaler may do what this one does not."""
    return isinstance(answer, AtCapacity | Skipped | Failed)


def verdict_of(answer: ScaleAnswer) -> Verdict | None:
    match answer:
        case AtCapacity(verdict=verdict) | Skipped(verdict=verdict) | NoBackend(verdict=verdict):
            return verdict
        case Failed(error=error):
            return SpawnFailed(text=error)
        case _:
            return None


def spokesman(refusals: Sequence[ScaleAnswer]) -> ScaleAnswer:
    """Of several refusals the one nearest to a yes; it waits no longer than any of them."""
    assert refusals, "somebody refused"
    best = min(refusals, key=_distance)
    waits = [each.retry_after_ms for each in refusals if isinstance(each, Skipped) and each.retry_after_ms is not None]
    return replace(best, retry_after_ms=min(waits)) if isinstance(best, Skipped) and waits else best


def _distance(answer: ScaleAnswer) -> tuple[int, int]:
    verdict = verdict_of(answer)
    return (1_000, 0) if verdict is None else nearness(verdict)
