"""Single calls of a store, stopped or failed where a test wants it: races are shown, not hoped for.

`faulty_store` makes a store that is down or unreliable as a whole; here a test picks the next call of one method,
and whether it has been committed by then.  A caller cannot tell the two apart.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from kici.domain.errors import StoreDown

S = TypeVar("S")
CALL_SECONDS: Final = 0.0005
"""Before and after each call, so that nothing counts on a store that answers at once."""


class Gate:
    """One call that waits until the test lets it go on."""

    def __init__(self, *, is_done: bool) -> None:
        self.is_done = is_done
        self._reached = asyncio.Event()
        self._opened = asyncio.Event()
        self._error: StoreDown | None = None

    async def reached(self) -> None:
        """Return when the call is there."""
        async with asyncio.timeout(600):
            await self._reached.wait()

    def open(self, *, fails: bool = False) -> None:
        """Let the call go on, or answer it with an outage."""
        self._error = StoreDown("the store did not answer (a trap)") if fails else None
        self._opened.set()

    async def hold(self) -> None:
        self._reached.set()
        await self._opened.wait()
        if self._error is not None:
            raise self._error


@dataclass(slots=True)
class Traps:
    """What becomes of the next calls."""

    is_dead: bool = False
    """The program was killed: none of its calls reaches the store any more."""
    _gates: dict[str, deque[Gate]] = field(default_factory=dict)

    def hold(self, method: str, *, done: bool) -> Gate:
        """Stop the next call of this method; `done`: after its commit, with its answer still to come."""
        gate = Gate(is_done=done)
        self._gates.setdefault(method, deque()).append(gate)
        return gate

    def fail(self, method: str, *, done: bool, times: int = 1) -> None:
        """Answer the next calls of this method with an outage; `done`: though they were committed."""
        for _ in range(times):
            self.hold(method, done=done).open(fails=True)

    def next(self, method: str) -> Gate | None:
        gates = self._gates.get(method)
        return gates.popleft() if gates else None


def trapped(store: S, traps: Traps) -> S:
    """The same store behind `traps`."""
    return cast(S, _TrappedStore(store, traps))  # it answers to every name that the store has


class _TrappedStore:
    def __init__(self, store: object, traps: Traps) -> None:
        self._store = store
        self._traps = traps

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._pass()
            gate = self._traps.next(name)
            if gate is not None and not gate.is_done:
                await gate.hold()
            answer = await method(*args, **kwargs)
            if gate is not None and gate.is_done:
                await gate.hold()
            await self._pass()
            return answer

        return call

    async def _pass(self) -> None:
        if self._traps.is_dead:
            raise asyncio.CancelledError
        await asyncio.sleep(CALL_SECONDS)
