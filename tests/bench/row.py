"""One measured figure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    measure: str
    value: float
    unit: str
    method: str
    store: str = ""
