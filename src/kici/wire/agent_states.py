"""States, timers and constants of the agent's half of the conversation."""

from enum import StrEnum
from typing import Final

HANDSHAKE_SECONDS: Final = 30.0
FLUSH_SECONDS: Final = 0.1
HEARTBEAT_SECONDS_MIN: Final = 1.0
SILENCE_SECONDS: Final = 50.0
"""Without any sign of life (frames, pings, pongs) the connection counts as dead."""
TIMEOUT_GRACE_SECONDS: Final = 10.0
CANCEL_GRACE_SECONDS_MAX: Final = 30.0
STOP_GRACE_SECONDS: Final = 3.0
STOP_SECONDS: Final = 3.5
"""From the agent's own TERM to its exit, acknowledged or not; clean-up has the rest of the fourth second."""


class Phase(StrEnum):
    OFFLINE = "offline"
    CONNECTING = "connecting"
    CLAIMING = "claiming"
    AUTHENTICATING = "authenticating"
    REGISTERING = "registering"
    REGISTERED = "registered"
    OVER = "over"


class Timer(StrEnum):
    RETRY = "retry"
    HANDSHAKE = "handshake"
    HEARTBEAT = "heartbeat"
    SILENCE = "silence"
    FLUSH = "flush"
    IDLE = "idle"
    STEP_TIMEOUT = "step timeout"
    ORPHAN = "orphan"
    STOP = "stop"
