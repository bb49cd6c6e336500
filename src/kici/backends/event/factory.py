"""Event backends from entries of the configuration."""

from kici.backends.event.backend import EventSettings
from kici.config.model import ScalerEntry


def event_settings(entry: ScalerEntry) -> EventSettings:
    """What an entry says of its event scaler."""
    return EventSettings(
        scaler=entry.name,
        sets=tuple(label_set.labels for label_set in entry.label_sets),
        targets=entry.provisioning_targets,
        claim_ttl_ms=entry.claim_ttl_seconds * 1000,
        agent_token_ttl_ms=entry.agent_token_ttl_seconds * 1000,
    )
