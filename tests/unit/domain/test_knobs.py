from hypothesis import given
from hypothesis import strategies as st

from kici.domain.knobs import (
    CROSS_RULES,
    KNOBS,
    SCALER_PROVISION_BACKOFF_BASE_MS,
    SCALER_PROVISION_BACKOFF_MAX_MS,
    VALUE_MAX,
    effective,
    patch_problems,
)


def test_every_knob_is_documented_and_its_default_is_legal() -> None:
    for name, knob in KNOBS.items():
        assert name == knob.name
        assert knob.minimum <= knob.default <= VALUE_MAX
        assert knob.unit
        assert knob.doc.endswith(".")
        if name.endswith("_ms"):
            assert knob.unit == "ms"
    assert patch_problems({name: knob.default for name, knob in KNOBS.items()}, stored={}, configured={}) == []


values = st.dictionaries(st.sampled_from(sorted(KNOBS)), st.integers(-5, 2_000_000), max_size=6)
legal = values.map(lambda drawn: {name: max(value, KNOBS[name].minimum) for name, value in drawn.items()})


@given(changes=st.dictionaries(st.sampled_from(sorted(KNOBS)), st.none() | st.integers(-5, 2_000_000)), stored=legal)
def test_a_change_that_is_not_complained_about_leaves_legal_values_in_force(
    changes: dict[str, int | None], stored: dict[str, int]
) -> None:
    if any(rule(stored, {}) for rule in CROSS_RULES) or patch_problems(changes, stored=stored, configured={}):
        return
    after = {name: value for name, value in {**stored, **changes}.items() if value is not None}
    for knob in KNOBS.values():
        assert effective(knob, after) >= knob.minimum
    assert effective(SCALER_PROVISION_BACKOFF_MAX_MS, after) >= effective(SCALER_PROVISION_BACKOFF_BASE_MS, after)


@given(changes=st.dictionaries(st.sampled_from(sorted(KNOBS)), st.integers(max_value=-1), min_size=1))
def test_each_bad_value_gets_its_own_complaint(changes: dict[str, int]) -> None:
    problems = patch_problems(changes, stored={}, configured={})
    assert len(problems) == len(changes)
    assert all(name in problem for name, problem in zip(changes, problems, strict=True))
