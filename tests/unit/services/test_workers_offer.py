"""What a worker offers is what coordinators route by; and whose caps count for whom."""

from dataclasses import replace

from kici.config.model import BackendType, Cap, LabelSet, Reuse, ScalerEntry, ScalersConfig
from kici.decide.admit import Book, Usage
from kici.decide.entries import Routable, host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.ids import ScalerName
from kici.domain.platform import Host
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.worker import local_name, remote_name
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.workers_caps import spread, used_here
from kici.services.workers_offer import host_caps_of, offer_of, routables_of, scaler_caps_of
from kici.testing.builders import a_reservation, a_spawn
from kici.testing.fake_backend import FakeBackend, FakeMachines
from kici.testing.sim_clock import SimClock
from kici.wire.codec import encode
from kici.wire.worker_codec import decode_from_worker
from kici.wire.worker_messages import WorkerOffer

HOST = Host("linux", "x86_64")
CONFIG = ScalersConfig(
    scalers=(
        ScalerEntry(
            name=ScalerName("docker"),
            type=BackendType.CONTAINER,
            max_agents=4,
            max_concurrent_spawns=2,
            resource_cap=Cap(max_cpu=8.0),
            mandatory_labels=("docker",),
            reuse=Reuse(idle_seconds=30.0, max_jobs=5),
            label_sets=(
                LabelSet(
                    labels=("linux", "docker"),
                    image="python:3.12",
                    resources=ResourceRequest(requests=Ask(cpus=2.0, memory="2g")),
                ),
                LabelSet(labels=("linux", "docker", "small"), image="busybox"),
            ),
        ),
        ScalerEntry(
            name=ScalerName("local"),
            type=BackendType.BARE_METAL,
            max_agents=2,
            label_sets=(LabelSet(labels=("linux", "x64"), binary_path="kici-agent"),),
        ),
    ),
    global_max_agents=5,
    global_resource_cap=Cap(max_cpu=12.0, max_memory_bytes=2**33),
)


def a_fleet() -> Fleet:
    runtimes = {}
    for entry in CONFIG.scalers:
        backend = FakeBackend(
            scaler=entry.name, machines=FakeMachines(), clock=SimClock(), on_exit=lambda agent_id, how: None
        )
        backend.backend_type = entry.type.value
        runtime = ScalerRuntime(name=entry.name, backend=backend, caps=scaler_caps(entry), orchestrator_url="ws://x")
        runtime.widen(entry.max_concurrent_spawns)
        if entry.reuse is not None:
            runtime.reuse_idle_seconds, runtime.reuse_max_jobs = entry.reuse.idle_seconds, entry.reuse.max_jobs
        runtimes[entry.name] = runtime
    return Fleet(runtimes=runtimes, router=Router(routables(CONFIG, HOST)), caps=host_caps(CONFIG))


def test_an_offer_carries_everything_that_routing_and_admission_need() -> None:
    offer = decode_from_worker(encode(offer_of(a_fleet())))
    assert isinstance(offer, WorkerOffer)
    assert host_caps_of(offer) == replace(host_caps(CONFIG), machine_pools={})
    found: list[Routable] = []
    for scaler, entry in zip(offer.scalers, CONFIG.scalers, strict=True):
        name = remote_name("w1", scaler.name)
        assert scaler_caps_of(scaler, name) == replace(scaler_caps(entry), scaler=name)
        assert scaler.spawns_at_once == entry.max_concurrent_spawns
        found += routables_of(offer, scaler, name)
    assert [replace(each, scaler=local_name(each.scaler)) for each in found] == list(routables(CONFIG, HOST))
    docker = offer.scalers[0]
    assert (docker.reuse_idle_seconds, docker.reuse_max_jobs) == (30.0, 5)


def test_reservations_of_workers_do_not_count_for_this_host() -> None:
    book = Book()
    for number, scaler in enumerate(("local", "w1/linux", "w1/linux", "gone from the file")):
        book.reserve(a_reservation(a_spawn(agent_id=f"agent-{number}"), scaler=ScalerName(scaler)))
    fleet = a_fleet()
    assert used_here(fleet, book) == book.total
    merged = replace(fleet, remote=frozenset({ScalerName("w1/linux")}))
    one = book.of(ScalerName("local"))
    assert used_here(merged, book) == Usage(agents=2, cpu_micros=2 * one.cpu_micros, memory_bytes=2 * one.memory_bytes)


def test_equal_sets_of_workers_are_asked_by_their_room_and_others_in_their_order() -> None:
    def entry(scaler: str, *labels: str) -> Routable:
        return replace(routables(CONFIG, HOST)[2], scaler=ScalerName(scaler), offers=frozenset(labels))

    asked = [entry("near", "a"), entry("w1/a", "a"), entry("w2/a", "a"), entry("w3/a", "a"), entry("w1/b", "a", "b")]
    room = {"w1/a": 1, "w2/a": 5, "w3/a": 5, "w1/b": 9}
    remote = frozenset(map(ScalerName, room))
    found = [each.scaler for each in spread(asked, remote, lambda name: room[name])]
    assert found == ["near", "w2/a", "w3/a", "w1/a", "w1/b"]
