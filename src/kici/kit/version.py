"""The version of this software: the one place where code reads it."""

from typing import Final

VERSION: Final = "0.1.0"
