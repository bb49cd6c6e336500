"""Delays that grow."""


def exponential(attempt: int, *, base: float, factor: float = 2.0, maximum: float) -> float:
    """The delay before try number `attempt` (first is 1): `base * factor**(attempt-1)`, at most `maximum`.

    Never overflows, whatever `attempt` is.
    """
    delay = base
    for _ in range(attempt - 1):
        delay *= factor
        if delay >= maximum:
            return maximum
    return min(delay, maximum)
