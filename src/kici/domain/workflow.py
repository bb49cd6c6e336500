"""Event-driven workflows and webhooks: documents that say what happens when an event comes.

    ref: acme/machines
    on:
      kici.scaler.scale-up: {jobs: {provision: {runsOn: [cloud], run: ./up.sh}}}
      kici.scaler.scale-down: {jobs: {teardown: {runsOn: [cloud], run: ./down.sh}}}

or, for the same jobs at every event, `on: [a, b]` and `jobs`; or `webhook: {url, secret}` in place of jobs.  Jobs
are those of a run file, and get the event in their environment: each field as `KICI_EVENT_<FIELD>`, the whole as
`KICI_EVENT_PAYLOAD`.  A secret field comes as a secret does, and is missing from `KICI_EVENT_PAYLOAD`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kici.domain.document import SubmitRun, read_run
from kici.domain.document_model import RunJobDocument
from kici.domain.event import SECRET_FIELDS, Payload, StoredEvent, is_event_name
from kici.domain.ids import DEFAULT_ORG, Instant
from kici.domain.secret import SecretRef, parse_secret_ref
from kici.domain.strict import Fault, Faulty, read

REF: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}\Z")
EVENTS_MAX: Final = 50
EVENT_CONTEXT: Final = "__event__"
"""Secret context of the sealed fields of events; the key is `<emission id>.<field>`."""
ENV_PREFIX: Final = "KICI_EVENT_"
WEBHOOK_SECONDS_MAX: Final = 30.0
WEBHOOK_SECONDS: Final = 15.0
RUN_SECONDS: Final = 900.0
"""Longest running time of a job that an event started, unless it says so itself."""
WAIT_SECONDS: Final = 600.0
"""Longest time such a job waits for an agent, unless it says so itself."""


class RegistrationKind(StrEnum):
    WORKFLOW = "workflow"
    WEBHOOK = "webhook"


class _Document(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class WebhookDocument(_Document, frozen=True, kw_only=True):
    """Where to post the event, as a CloudEvent signed by the rules of Standard Webhooks."""

    url: str
    secret: str
    """`<context>:<key>` of the signing secret, `whsec_…`."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=WEBHOOK_SECONDS_MAX)] = WEBHOOK_SECONDS


class JobsDocument(_Document, frozen=True, kw_only=True):
    jobs: dict[str, RunJobDocument]


