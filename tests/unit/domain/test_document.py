import json
import re
from pathlib import Path

import pytest

from kici.domain.document import JOBS_MAX, SubmitRun, read_job, read_run
from kici.domain.document_rules import find_circle
from kici.domain.job import JobBuild
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.strict import Faulty

FULL = {
    "name": "test",
    "runsOn": ["linux"],
    "run": "make test",
    "env": {"CI": "true"},
    "resources": {"requests": {"cpus": 1, "memory": "1g"}, "limits": {"cpus": 2, "memory": "2g"}},
    "container": {
        "image": "python:3.12",
        "credentials": {"username": "registry:user", "password": "registry:password"},
    },
    "timeoutSeconds": 1800,
    "queueTimeoutSeconds": 3600,
    "secrets": {"TOKEN": "deploy:token"},
}


def faults(raw: object, reader: object = read_job) -> dict[str, str]:
    """Path -> message of everything that is wrong."""
    assert callable(reader)
    with pytest.raises(Faulty) as caught:
        reader(raw)
    return {fault.path: fault.message for fault in caught.value.faults}


def job(**fields: object) -> SubmitRun:
    return read_job({"command": ["true"], **fields})


def test_a_full_document_means_what_it_says() -> None:
    submitted = read_job(FULL)
    (found,) = submitted.jobs
    assert (submitted.name, submitted.org, found.name) == ("test", "default", "test")
    assert found.spec.command == ("/bin/sh", "-e", "-c", "make test")
    assert found.spec.env == {"CI": "true"}
    assert (found.spec.timeout_ms, found.queue_timeout_ms) == (1_800_000, 3_600_000)
    assert found.demand.labels == {"linux"}
    assert found.demand.image == found.spec.image == "python:3.12"
    assert found.demand.resources == ResourceRequest(
        requests=Ask(cpus=1.0, memory="1g"), limits=Ask(cpus=2.0, memory="2g")
    )
    assert {str(ref) for ref in submitted.secret_refs()} == {"deploy:token", "registry:user", "registry:password"}


def test_a_command_alone_is_a_job() -> None:
    submitted = job()
    assert submitted.jobs[0].demand.labels == frozenset()
    assert submitted.jobs[0].spec.timeout_ms is None
    assert submitted.jobs[0].queue_timeout_ms is None
    assert submitted.secret_refs() == frozenset()


def test_a_job_without_a_name_is_called_by_what_it_runs() -> None:
    assert read_job({"run": "\n\n  make all\necho"}).name == "make all"
    assert read_job({"command": ["echo", "a\tb"]}).name == "echo a b"


def test_labels_are_canonical() -> None:
    demand = job(runsOn={"labels": [" Linux ", "linux", "GPU"], "exclude": ["Slow"]}).jobs[0].demand
    assert demand.labels == {"linux", "gpu"}
    assert demand.exclude == {"slow"}


@pytest.mark.parametrize("label", ["kici:os:linux", "kici:arch:x64", "kici:host:build-7", "kici:role:builder"])
def test_reserved_labels_select(label: str) -> None:
    assert job(runsOn=[label]).jobs[0].demand.labels == {label}


@pytest.mark.parametrize(
    "label", ["", " ", "a,b", "a b", "a\tb", "x" * 201, "kici:", "kici:os", "kici:os:", "kici:oss:x"]
)
def test_a_label_that_no_agent_can_carry_is_refused(label: str) -> None:
    assert set(faults({"command": ["true"], "runsOn": ["linux", label]})) == {"$.runsOn[1]"}


