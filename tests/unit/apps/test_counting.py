"""What agents report of themselves, added up by the type of backend that made them."""

from kici.observe.metrics import Metrics
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.wire.messages import AgentMetrics


def agents(bench: Bench, name: str, scaler: str, **labels: str) -> float:
    return bench.metric(f"kici_agent_{name}", scaler=scaler, **labels)


@benched(a_scaler("blue", ("linux", "blue")), a_scaler("red", ("linux", "red")))
async def test_reports_add_up_by_backend_type_whatever_the_scaler_and_the_agent(bench: Bench) -> None:
    static = await bench.an_agent("mine", "gpu")
    for number, color in enumerate(("blue", "red")):
        await bench.submits(color)
        await bench.made(number)
    made = [bench.agents[order.agent_id] for order in bench.orders]
    for agent in made:
        agent.says(
            AgentMetrics(
                active_jobs=1,
                backpressure=True,
                jobs={"success": 1, "failed": 2},
                steps=3,
                step_seconds=[0.05, 20.0],
                log_bytes=100,
                dropped_lines=5,
                backpressure_events=1,
            )
        )
    static.says(AgentMetrics(steps=1))
    await bench.passes()
    kind = "bare-metal"
    assert agents(bench, "jobs_total", kind, status="success") == 2
    assert agents(bench, "jobs_total", kind, status="failed") == 4
    assert agents(bench, "steps_total", kind) == 6
    assert agents(bench, "step_duration_seconds_count", kind) == 4
    assert agents(bench, "step_duration_seconds_bucket", kind, le="0.1") == 2
    assert agents(bench, "log_bytes_total", kind) == 200
    assert agents(bench, "log_lines_dropped_total", kind) == 10
    assert agents(bench, "log_backpressure_events_total", kind) == 2
    assert agents(bench, "jobs_active", kind) == agents(bench, "log_backpressure_active", kind) == 2
    assert agents(bench, "connection_status", kind) == 2
    assert agents(bench, "steps_total", "stateful") == agents(bench, "connection_status", "stateful") == 1
    names = {b"blue", b"red", b"mine", *(agent.agent_id.encode() for agent in made)}
    shown = [line for line in bench.coordinator.render_metrics().splitlines() if line.startswith(b"kici_agent_")]
    assert shown
    assert not [line for line in shown if any(name in line for name in names)]


@benched()
async def test_an_agent_that_is_gone_leaves_the_gauges_and_stays_in_the_totals(bench: Bench) -> None:
    agent = await bench.an_agent()
    agent.says(AgentMetrics(active_jobs=1, backpressure=True, jobs={"success": 1}))
    await bench.passes()
    assert agents(bench, "jobs_active", "stateful") == 1
    agent.leaves()
    await bench.passes()
    for gauge in ("jobs_active", "log_backpressure_active", "connection_status"):
        assert agents(bench, gauge, "stateful") == 0
    assert agents(bench, "jobs_total", "stateful", status="success") == 1


@benched()
async def test_a_later_report_replaces_how_the_agent_is_and_adds_to_what_it_did(bench: Bench) -> None:
    agent = await bench.an_agent()
    for active in (1, 0):
        agent.says(AgentMetrics(active_jobs=active, log_bytes=10))
    await bench.passes()
    assert (agents(bench, "jobs_active", "stateful"), agents(bench, "log_bytes_total", "stateful")) == (0, 20)


SCALER_METRICS = {
    "kici_orch_scaler_config_reloads": ("result",),
    "kici_orch_scaler_cpus_used": ("scaler", "scalerType", "machinePool"),
    "kici_orch_scaler_memory_bytes_used": ("scaler", "scalerType", "machinePool"),
    "kici_orch_scaler_spawn_refusals": (),
    "kici_orch_scaler_cap_lock_failures": ("reason",),
    "kici_orch_scaler_spawn_failures": ("backend", "bound"),
    "kici_orch_scaler_adoption_lookup_failures": (),
    "kici_orch_scaler_redispatch": ("trigger",),
    "kici_orch_scaler_scale_up_emitted": ("scaler",),
    "kici_orch_scaler_scale_down_emitted": ("scaler", "reason"),
    "kici_orch_scaler_external_provision_timeout": ("scaler",),
    "kici_orch_scaler_external_provisioning_active": ("scaler",),
    "kici_orch_scaler_reap_unseen_provisions": (),
    "kici_orch_scaler_reap_blocked": (),
    "kici_orch_scaler_warm_pool_target": ("scaler", "labelSet"),
    "kici_orch_scaler_warm_pool_ready": ("scaler", "labelSet"),
    "kici_orch_scaler_warm_pool_in_flight": ("scaler", "labelSet"),
    "kici_orch_scaler_warm_pool_spawns": ("scaler",),
    "kici_orch_scaler_warm_pool_reaped": ("scaler",),
}


def test_every_figure_of_the_scaler_has_the_name_and_labels_that_operators_know() -> None:
    found = {each._name: each._labelnames for each in vars(Metrics()).values() if hasattr(each, "_labelnames")}
    assert {name: labels for name, labels in found.items() if name.startswith("kici_orch_scaler_")} == SCALER_METRICS
