"""Job documents and run files: what people send, judged as a whole, and what it asks for.

A document is plain data (decoded JSON or YAML).  Reading one either gives a `SubmitRun` or raises `Faulty` with
everything that is wrong, each with its path.  Minting ids, defaults of the organisation and the existence of
secrets are not judged here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kici.domain.document_model import JobDocument, JobFields, RunDocument
from kici.domain.document_rules import (
    CONTROL,
    ID,
    check_environment,
    check_line,
    check_needs,
    check_org,
    read_build,
    read_command,
    read_container,
    read_resources,
    read_selector,
)
from kici.domain.ids import OrgId
from kici.domain.job import Demand, JobSpec
from kici.domain.secret import SecretRef, parse_secret_ref
from kici.domain.strict import FAULTS_MAX, Fault, Faulty, read_partly

JOBS_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job as asked for."""

    key: str
    """Its id within its run."""
    name: str
    demand: Demand
    spec: JobSpec
    needs: tuple[str, ...] = ()
    queue_timeout_ms: int | None = None
    """Longest waiting time; 0: for ever; None: the organisation's setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRun:
    """A checked request to run jobs.  Each job's needs name jobs of this run, and there is no circle of them."""

    name: str
    org: OrgId
    jobs: tuple[JobRequest, ...]

    def secret_refs(self) -> frozenset[SecretRef]:
        """Every secret that any of the jobs names, registry credentials included."""
        texts: set[str] = set()
        for job in self.jobs:
            texts.update(job.spec.secrets.values())
            texts.update(job.spec.registry.get(key, "") for key in ("username", "password"))
        return frozenset(parse_secret_ref(text) for text in texts if ":" in text)


def read_job(raw: object) -> SubmitRun:
    """A job document as a run of one job.  Raises `Faulty`."""
    if isinstance(raw, dict) and "jobs" in raw:
        raise Faulty([Fault("$.jobs", "this is a run file, not a job document: submit it as a run")])
    if isinstance(raw, dict) and "needs" in raw:
        raise Faulty([Fault("$.needs", "only jobs of a run file can need each other")])
    document, misread = read_partly(raw, JobDocument)
    if document is None:
        raise Faulty(misread)
    faults: list[Fault] = []
    org = check_org(document.org, faults)
    job = _job(document, key="job", org=org, path="$", faults=faults)
    _refuse(misread, faults)
    return SubmitRun(name=job.name, org=org, jobs=(job,))


def read_run(raw: object) -> SubmitRun:
    """A run file.  Raises `Faulty`."""
    document, misread = read_partly(raw, RunDocument)
    if document is None or not isinstance(raw, dict):
        raise Faulty(misread)
    faults: list[Fault] = []
    org = check_org(document.org, faults)
    check_line(document.name, "$.name", faults)
    keys = raw["jobs"]
    if not 0 < len(keys) <= JOBS_MAX:
        faults.append(Fault("$.jobs", f"expected 1 to {JOBS_MAX} jobs, found {len(keys)}"))
    jobs = []
    for key, each in document.jobs.items():
        path = f"$.jobs.{key}" if ID.match(key) else f"$.jobs[{key[:80]!r}]"
        if not ID.match(key):
            faults.append(Fault(path, "a job id is 1 to 100 letters, digits, dots, underscores and hyphens"))
        jobs.append(_job(each, key=key, org=org, path=path, faults=faults, needs=each.needs))
    check_needs({key: each.needs for key, each in document.jobs.items()}, keys, faults)
    _refuse(misread, faults)
    return SubmitRun(name=document.name or "run", org=org, jobs=tuple(jobs))


def _refuse(misread: list[Fault], faults: list[Fault]) -> None:
    """Raise `Faulty` if there is any fault.

    What a rule says about a part that was not read in full may be a mere consequence, and is left out.
    """
    told = [fault for fault in faults if not any(_within(each.path, fault.path) for each in misread)]
    if misread or told:
        raise Faulty([*misread, *told][:FAULTS_MAX])


def _within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _job(
    document: JobFields, *, key: str, org: OrgId, path: str, faults: list[Fault], needs: Iterable[str] = ()
) -> JobRequest:
    check_line(document.name, f"{path}.name", faults)
    command = read_command(document, path, faults)
    labels, exclude = read_selector(document.runs_on, f"{path}.runsOn", faults)
    resources = read_resources(document.resources, f"{path}.resources", faults)
    image, registry = read_container(document.container, f"{path}.container", faults)
    check_environment(document, path, faults)
    if document.timeout_seconds == 0:
        faults.append(Fault(f"{path}.timeoutSeconds", "expected more than 0; leave it out for the default"))
    spec = JobSpec(
        command=command,
        env=document.env,
        timeout_ms=_milliseconds(document.timeout_seconds),
        secrets=document.secrets,
        image=image,
        registry=registry,
        build=read_build(document.container, f"{path}.container", faults),
    )
    return JobRequest(
        key=key,
        name=document.name or (_default_name(document) if isinstance(document, JobDocument) else key),
        demand=Demand(labels=labels, exclude=exclude, resources=resources, image=image, org=org),
        spec=spec,
        needs=tuple(dict.fromkeys(needs)),
        queue_timeout_ms=_milliseconds(document.queue_timeout_seconds),
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(round(seconds * 1000), 1 if seconds else 0)


def _default_name(document: JobFields) -> str:
    """The first words of what is run."""
    text = document.run or " ".join(document.command or ())
    line = next((line.strip() for line in text.splitlines() if line.strip()), "job")
    return CONTROL.sub(" ", line)[:60]
