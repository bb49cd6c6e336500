"""Resources: memory strings, mirrored layers, and which layer wins."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.domain.resources import NOTHING, Amount, Ask, ResourceRequest, Shape, amount, parse_memory, resolve

GIB = 1024**3
CPUS = st.none() | st.sampled_from([0.5, 1.0, 4.0])
MEMORY = st.none() | st.sampled_from(["512m", "1g", "2Gi"])
ASKS = st.builds(Ask, cpus=CPUS, memory=MEMORY)
REQUESTS = st.builds(ResourceRequest, requests=ASKS, limits=ASKS)


@pytest.mark.spec("scaler 6.4.4")
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5g", 1610612736),
        ("512 M", 536870912),
        ("512m", 536870912),
        ("512Mi", 536870912),
        ("2G", 2 * GIB),
        ("2Gi", 2 * GIB),
        ("1024 k", 1048576),
        ("0.0001k", 0),
    ],
)
def test_memory_is_read_in_binary_units(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.spec("scaler 6.4.4")
@pytest.mark.parametrize(
    "text", ["4Q", "4gb", "2gib", "", "g", "-1g", "1073741824", ".5g", "1e3m", "١g", "9" * 400 + "g"]
)
def test_anything_else_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number and a unit") as refused:
        parse_memory(text)
    assert repr(text) in str(refused.value)


@given(st.integers(0, 10**12), st.sampled_from("kmgKMG"), st.sampled_from(["", "i"]))
def test_whole_numbers_are_read_exactly(number: int, unit: str, suffix: str) -> None:
    assert parse_memory(f"{number}{unit}{suffix}") == number * 1024 ** ("kmg".index(unit.lower()) + 1)


@given(st.text(max_size=20))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_memory(text) >= 0


@pytest.mark.spec("scaler 6.4.1")
def test_the_job_wins_field_by_field_and_each_layer_is_mirrored_first() -> None:
    job = ResourceRequest(requests=Ask(cpus=1))
    label_set = ResourceRequest(limits=Ask(cpus=4, memory="8g"))
    one = Amount(cpus=1, memory_bytes=8 * GIB)
    assert resolve(job, label_set) == Shape(requests=one, limits=one)


@pytest.mark.spec("scaler 6.4.2")
def test_nothing_declared_is_nothing() -> None:
    assert resolve(None, ResourceRequest(), None) == Shape(requests=NOTHING, limits=NOTHING)
    assert not resolve().limits


@pytest.mark.spec("scaler 6.4.3")
def test_a_dimension_that_nobody_declares_stays_undeclared() -> None:
    limits = resolve(ResourceRequest(limits=Ask(cpus=2))).limits
    assert limits.cpus == 2
    assert limits.memory_bytes == 0


def test_the_weakest_layer_fills_what_is_left() -> None:
    defaults = ResourceRequest(requests=Ask(cpus=2, memory="2g"), limits=Ask(cpus=4, memory="4g"))
    shape = resolve(None, ResourceRequest(requests=Ask(memory="1g")), defaults)
    assert shape.requests == Amount(cpus=2, memory_bytes=GIB)
    assert shape.limits == Amount(cpus=4, memory_bytes=GIB)


def test_a_bad_memory_string_of_a_layer_that_loses_is_not_read() -> None:
    strong = ResourceRequest(requests=Ask(memory="1g"))
    assert resolve(strong, ResourceRequest(requests=Ask(memory="4Q"))).requests.memory_bytes == GIB


def test_a_bad_memory_string_that_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="4Q"):
        resolve(ResourceRequest(requests=Ask(memory="4Q")))


@given(REQUESTS)
def test_mirroring_keeps_what_is_declared_and_leaves_no_field_on_one_side_only(request_: ResourceRequest) -> None:
    mirrored = request_.mirrored()
    assert mirrored.mirrored() == mirrored
    for field in ("cpus", "memory"):
        before = getattr(request_.requests, field), getattr(request_.limits, field)
        after = getattr(mirrored.requests, field), getattr(mirrored.limits, field)
        assert (after[0] is None) == (after[1] is None) == (before == (None, None))
        assert all(old is None or old == new for old, new in zip(before, after, strict=True))


@given(REQUESTS, REQUESTS, REQUESTS)
def test_a_stronger_layer_decides_every_field_that_it_declares(
    job: ResourceRequest, label_set: ResourceRequest, defaults: ResourceRequest
) -> None:
    shape = resolve(job, label_set, defaults)
    assert shape == resolve(job, label_set, None, defaults)
    stated = amount(job.mirrored().requests)
    assert stated.cpus in (0, shape.requests.cpus)
    assert stated.memory_bytes in (0, shape.requests.memory_bytes)


@given(REQUESTS)
def test_a_shape_is_declared_exactly_when_a_layer_declares_something(request_: ResourceRequest) -> None:
    shape = resolve(request_)
    declared = any(
        value is not None for ask in (request_.requests, request_.limits) for value in (ask.cpus, ask.memory)
    )
    assert bool(shape.requests) == bool(shape.limits) == declared
    assert math.isfinite(shape.requests.cpus)
