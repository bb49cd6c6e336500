"""Why an order was not carried out: from the wire back to the error that a backend of this host would have raised."""

from typing import Final

import msgspec

from kici.domain.errors import DeterministicRefusal, JobRefused, KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import ScalerName
from kici.ports.workers import WorkerFull
from kici.wire.worker_messages import Answer, Fault, FaultKind

_ERRORS: Final[dict[str, type[KiciError]]] = {
    FaultKind.NO_CAPACITY: NoCapacity,
    FaultKind.REFUSED: DeterministicRefusal,
    FaultKind.JOB_REFUSED: JobRefused,
    FaultKind.PERMANENT: Permanent,
}


def error_of(fault: Fault, scaler: ScalerName) -> KiciError:
    """A kind that we do not know may pass with time.  `scaler`: as it is called here."""
    if fault.cap is not None:
        return WorkerFull(fault.text, msgspec.structs.replace(fault.cap, scaler=scaler))
    kind = _ERRORS.get(fault.kind)
    return Retryable(fault.text, after_seconds=fault.after_seconds) if kind is None else kind(fault.text)


def raise_fault(answer: Answer, scaler: ScalerName) -> None:
    """Raise what an answer says went wrong, if anything did."""
    if answer.fault is not None:
        raise error_of(answer.fault, scaler)
