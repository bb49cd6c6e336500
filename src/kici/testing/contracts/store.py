"""The contract of every store: the rules of `ports.store`, as cases that run on any implementation.

A test makes an empty, migrated store for each case and awaits `run_case`.
"""

from typing import Final

from kici.ports.store import Store
from kici.testing.contracts import (
    store_addresses,
    store_agents,
    store_cluster,
    store_ends,
    store_events,
    store_jobs,
    store_provisions,
    store_sweeps,
    store_workers,
)
from kici.testing.contracts.store_rules import Case, check_rules, statements_of

CASES: Final[tuple[Case, ...]] = (
    *store_jobs.CASES,
    *store_ends.CASES,
    *store_sweeps.CASES,
    *store_agents.CASES,
    *store_cluster.CASES,
    *store_events.CASES,
    *store_provisions.CASES,
    *store_addresses.CASES,
    *store_workers.CASES,
    *store_cluster.LAST_CASES,
)

__all__ = ["CASES", "Case", "run_case", "statements_of"]


async def run_case(case: Case, store: Store) -> None:
    """Run a case, then hold what it left to the rules that are always true."""
    await case(store)
    if case not in store_cluster.LAST_CASES:
        await check_rules(store)
