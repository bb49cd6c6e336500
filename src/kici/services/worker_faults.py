"""Why an order was not carried out, for the wire: our errors by what the coordinator should do."""

import asyncio
from typing import Final

from kici.domain.errors import DeterministicRefusal, JobRefused, NoCapacity, Permanent, Retryable
from kici.ports.workers import WorkerFull
from kici.wire.worker_messages import Fault, FaultKind

TEXT_MAX: Final = 10_000
_KINDS: Final = (
    (NoCapacity, FaultKind.NO_CAPACITY),
    (DeterministicRefusal, FaultKind.REFUSED),
    (JobRefused, FaultKind.JOB_REFUSED),
    (Permanent, FaultKind.PERMANENT),
)


def fault_of(error: BaseException) -> Fault:
    """Whatever has no kind of its own may pass with time."""
    if isinstance(error, asyncio.CancelledError):
        return Fault(kind=FaultKind.RETRYABLE, text="the start was called off")
    text = (str(error) or repr(error))[:TEXT_MAX]
    if isinstance(error, WorkerFull):
        return Fault(kind=FaultKind.NO_CAPACITY, text=text, cap=error.verdict)
    for kind, name in _KINDS:
        if isinstance(error, kind):
            return Fault(kind=name, text=text)
    after_seconds = error.after_seconds if isinstance(error, Retryable) else 0.0
    return Fault(kind=FaultKind.RETRYABLE, text=text, after_seconds=after_seconds)
