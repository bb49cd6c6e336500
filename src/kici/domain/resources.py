"""Amounts of cpu and memory: what a job requests, what limits it, what a cap allows."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_MEMORY: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmg])i?\s*\Z", re.IGNORECASE | re.ASCII)
_UNIT: Final = {"k": 1024, "m": 1024**2, "g": 1024**3}

MEMORY_GRAMMAR: Final = 'a number and a unit k, m or g (binary), such as "512m", "2g" or "512Mi"'


def parse_memory(text: str) -> int:
    """Bytes of a memory string.  Units are binary; `512m` and `512Mi` are the same.  Raises `ValueError`."""
    match = _MEMORY.match(text)
    if match is None:
        raise ValueError(f"memory {text!r} is not {MEMORY_GRAMMAR}")
    return math.floor(float(match[1]) * _UNIT[match[2].lower()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Cpus (cores, fractional) and memory (bytes).  Zero means: not declared."""

    cpus: float = 0.0
    memory_bytes: int = 0

    def __bool__(self) -> bool:
        return self.cpus > 0 or self.memory_bytes > 0


NOTHING: Final = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One declared side: None means that the field was not declared."""

    cpus: float | None = None
    memory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """A declaration of one layer: requests (billed against caps) and limits (enforced by the backend)."""

    requests: Ask = Ask()
    limits: Ask = Ask()

    def mirrored(self) -> "ResourceRequest":
        """Each undeclared field taken from the other side, field by field."""
        return ResourceRequest(requests=_fill(self.requests, self.limits), limits=_fill(self.limits, self.requests))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Resolved resources of an agent or a demand."""

    requests: Amount = NOTHING
    limits: Amount = NOTHING


UNDECLARED: Final = ResourceRequest()
RESOLVED_KEPT_MAX: Final = 4096


@lru_cache(maxsize=RESOLVED_KEPT_MAX)  # every job of a kind asks for the same, of every set that fits it
def resolve(*layers: ResourceRequest | None) -> Shape:
    """Resolve layers, strongest first (job, label set, defaults), field by field after mirroring each layer.

    Raises `ValueError` for a memory string that cannot be read.
    """
    requests, limits = Ask(), Ask()
    for layer in layers:
        if layer is not None:
            mirrored = layer.mirrored()
            requests = _fill(requests, mirrored.requests)
            limits = _fill(limits, mirrored.limits)
    return Shape(requests=amount(requests), limits=amount(limits))


def amount(ask: Ask) -> Amount:
    """The amount that an ask declares; undeclared fields are 0.  Raises `ValueError` for bad memory strings."""
    return Amount(cpus=float(ask.cpus or 0.0), memory_bytes=0 if ask.memory is None else parse_memory(ask.memory))


def _fill(ask: Ask, weaker: Ask) -> Ask:
    return Ask(
        cpus=weaker.cpus if ask.cpus is None else ask.cpus,
        memory=weaker.memory if ask.memory is None else ask.memory,
    )
