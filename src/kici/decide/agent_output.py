"""A line that an agent program printed, as a record for our own log.

Agents print records of their own, one JSON object a line, and so may anybody who runs in their place.  What such a
record says of itself is taken; who it is from, and for which job, is not for the line to say.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Final

LEVELS: Final = {
    "trace": "debug",
    "debug": "debug",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
    "critical": "error",
}
"""What others call levels; anything else is `info`."""
SERVICE: Final = "agent"
OURS: Final = frozenset(
    {
        *("service", "time", "level", "message"),
        *("agentId", "runId", "jobId", "requestId", "logsSource"),
        *("agent_id", "run_id", "job_id", "request_id", "logs_source"),
    }
)
"""Fields that a line cannot set."""
_TOKEN: Final = re.compile(r"\b(k[a-z]{1,3}_)[0-9a-f]{32,}")
"""Tokens of agents and of people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a line says."""

    level: str
    text: str
    more: dict[str, object] = field(default_factory=dict)
    """Its other fields."""


def without_tokens(text: str) -> str:
    """What a program prints of its credentials is nobody's to read: not in a log, not in the reason of a failure."""
    return _TOKEN.sub(r"\1***", text)


def said(line: str) -> Said:
    """An object is a record; everything else is a message."""
    try:
        record = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        return Said(level="info", text=line)
    more = {str(name): value for name, value in record.items() if name not in OURS}
    return Said(
        level=LEVELS.get(str(record.get("level", "")).lower(), "info"),
        text=str(record.get("message", "")),
        more=more,
    )
