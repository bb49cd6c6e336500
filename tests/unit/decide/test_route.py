import pytest

from kici.decide.entries import Routable
from kici.decide.route import NEAREST_MAX, Router
from kici.domain.ids import ScalerName
from kici.domain.job import Demand
from kici.domain.verdict import NearMiss


def entry(scaler: str, *labels: str, gate: tuple[str, ...] = (), index: int = 0) -> Routable:
    return Routable(
        scaler=ScalerName(scaler),
        backend_type="container",
        set_index=index,
        label_set=labels,
        offers=frozenset(labels),
        agent_labels=labels,
        gate=frozenset(gate),
    )


def ask(*labels: str, exclude: tuple[str, ...] = ()) -> Demand:
    return Demand(labels=frozenset(labels), exclude=frozenset(exclude))


def winner(entries: list[Routable], demand: Demand) -> str | None:
    found = Router(entries).match(demand)
    return None if found is None else found.scaler


@pytest.mark.spec("scaler 3.7.1")
def test_the_smallest_set_wins() -> None:
    entries = [entry("gpu", "linux", "docker", "gpu"), entry("plain", "linux", "docker")]
    assert winner(entries, ask("linux")) == "plain"


@pytest.mark.spec("scaler 3.7.2")
def test_labels_match_whatever_their_case() -> None:
    assert winner([entry("a", "linux")], ask("LINUX")) == "a"


@pytest.mark.spec("scaler 3.7.3")
def test_a_set_with_an_excluded_label_does_not_match() -> None:
    entries = [entry("a", "linux", "spot")]
    assert winner(entries, ask("linux", exclude=("spot",))) is None
    assert winner(entries, ask("linux", exclude=("SPOT",))) is None
    assert winner(entries, ask("linux", exclude=("other",))) == "a"


@pytest.mark.spec("scaler 3.7.4")
def test_a_gated_set_takes_only_jobs_that_name_the_gate() -> None:
    entries = [entry("a", "linux", "gpu", gate=("gpu",))]
    assert winner(entries, ask("linux")) is None
    assert winner(entries, ask("linux", "gpu")) == "a"


def test_every_label_of_a_gate_must_be_named() -> None:
    entries = [entry("a", "linux", "gpu", "team", gate=("gpu", "team"))]
    assert winner(entries, ask("gpu")) is None
    assert winner(entries, ask("team")) is None
    assert winner(entries, ask("gpu", "team")) == "a"


@pytest.mark.spec("scaler 3.7.5")
def test_a_job_without_labels_takes_the_first_ungated_set_in_order_not_the_smallest() -> None:
    entries = [entry("mac", "macos", gate=("macos",)), entry("big", "linux", "x", "y"), entry("small", "linux")]
    assert winner(entries, ask()) == "big"


@pytest.mark.spec("scaler 50.18")
def test_a_job_without_labels_keeps_its_excludes() -> None:
    entries = [entry("a", "linux", "spot"), entry("b", "linux", "stable")]
    assert winner(entries, ask(exclude=("spot",))) == "b"
    assert winner(entries, ask(exclude=("linux",))) is None


@pytest.mark.spec("scaler 3.7.6")
def test_the_first_of_equally_small_sets_wins() -> None:
    assert winner([entry("x", "linux", "a"), entry("y", "linux", "b")], ask("linux")) == "x"
    assert winner([entry("y", "linux", "b"), entry("x", "linux", "a")], ask("linux")) == "y"


@pytest.mark.spec("scaler 3.7.7")
def test_a_label_that_a_set_names_twice_counts_once() -> None:
    assert winner([entry("three", "a", "b", "c"), entry("two", "a", "a", "b")], ask("a")) == "two"


@pytest.mark.spec("scaler 3.7.10")
def test_every_label_asked_for_must_be_offered() -> None:
    assert winner([entry("a", "linux")], ask("linux", "arm64")) is None


def test_without_scalers_nothing_matches() -> None:
    assert winner([], ask("linux")) is None
    assert winner([], ask()) is None
    assert Router([]).explain_mismatch(ask("linux")) == ()


def test_candidates_come_in_the_order_of_preference() -> None:
    router = Router(
        [
            entry("large", "linux", "a", "b", "c"),
            entry("small", "linux", "a"),
            entry("gated", "linux", gate=("linux",)),
            entry("shut", "linux", gate=("other",)),
            entry("also-small", "linux", "b"),
        ]
    )
    found = [candidate.scaler for candidate in router.candidates(ask("linux"))]
    assert found == ["gated", "small", "also-small", "large"]


def test_a_mismatch_names_what_is_missing_excluded_and_gated_nearest_first() -> None:
    router = Router(
        [
            entry("far", "windows", "spot"),
            entry("near", "linux", "spot", "gpu", gate=("gpu", "team")),
            entry("near", "linux", "spot", index=1),
        ]
    )
    assert router.explain_mismatch(ask("linux", "arm64", exclude=("spot",))) == (
        NearMiss(scaler=ScalerName("near"), label_set=("linux", "spot"), missing=("arm64",), excluded=("spot",)),
        NearMiss(
            scaler=ScalerName("far"), label_set=("windows", "spot"), missing=("arm64", "linux"), excluded=("spot",)
        ),
    )


def test_a_mismatch_names_all_labels_of_the_gate_that_are_wanting() -> None:
    router = Router([entry("a", "linux", "gpu", "team", "x", gate=("gpu", "team", "x"))])
    assert [miss.gate for miss in router.explain_mismatch(ask("linux", "x"))] == [("gpu", "team")]


def test_scalers_that_match_are_not_in_the_mismatch() -> None:
    router = Router([entry("a", "linux"), entry("a", "windows", index=1), entry("b", "windows")])
    assert [miss.scaler for miss in router.explain_mismatch(ask("linux"))] == ["b"]


def test_a_mismatch_lists_a_bounded_number_of_scalers() -> None:
    router = Router([entry(f"s{number}", "linux") for number in range(50)])
    assert len(router.explain_mismatch(ask("windows"))) == NEAREST_MAX
