"""Orders to one worker that outlive its connections.

An order waits here until it is answered.  After a reconnect all that wait are sent again, oldest first: orders are
safe to repeat.  A worker that stays away for longer than a blink is waited for no more.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.workers import OnAnswer, Unanswered
from kici.wire.worker_messages import Answer, MarkRegistered, Request, WorkerOrder

BLINK_SECONDS: Final = 20.0
"""How long orders wait for a worker that is away."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    order: Request
    answer: "asyncio.Future[Answer]"
    on_answer: OnAnswer


class Channel:
    """Implements `ports.workers.WorkerChannel`."""

    def __init__(self, *, clock: Clock, entropy: Entropy) -> None:
        self.name = ""
        """What people call the worker, as it said last."""
        self.protocol = 0
        """The version of the link that it spoke last; 0: it was not linked yet."""
        self._clock = clock
        self._entropy = entropy
        self._send: Callable[[WorkerOrder], None] | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._away_since: float | None = clock.monotonic()
        self._given_up = ""
        self._closed = ""

    @property
    def is_linked(self) -> bool:
        return self._send is not None

    @property
    def is_given_up(self) -> bool:
        return bool(self._given_up)

    async def ask(
        self,
        order: Callable[[str], Request],
        *,
        what: str,
        seconds: float | None,
        on_answer: OnAnswer = lambda answer: None,
    ) -> Answer:
        if self._given_up or self._closed:
            raise Unanswered(f"{self._given_up or self._closed}; worker {self.name} could not be told to {what}")
        request = order(self._entropy.hex(6))
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), on_answer)
        self._waiting[request.request_id] = waiting
        if self._send is not None:
            self._send(request)
        try:
            async with asyncio.timeout(seconds):
                return await waiting.answer
        except TimeoutError:
            raise Unanswered(f"worker {self.name} did not answer within {seconds:g} s when told to {what}") from None
        finally:
            self._waiting.pop(request.request_id, None)

    def tell(self, order: MarkRegistered) -> None:
        if self._send is not None:
            self._send(order)

    # ------------------------------------------------------------------ for the keeper of the link

    def answered(self, answer: Answer) -> None:
        """An answer came; one that nobody waits for any more is nothing."""
        waiting = self._waiting.get(answer.request_id)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(answer)
            waiting.on_answer(answer)

    def attach(self, send: Callable[[WorkerOrder], None]) -> None:
        """There is a connection."""
        self._send = send
        self._away_since = None

    def send_again(self) -> None:
        """What waits may have been lost with the connection before."""
        assert self._send is not None
        for waiting in list(self._waiting.values()):
            if not waiting.answer.done():
                self._send(waiting.order)

    def detach(self) -> None:
        """The connection is gone."""
        if self._send is not None:
            self._send = None
            self._away_since = self._clock.monotonic()

    def tick(self) -> None:
        """Whoever waits for a worker that is away longer than a blink waits in vain."""
        if self._away_since is not None and self._clock.monotonic() - self._away_since >= BLINK_SECONDS:
            self._fail(f"worker {self.name} is away")

    def give_up(self, why: str) -> None:
        """Nothing will be answered any more."""
        self.detach()
        self._given_up = why
        self._fail(why)

    def close(self, why: str) -> None:
        """This program ends; what the worker holds stays what it is."""
        self.detach()
        self._closed = why
        self._fail(why)

    def _fail(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(Unanswered(why))