def test_a_label_both_wanted_and_excluded_is_refused() -> None:
    assert "gpu" in faults({"run": "x", "runsOn": {"labels": ["gpu"], "exclude": ["GPU"]}})["$.runsOn.exclude"]


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({}, "$"),
        ({"run": "x", "command": ["x"]}, "$"),
        ({"run": "  \n"}, "$.run"),
        ({"run": "a\0b"}, "$.run"),
        ({"command": []}, "$.command"),
        ({"command": [""]}, "$.command"),
        ({"command": ["a", "b\0"]}, "$.command[1]"),
        ({"command": ["a"], "name": "two\nlines"}, "$.name"),
        ({"command": ["a"], "name": " "}, "$.name"),
        ({"command": ["a"], "name": "x" * 201}, "$.name"),
        ({"command": ["a"], "org": "no such/org"}, "$.org"),
        ({"command": ["a"], "env": {"A": "x\0"}}, "$.env.A"),
        ({"command": ["a"], "env": {"1A": "x"}}, "$.env"),
        ({"command": ["a"], "env": {"A=B": "x"}}, "$.env"),
        ({"command": ["a"], "env": {"A": "x"}, "secrets": {"A": "b:c"}}, "$.secrets.A"),
        ({"command": ["a"], "secrets": {"A": "literal"}}, "$.secrets.A"),
        ({"command": ["a"], "secrets": {"A": ":x"}}, "$.secrets.A"),
        ({"command": ["a"], "timeoutSeconds": 0}, "$.timeoutSeconds"),
        ({"command": ["a"], "timeoutSeconds": -1}, "$.timeoutSeconds"),
        ({"command": ["a"], "timeoutSeconds": 1e12}, "$.timeoutSeconds"),
        ({"command": ["a"], "queueTimeoutSeconds": -1}, "$.queueTimeoutSeconds"),
        ({"command": ["a"], "needs": ["b"]}, "$.needs"),
        ({"jobs": {}}, "$.jobs"),
        ({"command": ["a"], "runsOn": "linux"}, "$.runsOn"),
        ({"command": ["a"], "runsOn": ["l"] * 65}, "$.runsOn"),
    ],
)
def test_each_rule_names_its_place(document: dict[str, object], path: str) -> None:
    assert list(faults(document)) == [path]


@pytest.mark.spec("scaler 6.4.5")
@pytest.mark.parametrize(
    ("requests", "limits", "fault"),
    [
        ({"cpus": 2}, {"cpus": 1}, "requests 2 cpus, which is more than the limit of 1"),
        ({"cpus": 1, "memory": "2g"}, {"cpus": 1, "memory": "1g"}, "requests 2g, which is more than the limit of 1g"),
    ],
)
def test_a_job_that_requests_more_than_its_limit_is_refused(
    requests: dict[str, object], limits: dict[str, object], fault: str
) -> None:
    found = faults({"run": "x", "resources": {"requests": requests, "limits": limits}})
    assert list(found.values()) == [fault]


def test_waiting_for_ever_can_be_asked_for() -> None:
    assert job(queueTimeoutSeconds=0).jobs[0].queue_timeout_ms == 0


def test_all_faults_are_told_at_once() -> None:
    found = faults(
        {
            "run": "x",
            "runson": ["linux"],
            "timeoutSeconds": "1800",
            "env": {"CI": True},
            "secrets": {"T": "x"},
            "resources": {"requests": {"cpus": 3}, "limits": {"cpus": 2}},
        }
    )
    assert set(found) == {
        "$.runson",
        "$.timeoutSeconds",
        "$.env.CI",
        "$.secrets.T",
        "$.resources.requests.cpus",
    }
    assert "did you mean runsOn?" in found["$.runson"]


def test_what_follows_from_a_fault_is_not_a_fault_of_its_own() -> None:
    assert list(faults({"run": 5})) == ["$.run"]
    assert list(faults({"runn": "make"})) == ["$.runn"]


def test_a_value_that_may_be_a_secret_is_not_repeated() -> None:
    document = {
        "run": "x",
        "container": {"image": "a", "credentials": {"password": "hunter2"}},
        "secrets": {"A": "s3cr3t"},
    }
    assert not re.search("hunter2|s3cr3t", str(faults(document)))


