"""Scalers of workers are told of by several coordinators, and shown once."""

from dataclasses import replace

from kici.domain.ids import InstanceId
from kici.web.scaler_rows import once_each
from kici.web.surface import ScalerRow

HERE = ScalerRow(
    name="w1/linux",
    type="container",
    instance_id=InstanceId("worker-1"),
    state="ready",
    label_sets=(("linux",),),
    max_agents=10,
    active=2,
    booting=1,
    warm_ready=1,
    warm_target=3,
    cpus_used=1.5,
    memory_bytes_used=100,
)


def test_what_coordinators_hold_on_one_host_is_one_row() -> None:
    (row,) = once_each([HERE, replace(HERE, active=3, warm_ready=2, cpus_used=0.5, last_error="no image")])
    assert (row.active, row.booting, row.warm_ready, row.warm_target) == (5, 2, 3, 3)
    assert (row.cpus_used, row.memory_bytes_used, row.last_error) == (2.0, 200, "no image")


def test_a_scaler_is_ready_when_one_coordinator_can_use_it() -> None:
    draining = replace(HERE, state="draining", active=0)
    (row,) = once_each([draining, HERE])
    assert (row.state, row.active) == ("ready", 2)
    (row,) = once_each([HERE, draining])
    assert row.state == "ready"


def test_scalers_of_the_same_name_on_several_hosts_stay_apart() -> None:
    rows = [replace(HERE, instance_id=InstanceId(host), name=name) for host in "ab" for name in ("x", "y")]
    assert once_each(rows) == rows
