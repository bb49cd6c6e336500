"""The small background services keep the service contract, on a store that answers slowly and not always."""

import pytest

from kici.observe.metrics import Metrics
from kici.services.instance_heartbeat import InstanceHeartbeat
from kici.services.retention import Retention
from kici.services.settings import LiveSettings, SettingsRefresh
from kici.services.tokens import TokenPurge, Tokens
from kici.stores.sqlite.open import open_sqlite
from kici.testing.builders import an_instance
from kici.testing.contracts import service as contract
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import run_virtual


class Bench:
    """A migrated store with faults, and the services on it."""

    def __init__(self) -> None:
        clock = SimClock()
        self.real = open_sqlite(":memory:", clock_now=clock.now, inline=True)
        faults = StoreFaults(entropy=SeededEntropy(1), chance_before=0.1, chance_after=0.1, delay_seconds=(0.001, 0.5))
        store = faulty(self.real, faults)
        self.services: dict[str, contract.ServiceFactory] = {
            "heartbeat": lambda: InstanceHeartbeat(store=store, clock=clock, me=an_instance()),
            "retention": lambda: Retention(
                store=store, clock=clock, settings=LiveSettings(store=store, clock=clock), metrics=Metrics()
            ),
            "settings refresh": lambda: SettingsRefresh(settings=LiveSettings(store=store, clock=clock)),
            "token purge": lambda: TokenPurge(tokens=Tokens(store=store, clock=clock, entropy=SeededEntropy(2))),
        }


@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", ["heartbeat", "retention", "settings refresh", "token purge"])
def test_service(name: str, case: contract.Case) -> None:
    async def check() -> None:
        bench = Bench()
        await bench.real.migrate()
        try:
            await case(bench.services[name])
        finally:
            await bench.real.close()

    run_virtual(check)
