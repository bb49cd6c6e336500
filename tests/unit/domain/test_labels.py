"""Labels: one canonical form, reserved names, and what a scaler-made agent carries."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.domain.labels import (
    canonical,
    is_reserved,
    is_self_reported,
    outside_scope,
    role_labels,
    scaler_agent_labels,
    set_key,
)

LABELS = st.lists(st.text(st.sampled_from("aAbB ,:"), max_size=4), max_size=6)


def test_canonical_labels_are_trimmed_lower_case_and_unique_in_their_order() -> None:
    assert canonical([" Linux ", "GPU", "linux"]) == ("linux", "gpu")


@pytest.mark.spec("scaler 2.4.1")
def test_sets_that_differ_in_order_case_and_repetition_have_one_key() -> None:
    assert set_key(["B", "a", "A"]) == "a,b"


@given(LABELS)
def test_canonical_labels_stay_as_they_are(labels: list[str]) -> None:
    once = canonical(labels)
    assert canonical(once) == once
    assert len(set(once)) == len(once)


@given(LABELS, st.randoms(use_true_random=False))
def test_a_key_forgets_order_case_and_repetition(labels: list[str], random: Random) -> None:
    mixed = [label.swapcase() for label in labels] + labels
    random.shuffle(mixed)
    assert set_key(mixed) == set_key(labels)


@pytest.mark.parametrize("label", ["kici:role:x", "KICI:role:x", "  Kici:os:linux"])
def test_labels_of_the_orchestrator_are_reserved_in_any_case(label: str) -> None:
    assert is_reserved(label)


@pytest.mark.parametrize("label", ["kici", "my-kici:x", "linux"])
def test_other_labels_are_free(label: str) -> None:
    assert not is_reserved(label)


@pytest.mark.spec("scaler 2.4.2")
def test_no_roles_means_all_and_an_empty_list_means_none() -> None:
    assert role_labels(None) == ("kici:role:builder", "kici:role:init-runner")
    assert role_labels(["builder"]) == ("kici:role:builder",)
    assert role_labels([]) == ()


def carried(*labels: str, taints: tuple[str, ...] = (), roles: tuple[str, ...] | None = ()) -> tuple[str, ...]:
    return scaler_agent_labels(labels, backend_type="event", scaler="Pool", roles=roles, taints=taints)


def test_an_agent_carries_its_set_its_maker_its_roles_and_its_taints_in_this_order() -> None:
    assert carried("linux", "gpu", taints=("arm64",), roles=("builder",)) == (
        *("linux", "gpu", "kici:agent:event", "kici:scaler:pool", "kici:role:builder", "arm64"),
    )


@pytest.mark.spec("scaler 2.4.3")
def test_a_taint_that_the_set_has_already_is_carried_once() -> None:
    assert carried("windows", "builders", taints=("windows",)).count("windows") == 1


@pytest.mark.spec("scaler 2.4.4")
def test_a_token_covers_its_labels_and_what_agents_report_of_themselves() -> None:
    allowed = frozenset(carried("linux"))
    assert outside_scope([*allowed, "kici:os:linux", "kici:host:box", "kici:runtime:docker"], allowed) == frozenset()
    assert outside_scope([*allowed, "gpu", "kici:role:builder"], allowed) == {"gpu", "kici:role:builder"}


def test_a_token_without_labels_covers_everything() -> None:
    assert outside_scope(["anything"], None) == frozenset()


@given(LABELS, st.frozensets(st.sampled_from(["a", "b"])))
def test_what_a_token_does_not_cover_is_neither_allowed_nor_self_reported(
    labels: list[str], allowed: frozenset[str]
) -> None:
    for label in outside_scope(labels, allowed):
        assert label not in allowed
        assert not is_self_reported(label)
