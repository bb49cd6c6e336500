"""Hints between coordinators by LISTEN and NOTIFY, on a connection of its own.

A hint goes out at once, and the next one a few milliseconds later at the soonest, so that a burst of writes sends
two.  When the connection is lost it is made again, and every listener is called once: what was missed must be looked
for.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Never

import asyncpg

from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.peers import Topic
from kici.stores.postgres.connection import WatchedConnection

CHANNEL: Final = "kici"
COALESCE_SECONDS: Final = 0.005
RECONNECT_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 10.0
"""After so long without a hint of our own the server is asked for a sign of life: a cut network tells nobody."""
ANSWER_SECONDS: Final = 5.0
_NOTIFY: Final = Path(__file__).with_name("notify.sql").read_text(encoding="utf-8")


class PostgresNotifier:
    def __init__(
        self,
        url: str,
        *,
        clock: Clock,
        name: str,
        quiet_seconds: float = QUIET_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`name` of this coordinator: its own hints are not heard."""
        self._quiet_seconds = quiet_seconds
        self._answer_seconds = answer_seconds
        self._url = url
        self._clock = clock
        self._name = name
        self._listeners: dict[Topic, list[Callable[[], None]]] = {}
        self._pending: set[Topic] = set()
        self._wanted = asyncio.Event()

    def hint(self, topic: Topic) -> None:
        self._pending.add(topic)
        self._wanted.set()

    def listen(self, topic: Topic, listener: Callable[[], None]) -> None:
        self._listeners.setdefault(topic, []).append(listener)

    async def run(self) -> Never:
        while True:
            try:
                await self._serve()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
                emit(Event.HINTS_LOST, level=logging.WARNING, error=str(error) or repr(error))
            await self._clock.sleep(RECONNECT_SECONDS)

    async def _serve(self) -> None:
        """One connection, until it is lost."""
        connection = await asyncpg.connect(self._url, timeout=5, connection_class=WatchedConnection)
        lost = asyncio.Event()

        def ended(_: object) -> None:
            lost.set()
            self._wanted.set()

        connection.add_termination_listener(ended)
        try:
            await connection.add_listener(CHANNEL, self._heard)
            for topic in Topic:
                self._call(topic)
            while not lost.is_set():
                await self._talk(connection)
                await self._clock.sleep(COALESCE_SECONDS)
        finally:
            await connection.close(timeout=2)

    async def _talk(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        """Send what is to be sent, or after a while of silence ask whether the server is there."""
        try:
            async with asyncio.timeout(self._quiet_seconds):
                await self._wanted.wait()
        except TimeoutError:
            await connection.execute("SELECT 1", timeout=self._answer_seconds)
            return
        self._wanted.clear()
        for topic in sorted(self._pending):
            self._pending.discard(topic)  # before it is sent: what is wanted meanwhile is sent again
            try:
                await connection.execute(_NOTIFY, CHANNEL, f"{topic} {self._name}", timeout=self._answer_seconds)
            except BaseException:
                self.hint(topic)  # for the next connection
                raise

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        topic, _, sender = str(payload).partition(" ")
        if sender != self._name and topic in set(Topic):
            self._call(Topic(topic))

    def _call(self, topic: Topic) -> None:
        for listener in self._listeners.get(topic, ()):
            listener()
