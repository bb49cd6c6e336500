"""The ledgers of this host's machine pools, shared with every other coordinator of the host.

What fits and what counts is decided in `decide.ledger`; here is only what reaches the shared place: each call is
one step that no other coordinator can cut in two.
"""

from collections.abc import Mapping
from typing import Protocol

from kici.decide.admit import Cap
from kici.decide.ledger import Kind, Ledger, Outcome
from kici.domain.ids import AgentId
from kici.domain.spawn import Reservation


class MachineLedger(Protocol):
    """As one instance sees it.  Once it was used, the instance counts as running.  What is dead shows in no answer.

    Every call raises `Retryable` when the shared place cannot be locked or written in time, `Misconfigured` when
    it cannot be used as it is; then nothing was changed.
    """

    async def refresh(self, pool: str, cap: Cap | None) -> Ledger:
        """Declare this cap (None: we share the pool no longer), and forget what is dead."""
        ...

    async def try_reserve(self, pool: str, cap: Cap, reservation: Reservation, kind: Kind) -> Outcome:
        """Take what a spawn requests, if it fits under the cap in force, ours being `cap`.

        From then on the agent is proven alive by us, and a process to which `descriptor` is handed goes on
        proving it when we are gone.
        """
        ...

    async def restore(self, pool: str, held: Mapping[AgentId, tuple[Reservation, Kind]]) -> Ledger:
        """After a restart: these are the agents of this instance in the pool.  Rows that are missing are written,
        whatever the cap says; of others those are dropped that would wait for us to drop them.
        """
        ...

    async def release(self, pool: str, agent_id: AgentId) -> Ledger:
        """Give back what an agent holds, if anything.  One that fails is made up for by the next call on the pool."""
        ...

    async def leave(self, kept: frozenset[AgentId]) -> None:
        """At the end of the program: give back everything of this instance but these agents, and its caps.

        Only agents that still live in spite of us are left.  Nothing else is called afterwards.
        """
        ...

    async def pools(self) -> list[str]:
        """Every pool that anybody ever used here."""
        ...

    async def sweep(self) -> None:
        """Remove what the dead left lying about beside the ledgers."""
        ...

    def descriptor(self, agent_id: AgentId) -> int | None:
        """An open file that the agent's first process must inherit to prove that it lives; ours, not to be closed."""
        ...
