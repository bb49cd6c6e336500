"""Values in columns: canonical text, demand classes, text that a database can store."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.domain.ids import OrgId
from kici.domain.job import Demand
from kici.domain.resources import Ask, ResourceRequest
from kici.stores.rows import canonical_demand, class_id, class_key, clean_text, demand_from, names_json, to_json
from kici.testing.builders import a_demand

asks = st.builds(
    Ask, cpus=st.none() | st.sampled_from([0.5, 1, 1.0, 2]), memory=st.none() | st.sampled_from(["512m", "1g"])
)
demands = st.builds(
    Demand,
    labels=st.frozensets(st.sampled_from("abc")),
    exclude=st.frozensets(st.sampled_from("de")),
    resources=st.builds(ResourceRequest, requests=asks, limits=asks),
    image=st.none() | st.sampled_from(["x", "y"]),
    org=st.sampled_from([OrgId("default"), OrgId("acme")]),
)


@given(demands, demands)
def test_demands_are_one_class_exactly_when_they_are_equal(one: Demand, other: Demand) -> None:
    keys = [class_key(canonical_demand(demand)) for demand in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    assert (class_id(keys[0]) == class_id(keys[1])) == (one == other)


@given(demands)
def test_a_demand_comes_back_equal(demand: Demand) -> None:
    assert demand_from(canonical_demand(demand)) == demand


def test_class_ids_are_the_same_in_every_process() -> None:
    key = class_key(canonical_demand(a_demand("linux")))
    assert key == "a21fc071ce740f19c2ab6cbbb9e23abaa869b6af6903dd1f3ddfdfa9de41a2a5"
    assert class_id(key) == 0xA21FC071CE740F19 >> 1


@given(demands)
def test_class_ids_fit_a_signed_column(demand: Demand) -> None:
    assert 0 <= class_id(class_key(canonical_demand(demand))) < 2**63


def test_sets_and_keys_are_written_in_order() -> None:
    assert names_json(frozenset({"b", "a"})) == '["a","b"]'
    assert to_json({"b": 1, "a": [2]}) == '{"a":[2],"b":1}'
    demand = a_demand("b", "a")
    assert canonical_demand(demand) == canonical_demand(replace(demand, labels=frozenset(["a", "b"])))


@pytest.mark.parametrize(
    ("text", "expected"), [("plain ☃", "plain ☃"), ("a\0b", "a\ufffdb"), ("half \ud83d", "half ?"), ("", "")]
)
def test_text_loses_what_no_database_takes(text: str, expected: str) -> None:
    assert clean_text(text) == expected
