import pytest
from prometheus_client.parser import text_string_to_metric_families

from kici.domain.resources import Amount
from kici.observe.metrics import CONTENT_TYPE, GLOBAL_ROW, Metrics, ReservedBy


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def used(metrics: Metrics, scaler: str, kind: str = "bare-metal", pool: str = "") -> tuple[float, float]:
    row = (("machinePool", pool), ("scaler", scaler), ("scalerType", kind))
    found = samples(metrics)
    return (
        found["kici_orch_scaler_cpus_used", row],
        found["kici_orch_scaler_memory_bytes_used", row],
    )


def test_the_names_are_those_that_operators_know() -> None:
    metrics = Metrics()
    metrics.agents_active.set(3)
    metrics.spawn_failures.labels(backend="container", bound="true").inc()
    metrics.redispatch.labels(trigger="sweep").inc()
    metrics.config_reloads.labels(result="applied").inc()
    metrics.spawn_refusals.inc(2)
    found = samples(metrics)
    assert found["kici_orch_agents_active", ()] == 3
    assert found["kici_orchestrator_draining", ()] == 0
    assert found["kici_orch_scaler_spawn_failures_total", (("backend", "container"), ("bound", "true"))] == 1
    assert found["kici_orch_scaler_redispatch_total", (("trigger", "sweep"),)] == 1
    assert found["kici_orch_scaler_config_reloads_total", (("result", "applied"),)] == 1
    assert found["kici_orch_scaler_spawn_refusals_total", ()] == 2
    assert CONTENT_TYPE.startswith("text/plain")


def test_nothing_is_shown_twice() -> None:
    metrics = Metrics()
    metrics.jobs_submitted.inc()
    assert not any(name.endswith("_created") for name, _ in samples(metrics))


def test_two_programs_in_one_process_do_not_share_their_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.jobs_submitted.inc()
    assert samples(other)["kici_orch_jobs_submitted_total", ()] == 0


@pytest.mark.spec("T9.7")
def test_used_resources_return_to_zero_after_all_agents_are_gone() -> None:
    metrics = Metrics()
    big = ReservedBy("gpu", "bare-metal", "rack")
    small = ReservedBy("local", "bare-metal")
    metrics.set_reserved({big: Amount(cpus=4, memory_bytes=100), small: Amount(cpus=0.5)}, scalers=())
    assert used(metrics, "gpu", pool="rack") == (4, 100)
    assert used(metrics, GLOBAL_ROW, "") == (4.5, 100)
    metrics.set_reserved({}, scalers=("gpu", "local"))
    assert used(metrics, "gpu", pool="rack") == used(metrics, "local") == used(metrics, GLOBAL_ROW, "") == (0, 0)


def test_a_scaler_that_is_gone_leaves_no_rows_once_its_last_agent_is_gone() -> None:
    metrics = Metrics()
    holding = {ReservedBy("local", "bare-metal"): Amount(cpus=1)}
    metrics.set_reserved(holding, scalers=("local",))
    metrics.set_reserved(holding, scalers=())
    assert used(metrics, "local") == (1, 0)
    metrics.set_reserved({}, scalers=())
    assert b'"local"' not in metrics.render()


def test_a_status_without_jobs_falls_to_zero_instead_of_keeping_its_last_count() -> None:
    metrics = Metrics()
    metrics.set_queue_depth({"queued": 7, "running": 1})
    metrics.set_queue_depth({"running": 2})
    found = samples(metrics)
    assert found["kici_orch_dispatch_queue_depth", (("status", "queued"),)] == 0
    assert found["kici_orch_dispatch_queue_depth", (("status", "running"),)] == 2
