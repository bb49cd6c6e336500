"""Containers across the ends of those who made them, and of the engine that runs them."""

import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import BUSYBOX, LabCoordinator, coordinator, import_images, rules, until_no_rules

from kici.testing.programs import until

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("docker-restarts"), pytest.mark.timeout(280)]

UNTIL_TOLD = "echo begun; while ! test -e /tmp-stop; do sleep 0.1; done; echo told"


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        yield running


def begin(kici: LabCoordinator, *labels: str) -> str:
    """A job that runs until it is told to stop."""
    job = kici.submit(UNTIL_TOLD, *(word for label in labels or ("pool",) for word in ("-l", label)))
    until(lambda: "begun" in kici.output(job), seconds=60, what="the job has begun")
    return job


def container_of(kici: LabCoordinator, job: str) -> dict[str, str]:
    (found,) = [one for one in kici.containers() if one["Labels"].get("kici-bound-job-id") == job]
    return {"id": found["Id"], "address": found["NetworkSettings"]["Networks"]["kici-agent-net"]["IPAddress"]}


def stop(kici: LabCoordinator, container: str) -> None:
    """Tell the job in this container to end."""
    kici.lab.run("docker", "-H", f"unix://{kici.lab.socket}", "exec", container, "/bin/sh", "-c", "echo > /tmp-stop")


def ended_well(kici: LabCoordinator, job: str) -> bool:
    status: str = kici.job(job)["status"]
    assert status in ("running", "recovering", "success"), kici.job(job)
    return status == "success"


def has_failed(kici: LabCoordinator, job: str) -> bool:
    status: str = kici.job(job)["status"]
    return status == "failed"


@pytest.mark.spec("D28")
def test_a_job_survives_kill_9_and_rules_of_the_dead_go_while_a_neighbours_stand(engine: Lab) -> None:
    with coordinator(engine, "killed", port=4801) as kici:
        lives, dies = begin(kici), begin(kici)
        kept, gone = container_of(kici, lives), container_of(kici, dies)
        assert {kept["address"], gone["address"]} <= rules(engine)
        kici.stop(signal.SIGKILL)
        engine.ask("DELETE", f"/containers/{gone['id']}?force=1")
        kici.start()
        until(lambda: gone["address"] not in rules(engine), seconds=60, what="the rules of the dead are gone")
        assert kept["address"] in rules(engine)
        until(lambda: kici.job(dies)["status"] == "failed", seconds=60, what="the job of the dead has failed")
        assert "gone" in kici.job(dies)["reason"]
        stop(kici, kept["id"])
        until(lambda: ended_well(kici, lives), seconds=60, what="the other one ends as if nothing had happened")
        assert kici.output(lives) == "begun\ntold\n"
        kici.settle()
        until_no_rules(engine)


def test_stopping_with_agents_kept_and_starting_again_loses_nothing(engine: Lab) -> None:
    with coordinator(engine, "kept", port=4802) as kici:
        job = begin(kici)
        found = container_of(kici, job)
        kici.stop(signal.SIGUSR2)
        kici.start()
        stop(kici, found["id"])
        until(lambda: ended_well(kici, job), seconds=60, what="the job ends well")
        kici.settle()


def test_an_ordered_stop_leaves_no_container_and_no_rule(engine: Lab) -> None:
    with coordinator(engine, "ordered", port=4803) as kici:
        begin(kici)
        kici.stop(signal.SIGTERM)
        assert not kici.containers()
        assert not rules(engine)


def test_what_a_dead_coordinator_left_is_removed_by_its_next_start_and_nothing_else(engine: Lab) -> None:
    """Somebody else's containers, those of another installation and those of another scaler are not touched."""
    with coordinator(engine, "orphans", port=4804) as kici:
        labels = {
            "kici-managed": "true",
            "kici-owner": kici.instance_id,
            "kici-scaler-name": "pool",
            "kici-agent-id": "scaler-container-0badcafe",
        }
        made = {
            "orphan": labels,
            "other-owner": {**labels, "kici-owner": "somebody"},
            "other-scaler": {**labels, "kici-scaler-name": "another"},
            "stranger": {},
        }
        kici.stop(signal.SIGKILL)
        for name, has in made.items():
            body = {"Image": BUSYBOX, "Cmd": ["/bin/sleep", "1000"], "Labels": has}
            engine.ask("POST", f"/containers/create?name={name}", body)
            engine.ask("POST", f"/containers/{name}/start")
        kici.start()
        until(lambda: engine.ask("GET", "/containers/orphan/json") is None, seconds=60, what="the orphan is gone")
        for name in ("other-owner", "other-scaler", "stranger"):
            assert engine.ask("GET", f"/containers/{name}/json")["State"]["Running"]
            engine.ask("DELETE", f"/containers/{name}?force=1")


def test_two_coordinators_on_one_engine_restart_again_and_again_without_disturbing_anybody(engine: Lab) -> None:
    with coordinator(engine, "one", port=4805) as one, coordinator(engine, "two", port=4806) as two:
        jobs = [(kici, begin(kici)) for kici in (one, two) for _ in range(2)]
        for round_number in range(3):
            for kici in (one, two):
                kici.stop(signal.SIGKILL)
                kici.start()
            for kici, job in jobs:
                assert kici.job(job)["status"] in ("running", "recovering"), (round_number, kici.job(job))
        assert len(rules(engine)) == 4
        for kici, job in jobs:
            stop(kici, container_of(kici, job)["id"])
        for kici, job in jobs:
            until(partial(ended_well, kici, job), seconds=60, what="each job ends well")
        one.settle()
        two.settle()
        until_no_rules(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_ends_and_starts_under_load(engine: Lab, number: signal.Signals) -> None:
    """Jobs on it fail with a reason, what waits is explained, and the scaler recovers by itself."""
    quick = {"KICI_SCALER_PROVISION_BACKOFF_BASE_MS": "1000", "KICI_SCALER_PROVISION_BACKOFF_MAX_MS": "4000"}
    with coordinator(engine, f"engine-away-{number}", port=4807, KICI_AGENT_RECONNECT_GRACE_MS="5000", **quick) as kici:
        running = [begin(kici) for _ in range(3)]
        engine.stop_engine(number)
        waiting = kici.submit("echo back", "-l", "pool")
        # Its socket goes with it when it ends in order, and stays when it is killed.
        told = "no container engine answers at" if number == signal.SIGTERM else "does not answer"
        until(lambda: told in kici.run("explain", waiting).stdout, seconds=60, what="it is explained")
        until(lambda: told in kici.run("admin", "diagnose").stdout, seconds=60, what="and diagnosed")
        time.sleep(2)
        engine.start_engine()
        until(lambda: kici.job(waiting)["status"] == "success", seconds=60, what="the waiting job runs")
        for job in running:
            until(partial(has_failed, kici, job), seconds=60, what="a job of the dead has failed")
            assert kici.job(job)["reason"]
        kici.settle()
        until_no_rules(engine)
