"""How commands fail: one sentence on the error output that says what to do next, and an exit code."""

from typing import Any

import click


class CliError(click.ClickException):
    """Exit code 1."""


class NoCoordinator(CliError):
    """Nothing answers where the coordinator should be."""


class Refused(CliError):
    """The coordinator answered with a problem."""

    def __init__(self, message: str, *, status: int, answer: dict[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer
        """The body, decoded."""


class NeverRan(CliError):
    """What was to be run was not started."""

    exit_code = 125