class TestResources:
    def test_flat_means_request_and_limit(self) -> None:
        resources = job(resources={"cpus": 0.5, "memory": "512Mi"}).jobs[0].demand.resources
        assert resources.requests == resources.limits == Ask(cpus=0.5, memory="512Mi")

    @pytest.mark.parametrize(
        ("resources", "path"),
        [
            ({"cpus": 1, "limits": {"cpus": 1}}, "$.resources"),
            ({"cpus": 0}, "$.resources.cpus"),
            ({"cpus": 257}, "$.resources.cpus"),
            ({"memory": "4GB"}, "$.resources.memory"),
            ({"memory": "0m"}, "$.resources.memory"),
            ({"memory": "9" * 50 + "g"}, "$.resources.memory"),
            ({"memory": 512}, "$.resources.memory"),
            ({"limits": {"memory": "x"}}, "$.resources.limits.memory"),
            ({"requests": {"memory": "2g"}, "limits": {"memory": "1g"}}, "$.resources.requests.memory"),
            ({"requests": {"memori": "2g"}}, "$.resources.requests.memori"),
        ],
    )
    def test_each_rule_names_its_place(self, resources: object, path: str) -> None:
        assert list(faults({"run": "x", "resources": resources})) == [path]

    def test_one_side_may_be_left_out(self) -> None:
        resources = job(resources={"limits": {"memory": "1g"}}).jobs[0].demand.resources
        assert resources == ResourceRequest(limits=Ask(memory="1g"))


class TestContainer:
    @pytest.mark.spec("scaler 28.4.6")
    def test_a_string_is_an_image_without_credentials(self) -> None:
        (found,) = job(container="alpine").jobs
        assert (found.spec.image, found.spec.registry) == ("alpine", {})

    @pytest.mark.spec("scaler 28.4.4")
    def test_without_a_user_name_there_is_the_usual_one(self) -> None:
        (found,) = job(container={"image": "a", "credentials": {"password": "r:p"}}).jobs
        assert found.spec.registry == {"username": "x-access-token", "password": "r:p"}

    def test_a_user_name_without_a_colon_is_literal(self) -> None:
        submitted = job(container={"image": "a", "credentials": {"username": "robot", "password": "r:p"}})
        assert {str(ref) for ref in submitted.secret_refs()} == {"r:p"}

    @pytest.mark.spec("scaler 28.4.5")
    def test_a_dockerfile_with_credentials_needs_a_registry(self) -> None:
        credentials = {"password": "r:p", "registry": "ghcr.io"}
        (found,) = job(container={"dockerfile": "ci/Dockerfile", "credentials": credentials}).jobs
        assert found.demand.image == "dockerfile:ci/Dockerfile"
        assert found.spec.registry["registry"] == "ghcr.io"
        without = {"dockerfile": "Dockerfile", "credentials": {"password": "r:p"}}
        assert "registry" in faults({"run": "x", "container": without})["$.container.credentials"]

    def test_the_page_about_containers_shows_a_job_that_is_accepted(self) -> None:
        page = (Path(__file__).parents[3] / "docs" / "containers.md").read_text()
        (shown,) = [text for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "dockerfile" in text]
        (found,) = read_job(json.loads(shown)).jobs
        assert found.spec.build.target == "test"
        assert found.demand.image == "dockerfile:Dockerfile"
        assert "COPY list" in found.spec.build.context["Dockerfile"]

    def test_a_dockerfile_comes_with_what_it_is_built_from(self) -> None:
        files = {"ci/D": "FROM a", "data": "1"}
        asked = {"dockerfile": "ci/D", "context": files, "target": "test", "args": {"VERSION": "3"}}
        (found,) = job(container=asked).jobs
        assert found.spec.build == JobBuild(context=files, target="test", args={"VERSION": "3"})

    @pytest.mark.spec("scaler 28.4.2")
    @pytest.mark.parametrize("password", ["literal", ":x", "x:", "x", ""])
    def test_a_literal_password_is_refused(self, password: str) -> None:
        document = {"run": "x", "container": {"image": "a", "credentials": {"password": password}}}
        assert list(faults(document)) == ["$.container.credentials.password"]

    @pytest.mark.parametrize(
        ("container", "path"),
        [
            ({}, "$.container"),
            ({"image": "a", "dockerfile": "b"}, "$.container"),
            ({"image": ""}, "$.container.image"),
            ({"image": "--privileged"}, "$.container.image"),
            ({"image": "a b"}, "$.container.image"),
            ({"image": "dockerfile:x"}, "$.container.image"),
            ({"dockerfile": " "}, "$.container.dockerfile"),
            ({"dockerfile": "/etc/passwd"}, "$.container.dockerfile"),
            ({"dockerfile": "ci/../../D"}, "$.container.dockerfile"),
            ({"image": "a", "context": {"D": "FROM a"}}, "$.container.context"),
            ({"image": "a", "target": "test"}, "$.container.target"),
            ({"dockerfile": "D", "context": {"../D": "FROM a"}}, "$.container.context"),
            ({"dockerfile": "D", "context": {"D": "x" * 300_000}}, "$.container.context"),
            ({"dockerfile": "D", "target": "a b"}, "$.container.target"),
            ({"dockerfile": "D", "args": {"A=B": "c"}}, "$.container.args"),
            ({"image": "a", "credentials": {}}, "$.container.credentials"),
            ({"image": "a", "credentials": {"password": "r:p", "username": "a:"}}, "$.container.credentials.username"),
            ({"image": "a", "credentials": {"password": "r:p", "registry": ""}}, "$.container.credentials.registry"),
        ],
    )
    def test_each_rule_names_its_place(self, container: object, path: str) -> None:
        assert list(faults({"run": "x", "container": container})) == [path]


