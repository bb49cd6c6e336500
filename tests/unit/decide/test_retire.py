"""A reload is a plan: what comes, changes, goes or returns; a type never changes."""

import pytest

from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.decide.retire import ReloadPlan, plan_reload
from kici.domain.ids import ScalerName


def entry(name: str, *, max_agents: int = 4, type_: BackendType = BackendType.BARE_METAL) -> ScalerEntry:
    labels = LabelSet(labels=("linux", name), binary_path="kici-agent")
    return ScalerEntry(name=ScalerName(name), type=type_, max_agents=max_agents, label_sets=(labels,))


def file(*entries: ScalerEntry, total: int = 50) -> ScalersConfig:
    return ScalersConfig(scalers=entries, global_max_agents=total)


def planned(old: ScalersConfig, new: ScalersConfig, *retiring: str) -> ReloadPlan:
    plan = plan_reload(old, new, retiring={ScalerName(name): BackendType.BARE_METAL for name in retiring})
    assert isinstance(plan, ReloadPlan), plan
    return plan


def names(entries: tuple[ScalerEntry, ...]) -> list[str]:
    return [each.name for each in entries]


def test_tells_what_comes_changes_goes_and_stays() -> None:
    plan = planned(file(entry("a"), entry("b"), entry("c")), file(entry("b"), entry("c", max_agents=9), entry("d")))
    assert names(plan.added) == ["d"]
    assert names(plan.updated) == ["c"]
    assert names(plan.kept) == ["b"]
    assert plan.retired == ("a",)


def test_an_equal_file_changes_nothing() -> None:
    assert planned(file(entry("a")), file(entry("a"))).is_empty
    assert not planned(file(entry("a")), file(entry("a"), total=9)).is_empty


def test_a_scaler_that_returns_while_it_retires_is_resurrected() -> None:
    plan = planned(file(), file(entry("a")), "a")
    assert names(plan.resurrected) == ["a"]
    assert plan.added == ()


@pytest.mark.spec("scaler 19.8.3")
def test_a_change_of_type_is_refused_naming_both() -> None:
    refused = plan_reload(file(entry("a")), file(entry("a", type_=BackendType.CONTAINER)), retiring={})
    assert isinstance(refused, tuple)
    assert "bare-metal" in refused[0]
    assert "container" in refused[0]


def test_also_while_it_retires() -> None:
    again = file(entry("a", type_=BackendType.EVENT))
    assert isinstance(plan_reload(file(), again, retiring={ScalerName("a"): BackendType.BARE_METAL}), tuple)
