"""Errors by what the caller should do.

Borders translate theirs into these; nothing of a driver leaks past its adapter.
"""


class KiciError(Exception):
    """Base of all our errors.  The message names the object, what was tried and what to do next."""


class Retryable(KiciError):
    """Try again, not before `after_seconds` (0: whenever suits)."""

    def __init__(self, message: str, *, after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class StoreDown(Retryable):
    """The store did not answer or failed the commit: the write may or may not have happened."""


class Permanent(KiciError):
    """Trying again cannot help."""


class LockContended(Retryable):
    """Another held a lock of the store for longer than the caller could wait.  Nothing was written."""


class DeterministicRefusal(Permanent):
    """The host refuses this launch, and will until an operator changes something."""


class JobRefused(Permanent):
    """This one job can never be started as it is: its image, its log-in.  Others are not concerned."""


class Misconfigured(Permanent):
    """The configuration is wrong; the message says where."""


class Conflict(KiciError):
    """The object is not in the state that the change was decided on."""


class NotFound(KiciError):
    """No such object."""


class NoCapacity(KiciError):
    """A limit is reached; the message names it."""


class Denied(KiciError):
    """The caller may not do this."""


class Bug(AssertionError):
    """A broken invariant.  Only the supervisor catches it."""
