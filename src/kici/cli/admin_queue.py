"""Operators: the queue."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.errors import CliError
from kici.cli.jobs import as_json
from kici.cli.output import local, print_fields, print_json, print_table


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def queue(ctx: click.Context, *, as_json: bool) -> None:
    """List waiting jobs; show one or clear all."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_queue, as_json=as_json)


@queue.command("list")
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=50, help="At most so many; 50 by default.")
@as_json
@with_client
def list_queue(client: Client, /, *, limit: int = 50, as_json: bool = False) -> None:
    """List waiting jobs, first in line first."""
    found = client.get(admin_path("queue"), limit=limit)
    if as_json:
        print_json(found)
        return
    rows = [(each["id"], each["name"][:30], local(each["queuedAt"]), each["verdict"]) for each in found["items"]]
    print_table(("ID", "NAME", "SINCE", "WHY"), rows, empty="No job waits.")
    if found["depth"] > len(rows):
        click.echo(f"and {found['depth'] - len(rows)} more", err=True)


@queue.command()
@click.argument("job_id", metavar="ID")
@as_json
@with_client
def show(client: Client, /, *, job_id: str, as_json: bool) -> None:
    """Show one waiting job."""
    found = client.get(admin_path("queue", job_id))
    if as_json:
        print_json(found)
        return
    print_fields({name: value for name, value in found.items() if name != "links"})


@queue.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_client
def clear(client: Client, /, *, yes: bool) -> None:
    """Cancel every job that waits."""
    if not yes:
        depth = client.get(admin_path("queue"), limit=1)["depth"]
        if not click.confirm(f"Cancel {depth} waiting jobs?", err=True):
            raise CliError("nothing was cancelled")
    click.echo(f"cancelled {client.post(admin_path('queue', 'clear'))['cancelled']}")
