"""Workflow documents: what is refused, and what a step learns of its event."""

from dataclasses import replace
from typing import Any

import pytest

from kici.domain.event import SCALE_DOWN, SCALE_UP, EventId, EventState, StoredEvent, event_schemas, split_secrets
from kici.domain.ids import Instant
from kici.domain.strict import Faulty
from kici.domain.workflow import Registration, RegistrationKind, read_workflow, run_for, webhook_of

JOBS = {"go": {"run": "true", "runsOn": ["x"]}}
EVENT = StoredEvent(
    seq=1,
    id=EventId("evt-1-0"),
    emission_id=EventId("evt-1"),
    name=SCALE_UP,
    subject=None,
    source="",
    chain_depth=2,
    target="a/b",
    state=EventState.PENDING,
    payload={
        "agentId": "scaler-event-1",
        "labels": ["a", "b"],
        "claimCode": "[redacted]",
        "resources": {"cpus": 2.0, "memBytes": 1024},
        "odd key!": 1,
        "isWarm": True,
    },
    sealed=b"x",
    created_at=Instant(0),
    expires_at=None,
    due_at=Instant(0),
)


def registered(**document: Any) -> Registration:
    ref, kind, events = read_workflow(document)
    return Registration(ref=ref, kind=kind, events=events, document=document, applied_by="ann", updated_at=Instant(0))


def faults(**document: Any) -> list[str]:
    with pytest.raises(Faulty) as caught:
        read_workflow(document)
    return [str(fault) for fault in caught.value.faults]


def test_events_may_share_jobs_or_have_their_own() -> None:
    shared = registered(ref="a/b", on=["x", SCALE_UP], jobs=JOBS)
    assert (shared.kind, shared.events) == (RegistrationKind.WORKFLOW, ("x", SCALE_UP))
    own = registered(ref="a/b", on={SCALE_UP: {"jobs": JOBS}, SCALE_DOWN: {"jobs": {"down": {"run": "false"}}}})
    assert [job.key for job in run_for(own, replace(EVENT, name=SCALE_DOWN)).jobs] == ["down"]


def test_a_step_learns_its_event() -> None:
    (job,) = run_for(registered(ref="a/b", on=[SCALE_UP], jobs={"go": {**JOBS["go"], "env": {"MY": "1"}}}), EVENT).jobs
    env = job.spec.env
    assert env["MY"] == "1"
    assert (env["KICI_EVENT_NAME"], env["KICI_EVENT_ID"], env["KICI_EVENT_CHAIN_DEPTH"]) == (SCALE_UP, "evt-1", "2")
    assert (env["KICI_EVENT_AGENT_ID"], env["KICI_EVENT_LABELS"]) == ("scaler-event-1", "a,b")
    assert (env["KICI_EVENT_RESOURCES_CPUS"], env["KICI_EVENT_RESOURCES_MEM_BYTES"]) == ("2.0", "1024")
    assert env["KICI_EVENT_IS_WARM"] == "true"
    assert not [name for name in env if "ODD" in name]
    assert job.spec.timeout_ms == 900_000
    assert job.queue_timeout_ms == 600_000


@pytest.mark.spec("H11", "D27")
def test_a_secret_of_the_event_comes_as_a_reference_only() -> None:
    (job,) = run_for(registered(ref="a/b", on=[SCALE_UP], jobs=JOBS), EVENT).jobs
    assert job.spec.secrets == {"KICI_EVENT_CLAIM_CODE": "__event__:evt-1.claimCode"}
    assert "laimCode" not in job.spec.env["KICI_EVENT_PAYLOAD"]
    assert "KICI_EVENT_CLAIM_CODE" not in job.spec.env


def test_a_payload_is_split_from_its_secrets() -> None:
    shown, secrets = split_secrets(SCALE_UP, {"agentId": "a", "claimCode": "c"})
    assert shown == {"agentId": "a", "claimCode": "[redacted]"}
    assert secrets == {"claimCode": "c"}
    assert split_secrets("deployed", {"claimCode": "c"}) == ({"claimCode": "c"}, {})


def test_a_webhook_names_where_and_with_which_secret() -> None:
    hook = registered(ref="a/b", on=["x"], webhook={"url": "https://h.example/x", "secret": "hooks:a"})
    assert hook.kind is RegistrationKind.WEBHOOK
    webhook = webhook_of(hook)
    assert (webhook.url, str(webhook.secret), webhook.timeout_seconds) == ("https://h.example/x", "hooks:a", 15)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"ref": "/x", "on": ["a"], "jobs": JOBS}, "$.ref"),
        ({"ref": "x", "on": [], "jobs": JOBS}, "$.on"),
        ({"ref": "x", "on": ["a b"], "jobs": JOBS}, "is no event name"),
        ({"ref": "x", "on": ["a"]}, "`jobs` or `webhook`"),
        ({"ref": "x", "on": {"a": {"jobs": JOBS}}, "jobs": JOBS}, "$.jobs"),
        ({"ref": "x", "on": {"a": {"jobs": {"go": {}}}}}, "$.on.a.jobs.go"),
        ({"ref": "x", "on": ["a"], "jobs": {"go": {"rnu": "x"}}}, "rnu"),
        ({"ref": "x", "on": ["a"], "jobs": JOBS, "webhook": {"url": "http://x/", "secret": "a:b"}}, "no jobs"),
        ({"ref": "x", "on": ["a"], "webhook": {"url": "ftp://x", "secret": "a:b"}}, "$.webhook.url"),
        ({"ref": "x", "on": ["a"], "webhook": {"url": "http://u:p@x/", "secret": "a:b"}}, "$.webhook.url"),
        ({"ref": "x", "on": ["a"], "webhook": {"url": "http://x/", "secret": "literal"}}, "$.webhook.secret"),
        ({"ref": "x", "on": ["a"], "webhook": {"url": "http://x/", "secret": "__event__:b"}}, "reserved"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(document: dict[str, Any], told: str) -> None:
    assert told in "\n".join(faults(**document))


def test_the_published_schema_covers_the_vocabulary() -> None:
    schema = event_schemas()
    assert set(schema["events"]) == {SCALE_UP, SCALE_DOWN}
    up = schema["$defs"]["ScaleUp"]
    assert {"scalerName", "agentId", "labels", "mandatoryLabels", "orchestratorUrl", "claimCode", "requestId"} <= set(
        up["required"]
    )
    assert {"resources", "jobId"} <= set(up["properties"])
    assert set(schema["$defs"]["ScaleDown"]["required"]) == {"scalerName", "agentId", "reason", "requestId"}
