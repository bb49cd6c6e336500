"""What a container is made of."""

from dataclasses import replace

import pytest

from kici.adapters.docker_engine import create_request
from kici.decide import container_plan as plan
from kici.decide.container_plan import AgentOrder, ContainerSet, Injected, Surroundings, plan_container, user_ids
from kici.domain.ids import AgentId, Instant, JobId, RunId, ScalerName
from kici.domain.resources import Amount

SET = ContainerSet(labels=("linux", "pool"), image="debian:12")
ORDER = AgentOrder(
    agent_id=AgentId("scaler-container-00000001"),
    scaler=ScalerName("pool"),
    owner="inst",
    label_set=("linux", "pool"),
    labels=("linux", "pool", "kici:scaler:pool"),
    url="ws://172.30.0.1:4000/ws",
    spawned_at=Instant(12),
)
AROUND = Surroundings(
    network="kici-agent-net", socket="/run/docker.sock", injected=Injected(volume="v", entrypoint=("/a",))
)


@pytest.mark.spec("scaler 29.10.3")
def test_the_label_sets_variables_win() -> None:
    spec = plan_container(replace(SET, env={"KICI_LABELS": "mine"}), ORDER, AROUND)
    assert spec.env["KICI_LABELS"] == "mine"


@pytest.mark.spec("scaler 29.10.4")
def test_what_the_operator_forwards_arrives() -> None:
    around = replace(AROUND, environment={"KICI_AGENT_ENV_HTTP_PROXY": "x", "KICI_DATABASE_URL": "secret"})
    spec = plan_container(SET, ORDER, around)
    assert spec.env["HTTP_PROXY"] == "x"
    assert "secret" not in spec.env.values()


def test_the_token_comes_by_standard_input_only() -> None:
    spec = plan_container(SET, ORDER, AROUND)
    assert spec.env["KICI_AGENT_TOKEN_FILE"] == "/dev/stdin"
    assert spec.reads_input
    request = create_request(spec)
    assert (request["OpenStdin"], request["StdinOnce"]) == (True, True)
    assert plan.token_input("kat_x") == b"kat_x\n"


def test_without_a_token_there_is_no_standard_input() -> None:
    spec = plan_container(SET, replace(ORDER, has_token=False), AROUND)
    assert "KICI_AGENT_TOKEN_FILE" not in spec.env
    assert "OpenStdin" not in create_request(spec)
    assert plan.token_input(None) == b""


def test_an_agent_that_is_not_root_is_given_its_folder() -> None:
    place, folder = plan.agent_folder(ORDER.agent_id, uid=7, gid=8)
    assert (place.path, folder.path) == (".kici", ".kici/scaler-container-00000001")
    assert (folder.mode, folder.uid, folder.gid) == (0o700, 7, 8)


@pytest.mark.spec("scaler 29.10.12")
def test_labels_of_bound_and_of_warm_spawns() -> None:
    bound = plan_container(SET, replace(ORDER, job_id=JobId("j"), run_id=RunId("r")), AROUND).labels
    assert (bound["kici-bound-job-id"], bound["kici-run-id"], bound["kici-owner"]) == ("j", "r", "inst")
    warm = plan_container(SET, ORDER, AROUND).labels
    assert not {"kici-bound-job-id", "kici-run-id"} & warm.keys()
    assert plan.owned_by("inst", ScalerName("pool"), ORDER.agent_id).items() <= warm.items()


@pytest.mark.spec("scaler 29.10.10")
def test_the_engines_socket_only_where_it_is_local_and_wanted() -> None:
    wanted = replace(SET, container_socket=True, volumes=("/a:/b:ro",))
    local = plan_container(wanted, ORDER, AROUND).binds
    assert local == ("/a:/b:ro", "/run/docker.sock:/run/docker.sock", "v:/opt/kici:ro")
    assert plan_container(wanted, ORDER, replace(AROUND, socket=None)).binds == ("/a:/b:ro", "v:/opt/kici:ro")
    assert plan_container(SET, ORDER, AROUND).binds == ("v:/opt/kici:ro",)


@pytest.mark.spec("scaler 29.10.5")
def test_limits_in_the_engines_words() -> None:
    request = create_request(plan_container(SET, replace(ORDER, limits=Amount(cpus=0.5)), AROUND))
    assert request["HostConfig"]["NanoCpus"] == 500_000_000
    assert "Memory" not in request["HostConfig"]
    assert request["HostConfig"]["PidsLimit"] == 4096


def test_a_jobs_image_takes_the_place_of_the_sets() -> None:
    spec = plan_container(SET, replace(ORDER, job_image="alpine"), AROUND)
    assert spec.image == "alpine"
    assert spec.env["KICI_JOB_IMAGE_AGENT"] == "1"
    assert "KICI_JOB_IMAGE_AGENT" not in plan_container(SET, ORDER, AROUND).env


@pytest.mark.parametrize(
    ("user", "ids"),
    [("", (0, 0)), ("7", (7, 0)), ("7:9", (7, 9)), ("build", (1234, 1235)), ("1234", (1234, 1235)), ("nobody", None)],
)
def test_whom_an_image_runs_as(user: str, ids: tuple[int, int] | None) -> None:
    assert user_ids(user, "root:x:0:0::/:/bin/sh\nbuild:x:1234:1235::/:/bin/sh\n") == ids


def test_a_loopback_address_means_something_else_in_a_container() -> None:
    assert plan.is_loopback("ws://127.0.0.1:4000/ws")
    assert not plan.is_loopback("ws://ci.example.org/ws")
    assert plan.reached_at("ws://127.0.0.1:4000/ws", "172.30.0.1") == "ws://172.30.0.1:4000/ws"