class TestRun:
    def test_jobs_keep_their_order_and_needs(self) -> None:
        jobs = {"b": {"run": "x", "needs": ["a", "a"]}, "a": {"run": "y", "name": "first"}}
        submitted = read_run({"jobs": jobs, "org": "acme"})
        assert [(each.key, each.name, each.needs) for each in submitted.jobs] == [
            ("b", "b", ("a",)),
            ("a", "first", ()),
        ]
        assert {each.demand.org for each in submitted.jobs} == {"acme"}
        assert submitted.name == "run"

    @pytest.mark.parametrize(
        ("document", "path"),
        [
            ({}, "$"),
            ({"jobs": {}}, "$.jobs"),
            ({"jobs": []}, "$.jobs"),
            ({"jobs": {"a": 1}}, "$.jobs.a"),
            ({"jobs": {"a b": {"run": "x"}}}, "$.jobs['a b']"),
            ({"jobs": {"a": {"run": "x", "needs": ["b"]}}}, "$.jobs.a.needs[0]"),
            ({"jobs": {"a": {"run": "x", "needs": ["a"]}}}, "$.jobs.a.needs"),
            ({"jobs": {"a": {"run": "x", "org": "acme"}}}, "$.jobs.a.org"),
            ({"jobs": {"a": {"run": "x"}}, "name": ""}, "$.name"),
        ],
    )
    def test_each_rule_names_its_place(self, document: object, path: str) -> None:
        assert list(faults(document, read_run)) == [path]

    def test_a_need_of_a_job_that_cannot_be_read_is_no_second_fault(self) -> None:
        found = faults({"jobs": {"a": {"run": "x", "needs": ["b"]}, "b": 7}}, read_run)
        assert list(found) == ["$.jobs.b"]

    def test_a_misspelt_need_is_answered_with_the_right_one(self) -> None:
        found = faults({"jobs": {"build": {"run": "x"}, "test": {"run": "x", "needs": ["biuld"]}}}, read_run)
        assert "did you mean build?" in found["$.jobs.test.needs[0]"]

    def test_a_circle_is_shown_whole(self) -> None:
        jobs = {"a": {"run": "x", "needs": ["c"]}, "b": {"run": "x", "needs": ["a"]}, "c": {"run": "x", "needs": ["b"]}}
        (message,) = faults({"jobs": jobs}, read_run).values()
        assert "a -> c -> b -> a" in message

    def test_a_run_has_a_largest_size(self) -> None:
        jobs = {f"j{number}": {"run": "x"} for number in range(JOBS_MAX + 1)}
        assert list(faults({"jobs": jobs}, read_run)) == ["$.jobs"]


@pytest.mark.parametrize(
    ("needs", "circle"),
    [
        ({}, []),
        ({"a": [], "b": ["a"], "c": ["a", "b"]}, []),
        ({"a": ["a"]}, ["a"]),
        ({"tail": ["a"], "a": ["b"], "b": ["a"], "free": []}, ["a", "b"]),
    ],
)
def test_circles_are_found_without_their_tails(needs: dict[str, list[str]], circle: list[str]) -> None:
    assert find_circle(needs) == circle
