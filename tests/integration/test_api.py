"""The HTTP API over the real services: nothing that a stranger sends makes it fail, and its description is true."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kici.cli.client import Client
from kici.cli.errors import Refused
from kici.testing.programs import CoordinatorProgram
from kici.web.app import ROUTES

CHECKED = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 12
DISRUPTIVE = {"/api/v1/admin/stop"}
"""Would end what is tested."""
OPERATIONS = sorted(
    {(route.method, route.path) for route in ROUTES if not route.is_page and route.path not in DISRUPTIVE}
)
NOTHING = "version: 1\nscalers: []\n"
"""No agent is ever made, so no script that a strategy thinks up is ever run."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProgram]:
    folder = tmp_path_factory.mktemp("api")
    scalers = folder / "scalers.yaml"
    scalers.write_text(NOTHING)
    with CoordinatorProgram(folder / "data", extra=("--scalers", str(scalers))) as program:
        yield program


def line(path: Path) -> str:
    return path.read_text().strip()


@pytest.fixture(scope="module")
def client(program: CoordinatorProgram) -> Iterator[Client]:
    client = Client(line(program.data_dir / "endpoint"), line(program.data_dir / "owner-token"))
    yield client
    client.close()


@pytest.fixture(scope="module")
def schema(client: Client) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{client.url}/api/v1/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_sent_is_answered_as_described(
    program: CoordinatorProgram, schema: schemathesis.BaseSchema, method: str, path: str
) -> None:
    token = line(program.data_dir / "owner-token")
    operation = schema[path][method]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def answered(case: schemathesis.Case[Any]) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        case.call_and_validate(headers=headers, checks=CHECKED, timeout=20)

    answered()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH"]),
    path=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=4),
)
def test_any_path_is_answered(client: Client, method: str, path: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        client.request(method, "/api/v1/" + "/".join(quote(part, safe="") for part in path))
    assert caught.value.status in (400, 404, 405)


EXOTIC = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=30).filter(str.strip)
VALUE = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=EXOTIC, script=VALUE.filter(str.strip), env=st.dictionaries(st.sampled_from(["A", "B"]), VALUE))
def test_any_text_of_a_good_document_goes_in_and_comes_out(
    client: Client, name: str, script: str, env: dict[str, str]
) -> None:
    job = client.post("/api/v1/jobs", {"name": name, "run": script, "env": env, "runsOn": ["nowhere"]})
    assert client.get(job["links"]["self"])["name"] == name
    assert client.get(job["links"]["explain"])["why"]
    assert client.get("/api/v1/jobs", limit=1)["items"][0]["id"] == job["id"]
    assert client.post(job["links"]["cancel"])["status"] == "cancelled"
    with pytest.raises(Refused, match="over"):
        client.post(job["links"]["cancel"])


def test_the_same_key_makes_one_run_and_another_body_does_not_change_it(client: Client) -> None:
    first = client.post("/api/v1/jobs", {"run": "true", "runsOn": ["nowhere"]}, key="once")
    second = client.post("/api/v1/jobs", {"run": "false", "runsOn": ["nowhere"]}, key="once")
    assert first["id"] == second["id"]


def test_a_submitter_sees_only_what_its_role_shows(client: Client) -> None:
    made = client.post("/api/v1/admin/tokens", {"name": "ci", "role": "submitter", "secretContexts": ["deploy"]})
    submitter = Client(client.url, made["token"])
    try:
        assert submitter.get("/api/v1/whoami")["role"] == "submitter"
        document = {"run": "true", "runsOn": ["nowhere"]}
        assert submitter.post("/api/v1/jobs", {**document, "secrets": {"T": "deploy:token"}})["status"] == "queued"
        with pytest.raises(Refused, match="context"):
            submitter.post("/api/v1/jobs", {**document, "secrets": {"T": "other:token"}})
        with pytest.raises(Refused, match=r"scaler\.read"):
            submitter.get("/api/v1/admin/agents")
        client.request("DELETE", f"/api/v1/admin/tokens/{made['details']['id']}")
        with pytest.raises(Refused, match="bearer token"):
            submitter.get("/api/v1/whoami")
    finally:
        submitter.close()
    actions = [(row["actor"], row["action"]) for row in client.get("/api/v1/admin/access-log")["items"]]
    assert any(actor.startswith("owner-token-") and action == "token.revoke" for actor, action in actions)
