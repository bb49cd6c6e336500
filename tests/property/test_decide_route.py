"""The compiled matcher equals the rules as they are written down, on every fleet and demand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.entries import Routable
from kici.decide.route import NEAREST_MAX, Router
from kici.domain.ids import ScalerName
from kici.domain.job import Demand

LABELS = ("linux", "gpu", "spot", "team", "arm64", "macos")
some_labels = st.frozensets(st.sampled_from(LABELS), max_size=4)
demands = st.builds(Demand, labels=some_labels, exclude=some_labels)


@st.composite
def fleets(draw: st.DrawFn) -> list[Routable]:
    found = []
    for index in range(draw(st.integers(0, 12))):
        offers = draw(st.frozensets(st.sampled_from(LABELS), min_size=1))
        gate = draw(st.frozensets(st.sampled_from(sorted(offers)), max_size=3))
        found.append(
            Routable(
                scaler=ScalerName(f"s{draw(st.integers(0, 4))}"),
                backend_type="container",
                set_index=index,
                label_set=tuple(sorted(offers)),
                offers=offers,
                agent_labels=tuple(sorted(offers)),
                gate=gate,
            )
        )
    return found


def reference(entries: Sequence[Routable], demand: Demand) -> list[Routable]:
    """All sets that pass, in order of preference."""
    passing = [
        entry for entry in entries if entry.gate <= demand.labels <= entry.offers and not demand.exclude & entry.offers
    ]
    return sorted(passing, key=lambda entry: len(entry.offers)) if demand.labels else passing


def obstacles(entry: Routable, demand: Demand) -> int:
    return len(demand.labels - entry.offers) + len(demand.exclude & entry.offers) + (not entry.gate <= demand.labels)


@given(fleets(), demands)
def test_the_candidates_are_those_of_the_reference_in_its_order(entries: list[Routable], demand: Demand) -> None:
    router = Router(entries)
    expected = reference(entries, demand)
    assert list(router.candidates(demand)) == expected
    for _ in range(2):  # the second answer comes from memory
        assert router.match(demand) is (expected[0] if expected else None)


@pytest.mark.spec("scaler 49.7")
@given(fleets(), demands)
def test_a_match_names_every_label_of_the_gate_and_no_smaller_set_would_do(
    entries: list[Routable], demand: Demand
) -> None:
    found = Router(entries).match(demand)
    if found is None:
        return
    assert found.gate <= demand.labels <= found.offers
    assert found.offers.isdisjoint(demand.exclude)
    if demand.labels:
        assert len(found.offers) == min(len(entry.offers) for entry in reference(entries, demand))


@given(fleets(), demands)
def test_a_mismatch_shows_the_nearest_set_of_each_scaler_that_has_none_that_passes(
    entries: list[Routable], demand: Demand
) -> None:
    distances = {
        name: min(obstacles(entry, demand) for entry in entries if entry.scaler == name)
        for name in {entry.scaler for entry in entries}
    }
    expected = sorted(distance for distance in distances.values() if distance)[:NEAREST_MAX]
    misses = Router(entries).explain_mismatch(demand)
    assert [miss.distance for miss in misses] == expected
    assert all(distances[miss.scaler] == miss.distance for miss in misses)
    assert len({miss.scaler for miss in misses}) == len(misses)
