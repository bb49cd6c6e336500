"""Labels: canonical form, reserved names, and the full list that a scaler-made agent carries."""

from collections.abc import Iterable, Sequence
from typing import Final

RESERVED_PREFIX: Final = "kici:"
SELF_REPORTED_PREFIXES: Final = ("kici:os:", "kici:arch:", "kici:host:", "kici:runtime:", "kici:agent-feature:")
"""Families that an agent may add by itself at registration, whatever its token says."""
ROLES: Final = ("builder", "init-runner")


def canonical(labels: Iterable[str]) -> tuple[str, ...]:
    """Trimmed, lower case, without duplicates, in the given order."""
    return tuple(dict.fromkeys(label.strip().lower() for label in labels))


def set_key(labels: Iterable[str]) -> str:
    """Equal for label sets that are the same whatever their order, case and repetition."""
    return ",".join(sorted(set(canonical(labels))))


def is_reserved(label: str) -> bool:
    """Whether operators and jobs' owners may not declare this label themselves."""
    return label.strip().lower().startswith(RESERVED_PREFIX)


def is_self_reported(label: str) -> bool:
    return label.startswith(SELF_REPORTED_PREFIXES)


def role_labels(roles: Sequence[str] | None) -> tuple[str, ...]:
    """None means all roles; an empty list means execution jobs only."""
    return tuple(f"kici:role:{role}" for role in (ROLES if roles is None else roles))


def scaler_agent_labels(
    label_set: Sequence[str],
    *,
    backend_type: str,
    scaler: str,
    roles: Sequence[str] | None,
    taints: Sequence[str],
) -> tuple[str, ...]:
    """What an agent of this scaler and label set carries, and what its token is bound to.  In this order."""
    return canonical(
        [
            *label_set,
            f"kici:agent:{backend_type}",
            f"kici:scaler:{scaler}",
            *role_labels(roles),
            *taints,
        ]
    )


def outside_scope(labels: Iterable[str], allowed: frozenset[str] | None) -> frozenset[str]:
    """Labels that a token which allows `allowed` (None: any) does not cover; self-reported ones always are."""
    if allowed is None:
        return frozenset()
    return frozenset(label for label in labels if label not in allowed and not is_self_reported(label))
