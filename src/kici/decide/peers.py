"""Whether another coordinator could serve a demand, by what it last told."""

from collections.abc import Iterable

from kici.domain.job import Demand
from kici.domain.peer import Capacity, Offer


def serves(offer: Offer, demand: Demand) -> bool:
    """Labels and gate only: resources and images are for the one who claims to judge."""
    return demand.labels <= offer.labels and not demand.exclude & offer.labels and offer.gate <= demand.labels


def could_serve(capacities: Iterable[Capacity], demand: Demand) -> bool:
    """Whether any of them could, now or with an agent yet to be made."""
    return any(serves(offer, demand) for capacity in capacities for offer in (*capacity.agents, *capacity.scalers))


def has_idle(capacities: Iterable[Capacity], demand: Demand) -> bool:
    """Whether an agent that waits at one of them could take it."""
    return any(offer.idle > 0 and serves(offer, demand) for capacity in capacities for offer in capacity.agents)
