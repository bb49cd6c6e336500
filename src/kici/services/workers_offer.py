"""What a worker's host can make: as it is told to coordinators, and as they route by it."""

from collections.abc import Sequence

from kici.config.model import WarmPool
from kici.decide.admit import Cap, HostCaps, ScalerCaps
from kici.decide.entries import Routable
from kici.domain.ids import ScalerName
from kici.domain.resources import UNDECLARED, Ask, ResourceRequest
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.wire.worker_messages import Caps, Declared, ScalerOffer, SetOffer, Wish, WorkerOffer


def offer_of(fleet: Fleet) -> WorkerOffer:
    """Of everything that takes work."""
    entries = fleet.router.entries
    by_scaler: dict[ScalerName, list[Routable]] = {}
    for entry in entries:
        by_scaler.setdefault(entry.scaler, []).append(entry)
    return WorkerOffer(
        scalers=tuple(_scaler(fleet.runtimes[name], sets) for name, sets in by_scaler.items()),
        max_agents=fleet.caps.agents_max,
        cap=_caps(fleet.caps.resources),
        defaults=_declared(entries[0].defaults if entries else UNDECLARED),
    )


def host_caps_of(offer: WorkerOffer) -> HostCaps:
    """Of the whole host.  Its machine pools are its own business."""
    return HostCaps(agents_max=offer.max_agents, resources=_cap(offer.cap))


def scaler_caps_of(offer: ScalerOffer, name: ScalerName) -> ScalerCaps:
    return ScalerCaps(scaler=name, agents_max=offer.max_agents, resources=_cap(offer.cap))


def routables_of(offer: WorkerOffer, scaler: ScalerOffer, name: ScalerName) -> tuple[Routable, ...]:
    """Label sets of one scaler.  `name`: as coordinators call it."""
    return tuple(
        Routable(
            scaler=name,
            backend_type=scaler.backend_type,
            set_index=index,
            label_set=each.label_set,
            offers=frozenset(each.offers),
            agent_labels=each.agent_labels,
            gate=frozenset(each.gate),
            taints=each.taints,
            roles=scaler.roles,
            resources=_request(each.resources),
            defaults=_request(offer.defaults),
            runs_job_image=each.runs_job_image,
        )
        for index, each in enumerate(scaler.sets)
    )


def warm_of(offer: ScalerOffer) -> WarmPool:
    return WarmPool(
        enabled=offer.warm_size is not None,
        size=max(0, offer.warm_size or 0),
        idle_timeout_seconds=max(0.0, offer.warm_idle_seconds),
    )


def _scaler(runtime: ScalerRuntime, sets: Sequence[Routable]) -> ScalerOffer:
    return ScalerOffer(
        name=runtime.name,
        backend_type=runtime.backend.type,
        max_agents=runtime.caps.agents_max,
        cap=_caps(runtime.caps.resources),
        spawns_at_once=runtime.spawns_at_once,
        roles=sets[0].roles,
        reuse_idle_seconds=runtime.reuse_idle_seconds,
        reuse_max_jobs=runtime.reuse_max_jobs,
        warm_size=runtime.warm_pool.size if runtime.warm_pool.enabled else None,
        warm_idle_seconds=runtime.warm_pool.idle_timeout_seconds if runtime.warm_pool.enabled else 0.0,
        sets=tuple(
            SetOffer(
                label_set=each.label_set,
                offers=tuple(sorted(each.offers)),
                agent_labels=each.agent_labels,
                gate=tuple(sorted(each.gate)),
                taints=each.taints,
                resources=_declared(each.resources),
                runs_job_image=each.runs_job_image,
            )
            for each in sets
        ),
    )


def _caps(cap: Cap) -> Caps:
    return Caps(cpus=cap.cpus, memory_bytes=cap.memory_bytes)


def _cap(caps: Caps) -> Cap:
    return Cap(cpus=caps.cpus, memory_bytes=caps.memory_bytes)


def _declared(request: ResourceRequest) -> Declared:
    return Declared(requests=_wish(request.requests), limits=_wish(request.limits))


def _request(declared: Declared) -> ResourceRequest:
    return ResourceRequest(requests=_ask(declared.requests), limits=_ask(declared.limits))


def _wish(ask: Ask) -> Wish:
    return Wish(cpus=ask.cpus, memory=ask.memory)


def _ask(wish: Wish) -> Ask:
    return Ask(cpus=wish.cpus, memory=wish.memory)
