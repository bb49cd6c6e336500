"""For a coordinator that is alone on its store: nobody to tell, nobody to hear."""

import asyncio
from collections.abc import Callable
from typing import Never

from kici.ports.peers import Topic


class NoPeers:
    def hint(self, topic: Topic) -> None:
        pass

    def listen(self, topic: Topic, listener: Callable[[], None]) -> None:
        pass

    async def run(self) -> Never:
        while True:
            await asyncio.Event().wait()


class NoProbe:
    """Nobody can be asked, so nobody can be said to be ready."""

    async def is_ready(self, address: str) -> bool:
        return False
