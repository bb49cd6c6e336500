"""Looking at jobs: list, show, explain; and cancelling them."""

import click

from kici.cli.client import Client, Json, job_path, run_path
from kici.cli.connection import with_client
from kici.cli.errors import Refused
from kici.cli.output import cell, local, print_fields, print_json, print_table, took

STATUSES = (
    *("pending", "queued", "running", "recovering", "cancelling"),
    *("success", "failed", "cancelled", "timed_out", "unroutable", "skipped"),
)
PAGE = 500
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@click.option("--status", type=click.Choice(STATUSES), help="Only jobs in this status.")
@click.option("--run", "run_id", metavar="RUN", help="Only jobs of this run.")
@click.option("-n", "--limit", type=click.IntRange(1), default=50, help="At most so many; 50 by default.")
@as_json
@with_client
def jobs(client: Client, /, *, status: str | None, run_id: str | None, limit: int, as_json: bool) -> None:
    """List jobs, newest first."""
    found: list[Json] = []
    cursor: str | None = None
    while len(found) < limit:
        size = min(PAGE, limit - len(found))
        page = client.get("/api/v1/jobs", status=status, runId=run_id, cursor=cursor, limit=size)
        found += page["items"]
        cursor = page["nextCursor"]
        if cursor is None:
            break
    if as_json:
        print_json(found)
        return
    rows = [
        (each["id"], each["status"], each["name"][:40], each["agentId"], took(each), local(each["createdAt"]))
        for each in found
    ]
    is_narrowed = status or run_id
    empty = "There are no such jobs." if is_narrowed else "There are no jobs yet; `kici run -- echo hello` runs one."
    print_table(("ID", "STATUS", "NAME", "AGENT", "TOOK", "CREATED"), rows, empty=empty)


@click.command()
@click.argument("job_id", metavar="ID")
@as_json
@with_client
def job(client: Client, /, *, job_id: str, as_json: bool) -> None:
    """Show one job."""
    found = client.get(job_path(job_id))
    if as_json:
        print_json(found)
        return
    shown = {
        "id": found["id"],
        "name": found["name"],
        "status": found["status"],
        "why": found["verdict"],
        "run": found["runId"],
        "runs on": [*found["runsOn"], *(f"not {label}" for label in found["exclude"])],
        "image": found["image"],
        "needs": found["needs"],
        "agent": found["agentId"],
        "scaler": found["scaler"],
        "exit code": found["exitCode"],
        "signal": found["signal"],
        "created": local(found["createdAt"]),
        "started": local(found["startedAt"]),
        "finished": local(found["finishedAt"]),
        "took": took(found),
        "page": client.page(found["links"]["page"]),
    }
    print_fields({name: value for name, value in shown.items() if value not in (None, "", [])})


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Kill at once, without the job's time to clean up.")
@click.option("--reason", default="", help="Shown with the job.")
@with_client
def cancel(client: Client, /, *, ids: tuple[str, ...], force: bool, reason: str) -> None:
    """Cancel jobs, or whole runs, by their ids."""
    body = {"force": force, "reason": reason}
    for each in ids:
        try:
            answer = client.post(job_path(each, "/cancel"), body)
        except Refused as refusal:
            if refusal.status != 404:
                raise
            answer = client.post(run_path(each, "/cancel"), body)
        click.echo(f"{each} {answer['status']}")


@click.command()
@click.argument("job_id", metavar="ID")
@as_json
@with_client
def explain(client: Client, /, *, job_id: str, as_json: bool) -> None:
    """Say why a job is where it is: everything that was considered, the nearest to running first."""
    found = client.get(job_path(job_id, "/explain"))
    if as_json:
        print_json(found)
        return
    click.echo(f"{found['jobId']} {found['status']}: {cell(found['verdict'])}")
    for finding in found["why"]:
        click.echo(f"  {cell(finding['instance'])}: {finding['sentence']}")
