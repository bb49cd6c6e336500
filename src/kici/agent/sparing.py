"""Leaving out modules that a library imports and does not use here: an agent starts for each job."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without(*names: str) -> Iterator[None]:
    """While the block imports something, these modules are empty, unless somebody has them already.

    Whoever imports them later gets the real ones; what was imported in the block keeps the empty ones.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
