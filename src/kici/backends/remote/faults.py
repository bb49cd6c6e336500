"""Why an order was not carried out: from the wire back to the error that a backend of this host would have raised."""

from typing import Final

from kici.domain.errors import DeterministicRefusal, JobRefused, KiciError, NoCapacity, Permanent, Retryable
from kici.wire.worker_messages import Answer, Fault, FaultKind

_ERRORS: Final[dict[str, type[KiciError]]] = {
    FaultKind.NO_CAPACITY: NoCapacity,
    FaultKind.REFUSED: DeterministicRefusal,
    FaultKind.JOB_REFUSED: JobRefused,
    FaultKind.PERMANENT: Permanent,
}


def error_of(fault: Fault) -> KiciError:
    """A kind that we do not know may pass with time."""
    kind = _ERRORS.get(fault.kind)
    return Retryable(fault.text, after_seconds=fault.after_seconds) if kind is None else kind(fault.text)


def raise_fault(answer: Answer) -> None:
    """Raise what an answer says went wrong, if anything did."""
    if answer.fault is not None:
        raise error_of(answer.fault)