class WorkflowDocument(_Document, frozen=True, kw_only=True):
    """What `kici workflow apply` takes."""

    ref: str
    """What `provisioningTargets` of a scaler, and `workflow delete`, call it."""
    on: list[str] | dict[str, JobsDocument]
    jobs: dict[str, RunJobDocument] = {}
    webhook: WebhookDocument | None = None
    org: str = DEFAULT_ORG


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One row of `workflow_registrations`: who gets which events."""

    ref: str
    kind: RegistrationKind
    events: tuple[str, ...]
    document: Payload
    """As applied."""
    applied_by: str
    updated_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    url: str
    secret: SecretRef
    timeout_seconds: float


def read_workflow(raw: object) -> tuple[str, RegistrationKind, tuple[str, ...]]:
    """Check a document: its ref, kind and events.  Raises `Faulty` with everything that is wrong."""
    document = read(raw, WorkflowDocument)
    assert isinstance(raw, dict)
    faults: list[Fault] = []
    if not REF.match(document.ref):
        faults.append(Fault("$.ref", "expected 1 to 200 letters, digits and . _ / -, such as acme/machines"))
    events = tuple(dict.fromkeys(document.on))
    if not 0 < len(events) <= EVENTS_MAX:
        faults.append(Fault("$.on", f"expected 1 to {EVENTS_MAX} event names"))
    faults += [Fault("$.on", f"{name[:80]!r} is no event name") for name in events if not is_event_name(name)]
    if document.webhook is not None:
        faults += _webhook_faults(document)
    elif not faults:
        faults += _jobs_faults(raw, document, events)
    if faults:
        raise Faulty(faults)
    kind = RegistrationKind.WORKFLOW if document.webhook is None else RegistrationKind.WEBHOOK
    return document.ref, kind, events


def webhook_of(registration: Registration) -> Webhook:
    document = msgspec.convert(dict(registration.document), WorkflowDocument).webhook
    assert document is not None, registration.ref
    return Webhook(url=document.url, secret=parse_secret_ref(document.secret), timeout_seconds=document.timeout_seconds)


def secrets_of(registration: Registration) -> frozenset[SecretRef]:
    """The stored secrets that it names."""
    if registration.kind is RegistrationKind.WEBHOOK:
        return frozenset({webhook_of(registration).secret})
    return _run(registration.ref, registration.document, registration.events[0]).secret_refs()


def run_for(registration: Registration, event: StoredEvent) -> SubmitRun:
    """The run that an event starts.  Raises `Faulty` for a stored document that this version cannot read."""
    request = _run(registration.ref, registration.document, event.name)
    env, secrets = event_env(event)
    return replace(
        request,
        jobs=tuple(
            replace(
                job,
                spec=replace(
                    job.spec,
                    env={**job.spec.env, **env},
                    secrets={**job.spec.secrets, **secrets},
                    timeout_ms=job.spec.timeout_ms or round(RUN_SECONDS * 1000),
                ),
                queue_timeout_ms=round(WAIT_SECONDS * 1000) if job.queue_timeout_ms is None else job.queue_timeout_ms,
            )
            for job in request.jobs
        ),
    )


def jobs_of(ref: str, document: Payload, event_name: str) -> SubmitRun:
    """The jobs that an event of this name starts, as they stand in the document."""
    return _run(ref, document, event_name)


def event_env(event: StoredEvent) -> tuple[dict[str, str], dict[str, str]]:
    """What a step learns of its event: plain variables, and references of secret ones."""
    secret = SECRET_FIELDS.get(event.name, ())
    shown = {name: value for name, value in event.payload.items() if name not in secret}
    env = {
        f"{ENV_PREFIX}NAME": event.name,
        f"{ENV_PREFIX}ID": event.emission_id,
        f"{ENV_PREFIX}CHAIN_DEPTH": str(event.chain_depth),
        f"{ENV_PREFIX}PAYLOAD": json.dumps(shown, ensure_ascii=False, sort_keys=True),
        **dict(_variables(ENV_PREFIX, shown)),
    }
    secrets = {
        f"{ENV_PREFIX}{_upper(field)}": str(SecretRef(EVENT_CONTEXT, f"{event.emission_id}.{field}"))
        for field in secret
        if field in event.payload
    }
    return env, secrets


def _variables(prefix: str, payload: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Scalars as they are, lists joined by commas, objects by their fields."""
    found: list[tuple[str, str]] = []
    for name, value in payload.items():
        variable = f"{prefix}{_upper(name)}"
        if not re.fullmatch(r"[A-Z0-9_]+", variable):
            continue
        match value:
            case dict():
                found += _variables(f"{variable}_", value)
            case list():
                found.append((variable, ",".join(str(each) for each in value)))
            case bool():
                found.append((variable, "true" if value else "false"))
            case str() | int() | float():
                found.append((variable, str(value)))
            case _:
                pass
    return [(name, text) for name, text in found if "\0" not in text]


def _upper(name: str) -> str:
    """`scalerName` -> `SCALER_NAME`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper().replace("-", "_").replace(".", "_")


def _run(ref: str, document: Payload, event_name: str) -> SubmitRun:
    on = document["on"]
    jobs = on[event_name]["jobs"] if isinstance(on, dict) else document["jobs"]
    name = f"{ref} on {event_name}"[:200]
    return read_run({"name": name, "org": document.get("org", DEFAULT_ORG), "jobs": jobs})


def _jobs_faults(raw: Mapping[str, Any], document: WorkflowDocument, events: tuple[str, ...]) -> list[Fault]:
    if isinstance(document.on, dict) and document.jobs:
        return [Fault("$.jobs", "the jobs of each event stand below `on`; leave these out")]
    if isinstance(document.on, list) and not document.jobs:
        return [Fault("$", "expected `jobs` or `webhook`")]
    faults: list[Fault] = []
    for event in events if isinstance(document.on, dict) else events[:1]:
        path = f"$.on.{event}" if isinstance(document.on, dict) else "$"
        try:
            _ = _run(document.ref, raw, event)
        except Faulty as error:
            faults += [Fault(path + fault.path[1:], fault.message) for fault in error.faults]
    return faults


def _webhook_faults(document: WorkflowDocument) -> list[Fault]:
    webhook = document.webhook
    assert webhook is not None
    faults: list[Fault] = []
    if isinstance(document.on, dict) or document.jobs:
        faults.append(Fault("$", "a webhook takes `on: [names]` and no jobs"))
    if not re.match(r"https?://[^\s/?#@]+(/\S*)?\Z", webhook.url):
        faults.append(Fault("$.webhook.url", "expected an http or https address without credentials"))
    try:
        ref = parse_secret_ref(webhook.secret)
    except ValueError as error:
        faults.append(Fault("$.webhook.secret", str(error)))
    else:
        if ref.is_reserved:
            faults.append(Fault("$.webhook.secret", "contexts of the form __name__ are reserved"))
    return faults
