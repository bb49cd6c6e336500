"""Time for commands that talk to a coordinator step by step, without an event loop and its ports."""

import time


def monotonic() -> float:
    return time.monotonic()  # noqa: TID251  # the client is at the edge of the world: nothing tests against its clock


def wall() -> float:
    """Seconds since the epoch, for ages that people read."""
    return time.time()  # noqa: TID251  # as above


def pause(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251  # as above
