"""Agents of a worker's host: what each holds, how far it is, and how much is in use for whom."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kici.decide.admit import MICROS, NO_USAGE, Usage
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.ports.backend import Compute, ComputeState
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.worker_records import HostRecord
from kici.wire.worker_messages import Fault, Held, Used

REMEMBERED_MAX: Final = 1000
"""Ends that a coordinator may still ask about when it comes back."""


@dataclass(slots=True, eq=False)
class Holding:
    """One agent, from its order to its end."""

    record: HostRecord
    runtime: ScalerRuntime
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Its spawn is over, one way or the other."""
    fault: Fault | None = None
    """Why its spawn failed."""
    registered: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def agent_id(self) -> AgentId:
        return self.record.agent_id

    @property
    def owner(self) -> InstanceId:
        return self.record.owner

    def held(self, compute: Compute | None) -> Held:
        """As a coordinator is told of it.  `compute` None: there is none yet."""
        record = self.record
        return Held(
            agent_id=record.agent_id,
            scaler=record.scaler,
            label_set=record.label_set,
            ref="" if compute is None else compute.ref,
            spawned_at=record.reserved_at if compute is None else compute.spawned_at,
            state=ComputeState.SPAWNING if compute is None else compute.state,
            owner=record.owner,
            registered=self.registered,
        )


class Holdings:
    def __init__(self) -> None:
        self._held: dict[AgentId, Holding] = {}
        self._gone: OrderedDict[AgentId, str] = OrderedDict()

    def __iter__(self) -> Iterator[Holding]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, agent_id: AgentId) -> Holding | None:
        return self._held.get(agent_id)

    def ids(self) -> frozenset[AgentId]:
        return frozenset(self._held)

    def add(self, holding: Holding) -> None:
        assert holding.agent_id not in self._held, holding.agent_id
        self._held[holding.agent_id] = holding

    def remove(self, holding: Holding) -> bool:
        """False: it was removed before."""
        if self._held.get(holding.agent_id) is not holding:
            return False
        del self._held[holding.agent_id]
        return True

    def gone(self) -> Mapping[AgentId, str]:
        """How agents ended by themselves, the latest of them."""
        return self._gone

    def ended(self, agent_id: AgentId, how: str) -> None:
        self._gone[agent_id] = how
        while len(self._gone) > REMEMBERED_MAX:
            self._gone.popitem(last=False)

    def used_by_others(self, than: InstanceId) -> dict[str, Used]:
        """What agents hold that others than one coordinator ordered, by scaler."""
        found: dict[ScalerName, Usage] = {}
        for holding in self._held.values():
            if holding.owner != than:
                before = found.get(holding.record.scaler, NO_USAGE)
                found[holding.record.scaler] = before.plus(holding.record.shape.requests)
        return {
            name: Used(agents=used.agents, cpus=used.cpu_micros / MICROS, memory_bytes=used.memory_bytes)
            for name, used in found.items()
        }
