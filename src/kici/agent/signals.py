"""Signals of the agent, told to its loop.

The loop's own `add_signal_handler` makes objects of all the signals there are, for each handler anew: a good part of
what an agent does that was forked a moment ago.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

READ_BYTES: Final = 4096


def handle_signals(loop: asyncio.AbstractEventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
    """Call these on the loop, as long as this process lives.  From the main thread, once."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def come() -> None:
        with suppress(BlockingIOError):
            for number in os.read(reader, READ_BYTES):
                if number in handlers:
                    handlers[signal.Signals(number)]()

    loop.add_reader(reader, come)
    _ = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in handlers:
        _ = signal.signal(number, _noted)
        signal.siginterrupt(number, False)  # noqa: FBT003 - it takes no names; calls of C libraries go on, too


def _noted(*_: object) -> None:
    """It is in the pipe."""
