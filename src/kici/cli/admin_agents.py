"""Operators: agents."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.jobs import as_json
from kici.cli.output import local, print_fields, print_json, print_table


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def agents(ctx: click.Context, *, as_json: bool) -> None:
    """List agents; show or drain one."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_agents, as_json=as_json)


@agents.command("list")
@as_json
@with_client
def list_agents(client: Client, /, *, as_json: bool = False) -> None:
    """List connected agents and those that are being made."""
    found = client.get(admin_path("agents"))["items"]
    if as_json:
        print_json(found)
        return
    rows = [(each["id"], each["state"], each["scaler"], each["jobIds"], each["labels"]) for each in found]
    empty = "There are no agents now; scalers make them when jobs wait."
    print_table(("ID", "STATE", "SCALER", "JOBS", "LABELS"), rows, empty=empty)


@agents.command()
@click.argument("agent_id", metavar="ID")
@as_json
@with_client
def show(client: Client, /, *, agent_id: str, as_json: bool) -> None:
    """Show one agent."""
    found = client.get(admin_path("agents", agent_id))
    if as_json:
        print_json(found)
        return
    print_fields({**found, "since": local(found["since"])})


@agents.command()
@click.argument("agent_id", metavar="ID")
@with_client
def drain(client: Client, /, *, agent_id: str) -> None:
    """Let an agent finish its job and leave."""
    click.echo(f"{agent_id} {client.post(admin_path('agents', agent_id, 'drain'))['state']}")
