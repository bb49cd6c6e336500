"""Short commands that change this host, as ourselves or with the rights that sudo gives: `ip`, `chown`, `kill`, …

A command that fails says which one it was, how it ended, how long it ran and what it printed last: that text is what
an operator reads when a microVM could not be made.
"""

import asyncio
import shlex
import time
from collections.abc import Sequence
from typing import Final

from kici.adapters.short_commands import as_stdin, outputs
from kici.domain.errors import DeterministicRefusal, Retryable

COMMAND_SECONDS: Final = 30.0
OUTPUT_CHARS_MAX: Final = 2048
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
"""Tools of administrators are in folders that services often do not look into."""
_WITH_SUDO: Final = frozenset({"ip", "nft", "sysctl", "iptables", "chown", "chmod", "kill", "tee", "mkdir"})


class CommandFailed(Retryable):
    """A command ended, and not well."""

    def __init__(self, message: str, *, output: str) -> None:
        super().__init__(message)
        self.output = output


class HostCommands:
    """`sudo` False: with our own rights."""

    def __init__(self, *, sudo: bool = False) -> None:
        self._sudo = sudo

    @property
    def sudo(self) -> bool:
        return self._sudo

    def prefix(self, program: str) -> tuple[str, ...]:
        """What stands before a program that needs more rights than we may have."""
        return ("sudo", "-n") if self._sudo and program in _WITH_SUDO else ()

    async def run(self, *argv: str, stdin: str = "", seconds: float = COMMAND_SECONDS) -> str:
        """Run to the end; its standard output.

        Raises `CommandFailed`, `DeterministicRefusal` for a program that is not there, `Retryable` when it takes
        too long.  Cancelling the call kills the command, so what it did is undecided.
        """
        command = (*self.prefix(argv[0]), *argv)
        began = time.monotonic()
        process = await self._start(command, stdin)
        try:
            output, errors = await outputs(process, seconds=seconds)
        except TimeoutError as error:
            raise Retryable(f"{shlex.join(argv)} did not end within {seconds:g} s") from error
        if process.returncode:
            raise _failed(argv, process.returncode, time.monotonic() - began, errors.decode(errors="replace"))
        return output.decode(errors="replace")

    async def _start(self, command: Sequence[str], stdin: str) -> asyncio.subprocess.Process:
        try:
            with as_stdin(stdin) as given:
                return await asyncio.create_subprocess_exec(
                    *command,
                    stdin=given,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={"PATH": PATH, "LC_ALL": "C"},
                )
        except FileNotFoundError as error:
            raise DeterministicRefusal(f"{command[0]} is not installed on this host, or not in {PATH}") from error
        except OSError as error:
            raise Retryable(f"cannot run {command[0]}: {error.strerror}") from error


def _failed(argv: Sequence[str], code: int, seconds: float, errors: str) -> CommandFailed:
    how = f"code {code}" if code > 0 else f"signal {-code}"
    text = errors.strip()[-OUTPUT_CHARS_MAX:]
    message = f"{shlex.join(argv)} failed with {how} after {seconds:.2f} s"
    return CommandFailed(f"{message}: {text}" if text else message, output=text)
