"""`kici workflow`: what happens when an event comes."""

from pathlib import Path

import click

from kici.cli.client import Client
from kici.cli.connection import with_client
from kici.cli.errors import CliError, Refused
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table
from kici.cli.submit import read_file


@click.group()
def workflow() -> None:
    """Event-driven workflows and webhooks."""


@workflow.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--set", "variables", multiple=True, metavar="NAME=VALUE", help="Put it into the env of every job.")
@with_client
def apply(client: Client, /, *, file: Path, variables: tuple[str, ...]) -> None:
    """Apply the workflow or webhook in FILE (YAML or JSON; - for standard input)."""
    read = read_file(file)
    try:
        applied = client.post("/api/v1/workflows", with_variables(read.plain(), variables))
    except Refused as refusal:
        raise CliError(read.located(refusal)) from refusal
    click.echo(f"{applied['ref']}: {applied['kind']} for {', '.join(applied['events'])}")


def with_variables(document: object, variables: tuple[str, ...]) -> object:
    """The document with these variables in the environment of every job."""
    wrong = next((text for text in variables if "=" not in text), None)
    if wrong is not None:
        raise CliError(f"--set {wrong}: expected NAME=VALUE")
    env = dict(text.split("=", 1) for text in variables)
    if not env or not isinstance(document, dict):
        return document
    on = document.get("on")
    groups = [document, *(on.values() if isinstance(on, dict) else ())]
    for group in groups:
        jobs = group.get("jobs") if isinstance(group, dict) else None
        for job in jobs.values() if isinstance(jobs, dict) else ():
            if isinstance(job, dict):
                job["env"] = {**job.get("env", {}), **env}
    return document


@workflow.command("list")
@as_json
@with_client
def list_workflows(client: Client, /, *, as_json: bool) -> None:
    """List workflows and webhooks."""
    found = client.get("/api/v1/workflows")["items"]
    if as_json:
        print_json(found)
        return
    rows = [(each["ref"], each["kind"], each["events"], each["appliedBy"], local(each["updatedAt"])) for each in found]
    print_table(("REF", "KIND", "EVENTS", "APPLIED BY", "APPLIED"), rows, empty="There are no workflows.")


@workflow.command()
@click.argument("ref")
@with_client
def delete(client: Client, /, *, ref: str) -> None:
    """Delete a workflow or webhook."""
    from urllib.parse import quote

    client.request("DELETE", f"/api/v1/workflows/{quote(ref, safe='')}")
    click.echo(f"{ref} deleted")
