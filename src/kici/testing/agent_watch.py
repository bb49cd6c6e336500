"""What really runs: living processes that carry the mark of an agent, looked at all the time (Linux)."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kici.ports.processes import MARK

BETWEEN_LOOKS_SECONDS: Final = 0.01


class AgentWatch(threading.Thread):
    """Looks at the agents of all coordinators whose data directories lie in one folder."""

    def __init__(self, folder: Path, *, also: Callable[[], None] = lambda: None) -> None:
        """`also` is called at each look."""
        super().__init__(daemon=True)
        self._folder = folder
        self._also = also
        self._ended = threading.Event()
        self.most: set[str] = set()
        """Marks of the largest crowd that was there at one moment."""
        self.looks = 0

    def run(self) -> None:
        while not self._ended.wait(BETWEEN_LOOKS_SECONDS):
            self.most = max(self.most, together(self._folder), key=len)
            self.looks += 1
            self._also()

    def end(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def together(folder: Path) -> set[str]:
    """Marks of agents that were certainly there at one and the same moment: between two looks at all processes."""
    before = set(marked(folder))
    return {mark for _, _, mark in before & set(marked(folder))} if before else set()


def marked(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Processes of agents below a folder: pid, start time and mark."""
    needle = f"{MARK}={folder}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes().split(b"\0")
            state, *rest = (process / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        for word in words if state not in (b"Z", b"X") else ():
            if word.startswith(needle):
                yield process.name, rest[18].decode(), word.decode()
