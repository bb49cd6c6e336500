"""A coordinator with one event scaler on a real store, and a webhook that answers at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kici.adapters.clock import RealClock
from kici.adapters.entropy import SystemEntropy
from kici.adapters.no_peers import NoPeers
from kici.adapters.sealer import AesGcmSealer
from kici.apps.assembly import Coordinator
from kici.apps.given import Given
from kici.apps.provisioning import Provisioning
from kici.backends.event.backend import EventBackend
from kici.backends.event.factory import event_settings
from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.event import SCALE_DOWN, SCALE_UP, EventId
from kici.domain.ids import DEFAULT_ORG, InstanceId, ScalerName
from kici.domain.secret import SecretRef
from kici.kit.supervise import Supervisor
from kici.ports.peers import Notifier
from kici.ports.store import Store
from kici.ports.webhook import WebhookCall
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.testing.builders import HERE, an_instance
from kici.testing.coordinator_bench import HOST, SOMEBODY

REF: Final = "acme/cloud"
EVENT: Final = "deployed"
PLENTY: Final = 1_000_000
SPAWNS_AT_ONCE: Final = 100


class Sink:
    """Implements `WebhookSender`: writes down when each event came."""

    def __init__(self) -> None:
        self._came: dict[EventId, asyncio.Future[float]] = {}

    def at(self, id: EventId) -> "asyncio.Future[float]":
        return self._came.setdefault(id, asyncio.get_running_loop().create_future())

    async def send(self, call: WebhookCall) -> None:
        now, told = time.perf_counter(), self.at(call.id)
        if not told.done():
            told.set_result(now)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def an_event_coordinator(
    store: Store, *, sink: Sink | None = None, notifier: Notifier | None = None, id: InstanceId = HERE
) -> AsyncIterator[Coordinator]:
    """With `sink` it delivers events, too."""
    entropy = SystemEntropy()
    entry = ScalerEntry(
        name=ScalerName("cloud"),
        type=BackendType.EVENT,
        max_agents=PLENTY,
        label_sets=(LabelSet(labels=("cloud",)),),
        provisioning_targets=(REF,),
    )
    config = ScalersConfig(scalers=(entry,), global_max_agents=PLENTY)
    async with Supervisor("bench") as supervisor:
        made: list[Coordinator] = []
        find = Provisioning(
            find_events=lambda: made[0].events.emitter, find_claims=lambda: made[0].claims, entropy=entropy
        )
        clock = RealClock()
        backend = EventBackend(
            settings=event_settings(entry), events=find.events(), claims=find.claims(), clock=clock, entropy=entropy
        )
        runtime = ScalerRuntime(
            name=entry.name,
            backend=backend,
            caps=scaler_caps(entry),
            orchestrator_url="ws://nowhere/ws",
            spawns_at_once=SPAWNS_AT_ONCE,
            provisioning_targets=entry.provisioning_targets,
        )
        one = Coordinator(
            Given(
                store=store,
                clock=clock,
                entropy=entropy,
                supervisor=supervisor,
                sealer=AesGcmSealer(bytes(32), entropy),
                instance=an_instance(id=id),
                notifier=notifier or NoPeers(),
                fleet=Fleet(
                    runtimes={entry.name: runtime}, router=Router(routables(config, HOST)), caps=host_caps(config)
                ),
                webhooks=sink,
            )
        )
        made.append(one)
        if notifier is not None:
            supervisor.service("hints", notifier.run)
        if sink is not None:
            supervisor.service("event-router", one.events.router.run)
        yield one


async def subscribe(one: Coordinator) -> None:
    """The webhook gets scale events and the other ones of this bench."""
    await one.secrets.put(DEFAULT_ORG, SecretRef("hooks", "cloud"), "whsec_c2VjcmV0IG9mIHRoZSBjbG91ZA==")
    document = {
        "ref": REF,
        "on": [SCALE_UP, SCALE_DOWN, EVENT],
        "webhook": {"url": "http://cloud/", "secret": "hooks:cloud"},
    }
    _ = await one.events.workflows.apply(document, SOMEBODY)
