"""Which files a Dockerfile copies into its image: the ones that have to go along with a job that builds it.

Only what the text itself says: a name that holds a variable is left to the engine, which will miss it and say where.
"""

import json
import re
from collections.abc import Iterator
from typing import Final

_CONTINUED: Final = re.compile(r"\\[ \t]*\n(?:[ \t]*#[^\n]*\n)*")
_ELSEWHERE: Final = re.compile(r"[a-z][a-z0-9+.-]*://|git@|<<", re.IGNORECASE)


def copied_files(dockerfile: str) -> tuple[str, ...]:
    """Paths and patterns below the folder of the build, `.` for all of it; in their order, each once."""
    found = [source for line in _instructions(dockerfile) for source in _sources(line)]
    return tuple(dict.fromkeys(found))


def _instructions(dockerfile: str) -> Iterator[str]:
    for line in _CONTINUED.sub(" ", f"{dockerfile}\n").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def _sources(instruction: str) -> Iterator[str]:
    name, _, rest = instruction.partition(" ")
    if name.upper() not in ("COPY", "ADD"):
        return
    words = rest.split()
    while words and words[0].startswith("--"):
        if words.pop(0).startswith("--from="):
            return
    if words and words[0].startswith("["):
        try:
            words = [str(word) for word in json.loads(" ".join(words))]
        except ValueError:
            return
    for word in words[:-1]:
        if "$" not in word and not _ELSEWHERE.match(word):
            yield "/".join(part for part in word.split("/") if part not in ("", ".")) or "."
