"""What an interruption means to a command that follows jobs: cancel them, and go on to see them end.

The handler itself sends the request, on a connection of its own, and raises nothing: the output that is being
written at that moment stays whole.  Only a second interruption ends the command.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from kici.cli.client import Client
from kici.cli.errors import CliError


class Cancelling:
    """From its making on, INT and TERM ask the coordinator to cancel what `path` names."""

    def __init__(self, client: Client, path: str) -> None:
        self._client = client
        self._path = path
        self.is_asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupted)

    def cancel(self, *, force: bool) -> None:
        """Best effort: what cannot be cancelled is over, or says so later."""
        client = self._client.again()
        try:
            client.post(self._path, {"force": force, "reason": "interrupted at the command line"})
        except CliError as error:
            _say(f"kici: {error.message}\n")
        finally:
            client.close()

    def _interrupted(self, _: int, __: FrameType | None) -> None:
        if self.is_asked:
            self.cancel(force=True)
            raise KeyboardInterrupt
        self.is_asked = True
        _say("\nkici: cancelling; interrupt again to kill it and leave\n")
        self.cancel(force=False)


def _say(text: str) -> None:
    """Past Python's buffers, which may be in use at the moment of the signal."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode())


def forget_output() -> None:
    """Nobody reads our output any more: let the interpreter's last flush go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
