"""What work that comes again does while the store is down: say so, and leave the rest to its next turn."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kici.domain.errors import StoreDown
from kici.observe.events import Event, emit


@contextmanager
def sits_out_outages(during: str, *, then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let `StoreDown` end the block and nothing else, and do `then`.  `during`: what was being done, for the log."""
    try:
        yield
    except StoreDown as error:
        emit(Event.STORE_DOWN, level=logging.WARNING, during=during, error=str(error))
        then()
