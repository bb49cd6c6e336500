"""`kici demo`: the main job for real, from an empty directory to an empty machine."""

from collections.abc import Mapping
from typing import Final

import click

from kici.cli.client import Client, Json, job_path
from kici.cli.connection import environment
from kici.cli.demo_jobs import (
    ALL,
    BIG_OUTPUT,
    CANCEL_ME,
    OUTPUT_BYTES,
    RUN,
    SAMPLES,
    SECRET_CONTEXT,
    SECRET_JOB,
    SECRET_KEY,
    SECRET_VALUE,
    UNROUTABLE,
)
from kici.cli.demo_screen import Screen, a_screen, print_summary
from kici.cli.demo_stage import Stage
from kici.cli.errors import CliError
from kici.cli.following import FINISHED, chunk_bytes
from kici.cli.pausing import monotonic, pause

ALL_SECONDS: Final = 90.0
GONE_SECONDS: Final = 20.0
PASS_SECONDS: Final = 0.15


@click.command()
def demo() -> None:
    """Start a coordinator of its own, run a dozen sample jobs on agents it makes, and leave nothing behind."""
    began = monotonic()
    with Stage(environment()) as stage:
        click.echo(f"A coordinator is up at {stage.client.url}, all its files in {stage.folder}.\n")
        try:
            jobs = _play(stage.client)
        except CliError as error:
            raise CliError(f"{error.message}\nThe coordinator's last lines:\n{stage.log_tail()}") from error
        problems = _faults(stage, jobs)
    if stage.folder.exists():
        problems.append(f"{stage.folder} could not be removed")
    click.echo()
    print_summary(jobs)
    click.echo()
    if problems:
        raise CliError("the demo did not go as it should:\n" + "\n".join(f"  {problem}" for problem in problems))
    click.echo(
        f"{len(jobs)} jobs ended as they should in {monotonic() - began:.0f} s.  No process, row or file is left."
    )
    click.echo("Next: `kici up` starts a coordinator to stay, and `kici run -- CMD` runs your first job.")


def _play(client: Client) -> Mapping[str, Json]:
    """Submit everything and see it through; the jobs by name, as they ended."""
    client.request("PUT", f"/api/v1/admin/secrets/{SECRET_CONTEXT}/{SECRET_KEY}", body={"value": SECRET_VALUE})
    names = {client.post("/api/v1/jobs", sample.body)["id"]: sample.name for sample in SAMPLES}
    names |= {job["id"]: job["name"] for job in client.post("/api/v1/runs", RUN)["jobs"]}
    until = monotonic() + ALL_SECONDS
    told: set[str] = set()
    with a_screen() as screen:
        while True:
            jobs = _jobs(client, names)
            screen.show(jobs, len(client.get("/api/v1/admin/agents")["items"]))
            if all(job["status"] in FINISHED for job in jobs.values()):
                return jobs
            if monotonic() > until:
                open_ones = [name for name, job in jobs.items() if job["status"] not in FINISHED]
                raise CliError(f"after {ALL_SECONDS:g} s these jobs still go on: {', '.join(open_ones)}")
            _take_part(client, jobs, told, screen)
            pause(PASS_SECONDS)


def _jobs(client: Client, names: Mapping[str, str]) -> dict[str, Json]:
    found = {job["id"]: job for job in client.get("/api/v1/jobs", limit=100)["items"]}
    return {name: found[job_id] for job_id, name in names.items()}


def _take_part(client: Client, jobs: Mapping[str, Json], told: set[str], screen: Screen) -> None:
    """What a person would do meanwhile: cancel one job, and ask why another does not start."""
    victim, hopeless = jobs[CANCEL_ME], jobs[UNROUTABLE]
    if victim["status"] == "running" and CANCEL_ME not in told:
        told.add(CANCEL_ME)
        client.post(job_path(victim["id"], "/cancel"))
        screen.say(f"kici cancel {victim['id']}")
    if hopeless["status"] == "queued" and hopeless["verdict"] and UNROUTABLE not in told:
        told.add(UNROUTABLE)
        explanation = client.get(job_path(hopeless["id"], "/explain"))
        screen.say(
            f"kici explain {hopeless['id']}\n" + "\n".join(f"    {why['sentence']}" for why in explanation["why"])
        )


def _faults(stage: Stage, jobs: Mapping[str, Json]) -> list[str]:
    """Everything that is not as it should be; stops the coordinator on the way."""
    found = [
        f"job {name} ended {job['status']} with code {job['exitCode']}, expected {ALL[name].expected}"
        for name, job in jobs.items()
        if job["status"] != ALL[name].expected or ALL[name].exit_code not in (None, job["exitCode"])
    ]
    output = _output(stage.client, jobs[BIG_OUTPUT])
    if len(output) != OUTPUT_BYTES:
        found.append(f"job {BIG_OUTPUT} wrote {OUTPUT_BYTES} bytes, {len(output)} are stored")
    if SECRET_VALUE.encode() in _output(stage.client, jobs[SECRET_JOB]):
        found.append("the secret can be read in the output of its job")
    found += _agents_left(stage.client)
    code = stage.stop()
    if code:
        found.append(f"the coordinator ended with code {code}:\n{stage.log_tail()}")
    return [*found, *stage.left_behind()]


def _agents_left(client: Client) -> list[str]:
    """Agents, and rows of spawns, that do not go away although no job needs them."""
    until = monotonic() + GONE_SECONDS
    while True:
        agents = client.get("/api/v1/admin/agents")["items"]
        if not agents or monotonic() > until:
            return [f"agent {agent['id']} is still {agent['state']}" for agent in agents]
        pause(PASS_SECONDS)


def _output(client: Client, job: Json) -> bytes:
    parts, after, before = [], 0, -1
    while after != before:
        before = after
        headers = {"Accept": "application/json"}
        page = client.request("GET", job_path(job["id"], "/logs"), query={"after": after}, headers=headers)
        parts += [chunk_bytes(item) for item in page["items"] if item["stream"] == "stdout"]
        after = page["next"]
    return b"".join(parts)
