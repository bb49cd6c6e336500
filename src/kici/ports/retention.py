"""What a store forgets in time: each method deletes a batch, so that others can work in between."""

from typing import Protocol

from kici.domain.ids import Instant


class Prunable(Protocol):
    async def prune_jobs(self, *, older_than: Instant, limit: int) -> int:
        """Delete runs that ended before `older_than`, with jobs and output.  How many jobs went."""
        ...

    async def prune_classes(self, *, older_than: Instant, limit: int) -> int:
        """Delete demand classes last submitted well before `older_than` of which no job is left.  How many went.

        Call after `prune_jobs`: as long as very many jobs are older, none goes.
        """
        ...

    async def prune_access_log(self, *, older_than: Instant, limit: int) -> int:
        """Delete the oldest records from before that time.  How many."""
        ...
