"""`kici workflow` and `kici-admin events`."""

import json
from dataclasses import replace
from pathlib import Path

from kici.cli.workflow import with_variables
from kici.domain.event import EventState
from kici.testing.builders import AGENT, a_spawn
from kici.testing.served_surface import Served

TEXT = """\
ref: acme/deploy
on:
  deployed:
    jobs:
      go: {run: "true", env: {A: "1"}}
"""


def kici(served: Served, *arguments: str, stdin: str | None = None, code: int = 0) -> str:
    result = served.kici(*arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    return result.output


def test_a_workflow_is_applied_listed_and_deleted(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "workflow.yaml"
    file.write_text(TEXT)
    assert kici(served, "workflow", "list") == "There are no workflows.\n"
    assert kici(served, "workflow", "apply", str(file), "--set", "B=2=3") == "acme/deploy: workflow for deployed\n"
    document = served.fake.workflows.rows["acme/deploy"].document
    assert document["on"]["deployed"]["jobs"]["go"]["env"] == {"A": "1", "B": "2=3"}
    assert "acme/deploy" in kici(served, "workflow", "list")
    assert json.loads(kici(served, "workflow", "list", "--json"))[0]["ref"] == "acme/deploy"
    assert kici(served, "workflow", "delete", "acme/deploy") == "acme/deploy deleted\n"
    assert "no workflow" in kici(served, "workflow", "delete", "acme/deploy", code=1)


def test_faults_are_told_with_their_place_in_the_file(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "workflow.yaml"
    file.write_text(TEXT.replace("run:", "rnu:"))
    told = kici(served, "workflow", "apply", str(file), code=1)
    assert f"{file}:5:" in told
    assert "rnu" in told
    assert "NAME=VALUE" in kici(served, "workflow", "apply", str(file), "--set", "x", code=1)


def test_variables_reach_shared_jobs_too() -> None:
    document = {"jobs": {"a": {"run": "x"}, "b": 1}, "on": ["y"]}
    assert with_variables(document, ("N=v",)) == {"jobs": {"a": {"run": "x", "env": {"N": "v"}}, "b": 1}, "on": ["y"]}
    assert with_variables([1], ("N=v",)) == [1]


def test_provisions_are_listed(served: Served) -> None:
    assert kici(served, "admin", "provisions") == "There are no such machines.\n"
    served.fake.events.spawns.append(a_spawn(backend_type="event"))
    assert "booting" in kici(served, "admin", "provisions")
    assert json.loads(kici(served, "admin", "provisions", "--json"))[0]["agentId"] == AGENT


def test_events_are_emitted_listed_retried_and_discarded(served: Served) -> None:
    kici(served, "workflow", "apply", "-", stdin=TEXT)
    assert "for acme/deploy" in kici(served, "admin", "events", "emit", "deployed", "--payload", '{"v": 1}')
    assert "for nobody" in kici(served, "admin", "events", "emit", "deployed", "--target", "acme/none")
    assert "not JSON" in kici(served, "admin", "events", "emit", "deployed", "--payload", "{", code=1)
    assert "reserved" in kici(served, "admin", "events", "emit", "kici.x", code=1)
    assert "acme/deploy" in kici(served, "admin", "events")
    assert len(json.loads(kici(served, "admin", "events", "list", "--json"))) == 2
    assert kici(served, "admin", "events", "dlq", "list") == "There are no such events.\n"
    served.fake.events.rows[0] = dead = replace(
        served.fake.events.rows[0], state=EventState.DEAD, dead_reason="non_retryable", last_error="answered 410"
    )
    assert "answered 410" in kici(served, "admin", "events", "dlq", "list")
    assert "again" in kici(served, "admin", "events", "dlq", "retry", dead.id)
    served.fake.events.rows[0] = dead
    assert "discarded" in kici(served, "admin", "events", "dlq", "discard", dead.id)
    assert "kici.scaler.scale-up" in kici(served, "admin", "events", "schema")
