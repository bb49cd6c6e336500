import json

import pytest

from kici.domain.ids import DEFAULT_ORG, AgentId
from kici.domain.secret import SecretRef
from kici.testing.fake_surface import ME
from kici.testing.served_surface import Served
from kici.web.surface import AgentRow, Check, CheckStatus


def admin(served: Served, *arguments: str, stdin: str | None = None, code: int = 0) -> str:
    result = served.kici("admin", *arguments, stdin=stdin)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.parametrize(("worst", "code"), [(CheckStatus.PASS, 0), (CheckStatus.WARN, 1), (CheckStatus.FAIL, 2)])
def test_diagnose_exits_by_the_worst_check(served: Served, worst: CheckStatus, code: int) -> None:
    served.fake.scalers.checks.append(Check(name="scaler:local", status=worst, message="image not found"))
    text = admin(served, "diagnose", code=code)
    assert text.startswith(f"Overall: {worst.value}\n")
    assert "image not found" in text
    assert json.loads(admin(served, "diagnose", "local", "--json", code=code))["overall"] == worst.value


def test_scalers_are_listed_and_reloaded(served: Served) -> None:
    assert "linux,x64" in admin(served, "scaler", "status")
    assert "shared 1.5/4 cpus 1.0/2.0 GiB" in admin(served, "scaler", "status")
    assert "instance-1: applied\n  added: gpu\n" in admin(served, "scaler", "reload")
    served.fake.scalers.outcome = "rejected"
    assert "rejected" in admin(served, "scaler", "reload", code=1)


def test_agents_are_listed_shown_and_drained(served: Served) -> None:
    row = AgentRow(agent_id=AgentId("agent-1"), state="idle", instance_id=ME, labels=frozenset({"linux"}))
    served.fake.agents.rows[row.agent_id] = row
    assert "agent-1" in admin(served, "agents")
    assert admin(served, "agents") == admin(served, "agents", "list")
    assert "idle" in admin(served, "agents", "show", "agent-1")
    assert admin(served, "agents", "drain", "agent-1") == "agent-1 draining\n"


def test_the_queue_is_listed_and_cleared_after_a_question(served: Served) -> None:
    served.fake.jobs.add()
    assert "job-1" in admin(served, "queue")
    assert "queued" in admin(served, "queue", "show", "job-1")
    admin(served, "queue", "clear", stdin="n\n", code=1)
    assert admin(served, "queue", "clear", stdin="y\n").endswith("cancelled 1\n")
    assert admin(served, "queue", "clear", "--yes") == "cancelled 0\n"


def test_drain_waits_and_resume_ends_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.cli.admin_coordinator.PASS_SECONDS", 0.01)
    served.fake.coordinator.running = 1
    assert admin(served, "drain", "--wait", "--timeout", "0.05", code=2) == "draining=true jobsRunning=1\n"
    served.fake.coordinator.running = 0
    assert admin(served, "drain", "--wait") == "draining=true jobsRunning=0\n"
    assert admin(served, "resume") == "draining=false jobsRunning=0\n"
    assert admin(served, "drain", "--status") == "draining=false jobsRunning=0\n"


def test_stop_may_keep_agents(served: Served) -> None:
    admin(served, "stop")
    admin(served, "stop", "--keep-agents")
    assert served.fake.coordinator.stopped == [False, True]


def test_peers_mark_the_one_that_answers(served: Served) -> None:
    assert "instance-1 (this one)" in admin(served, "peers")


def test_settings_are_shown_set_and_taken_back(served: Served) -> None:
    assert "queue_max_depth" in admin(served, "settings")
    assert admin(served, "settings", "set", "queue_max_depth=7") == "queue_max_depth=7\n"
    assert admin(served, "settings", "get", "queue_max_depth") == "7\n"
    assert admin(served, "settings", "set", "queue_max_depth=default") == "queue_max_depth=100 (default)\n"
    admin(served, "settings", "set", "--org", "acme", "queue_max_depth=9")
    assert admin(served, "settings", "get", "--org", "acme", "queue_max_depth") == "9\n"
    admin(served, "settings", "set", "queue_max_depth=many", code=2)
    admin(served, "settings", "get", "nonsense", code=2)
    admin(served, "settings", "set", "nonsense=1", code=1)


def test_tokens_print_their_plain_text_alone(served: Served) -> None:
    plain = admin(served, "token", "create", "ci", "--role", "submitter", "--context", "deploy", "--expires", "1d")
    token = served.fake.tokens.api[plain.strip()]
    assert token.secret_contexts == frozenset({"deploy"})
    assert token.expires_at is not None
    assert "ci" in admin(served, "token", "list")
    assert plain.strip() not in admin(served, "token", "list", "--json")
    admin(served, "token", "revoke", token.id)
    admin(served, "token", "revoke", token.id, code=1)


def test_agent_tokens_carry_labels(served: Served) -> None:
    plain = admin(served, "agent-token", "create", "-l", "linux", "--mandatory-label", "gpu")
    assert plain.startswith("kat_")
    (token,) = served.fake.tokens.agent.values()
    assert (token.labels, token.gate) == (frozenset({"linux"}), frozenset({"gpu"}))
    assert "linux" in admin(served, "agent-token", "list")
    admin(served, "agent-token", "revoke", token.id)


def test_secrets_come_from_standard_input_and_are_listed_without_values(served: Served) -> None:
    admin(served, "secrets", "set", "deploy:token", stdin="hunter2\n")
    assert served.fake.secrets.values == {(DEFAULT_ORG, SecretRef("deploy", "token")): "hunter2"}
    listed = admin(served, "secrets", "list")
    assert "deploy:token" in listed
    assert "hunter2" not in listed
    assert admin(served, "secrets", "reveal", "deploy:token") == "hunter2\n"
    admin(served, "secrets", "delete", "deploy:token")
    admin(served, "secrets", "set", "deploy:token", stdin="", code=1)
    admin(served, "secrets", "set", "deploy", stdin="x", code=2)


def test_the_access_log_is_printed(served: Served) -> None:
    admin(served, "queue", "clear", "--yes")
    assert "queue.clear" in admin(served, "access-log")


def test_a_missing_permission_is_one_sentence(served: Served) -> None:
    result = served.kici("admin", "token", "list", token="admin")
    assert result.exit_code == 1
    assert result.stderr == "Error: admin (admin) lacks the permission token.manage\n"


def test_a_wrong_token_says_where_the_right_one_is(served: Served) -> None:
    result = served.kici("jobs", token="nobody")
    assert result.exit_code == 1
    assert "KICI_TOKEN" in result.stderr


def test_the_key_of_secrets_is_changed(served: Served) -> None:
    served.fake.secrets.values[DEFAULT_ORG, SecretRef("deploy", "token")] = "x"
    assert admin(served, "secrets", "rotate-key").startswith(
        "1 secrets sealed anew, 0 were sealed by this key before\n"
    )
    served.fake.secrets.unreadable = ("acme/deploy:token",)
    assert json.loads(admin(served, "secrets", "rotate-key", "--json", code=1))["unreadable"] == ["acme/deploy:token"]
