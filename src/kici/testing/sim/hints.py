"""Hints between simulated coordinators: late, lost or doubled, as they may be."""

import asyncio
from collections.abc import Callable
from typing import Final, Never

from kici.ports.peers import Topic
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.life import Life
from kici.testing.sim.plan import Plan

DELAY_SECONDS: Final = (0.001, 0.5)


class Hints:
    """The wire that all coordinators listen to."""

    def __init__(self, plan: Plan, entropy: SeededEntropy) -> None:
        self._plan = plan
        self._entropy = entropy
        self._ears: dict[int, HintsOfOne] = {}
        self._number = 0

    def of(self, life: Life) -> "HintsOfOne":
        self._number += 1
        ear = self._ears[self._number] = HintsOfOne(self, self._number, life)
        return ear

    def send(self, sender: int, topic: Topic) -> None:
        loop = asyncio.get_running_loop()
        for number, ear in list(self._ears.items()):
            if not ear.is_alive:
                del self._ears[number]
            elif number != sender and not self._entropy.chance(self._plan.odds.get("hint-lost", 0.0)):
                loop.call_later(self._entropy.uniform(*DELAY_SECONDS), ear.hears, topic)


class HintsOfOne:
    """Implements `ports.peers.Notifier` for one run of a coordinator."""

    def __init__(self, wire: Hints, number: int, life: Life) -> None:
        self._wire = wire
        self._number = number
        self._life = life
        self._listeners: dict[Topic, list[Callable[[], None]]] = {}

    @property
    def is_alive(self) -> bool:
        return self._life.is_alive

    def hint(self, topic: Topic) -> None:
        if self.is_alive:
            self._wire.send(self._number, topic)

    def listen(self, topic: Topic, listener: Callable[[], None]) -> None:
        self._listeners.setdefault(topic, []).append(listener)

    def hears(self, topic: Topic) -> None:
        if self.is_alive and self._life.frozen_seconds <= 0:
            for listener in self._listeners.get(topic, ()):
                listener()

    async def run(self) -> Never:
        while True:
            await self._life.sleep(3600)
