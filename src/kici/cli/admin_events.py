"""Operators: events, and those that were given up."""

import json
from collections.abc import Sequence

import click

from kici.cli.client import Client, Json, admin_path
from kici.cli.connection import with_client
from kici.cli.errors import CliError
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table

limit_option = click.option(
    "-n", "--limit", type=click.IntRange(1, 500), default=50, help="At most so many; 50 by default."
)


@click.group(invoke_without_command=True)
@click.pass_context
def events(ctx: click.Context) -> None:
    """List events; emit one; look after those that were given up."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_events)


@events.command("list")
@click.option("--name", help="Only events of this name.")
@click.option("--state", help="Only events in this state: pending, awaiting, processed, dead, unmatched.")
@limit_option
@as_json
@with_client
def list_events(
    client: Client,
    /,
    *,
    name: str | None = None,
    state: str | None = None,
    limit: int = 50,
    as_json: bool = False,
) -> None:
    """List events, newest first."""
    _show(client.get(admin_path("events"), name=name, state=state, limit=limit)["items"], as_json=as_json)


@events.command()
@click.argument("name")
@click.option("--payload", default="{}", help="A JSON object.")
@click.option("--target", "targets", multiple=True, help="Only this subscriber; repeat for more.")
@with_client
def emit(client: Client, /, *, name: str, payload: str, targets: tuple[str, ...]) -> None:
    """Emit an event; names that begin with kici. or __ are reserved."""
    try:
        fields = json.loads(payload)
    except ValueError as error:
        raise CliError(f"--payload is not JSON: {error}") from error
    body: dict[str, object] = {"name": name, "payload": fields}
    if targets:
        body["targets"] = list(targets)
    emitted = client.post("/api/v1/events", body)
    click.echo(emitted["id"])
    click.echo(f"for {', '.join(emitted['targets']) or 'nobody: no workflow subscribes to it'}", err=True)


@events.command()
@with_client
def schema(client: Client, /) -> None:
    """Print the JSON Schema of scale events."""
    print_json(client.get("/api/v1/events/schema"))


@events.group()
def dlq() -> None:
    """Events that were given up."""


@dlq.command("list")
@limit_option
@as_json
@with_client
def list_dead(client: Client, /, *, limit: int, as_json: bool) -> None:
    """List events that were given up, newest first."""
    _show(client.get(admin_path("events"), state="dead", limit=limit)["items"], as_json=as_json)


@dlq.command()
@click.argument("event_id", metavar="ID")
@with_client
def retry(client: Client, /, *, event_id: str) -> None:
    """Deliver one after all."""
    client.post(admin_path("events", event_id, "retry"))
    click.echo(f"{event_id} is delivered again")


@dlq.command()
@click.argument("event_id", metavar="ID")
@with_client
def discard(client: Client, /, *, event_id: str) -> None:
    """Forget one."""
    client.request("DELETE", admin_path("events", event_id))
    click.echo(f"{event_id} discarded")


@click.command()
@as_json
@with_client
def provisions(client: Client, /, *, as_json: bool) -> None:
    """List machines that event scalers asked for and have not given back."""
    found = client.get(admin_path("provisions"))["items"]
    if as_json:
        print_json(found)
        return
    rows = [
        (each["agentId"], each["scaler"], each["state"], each["adoptedBy"] or each["owner"], local(each["spawnedAt"]))
        for each in found
    ]
    print_table(("AGENT", "SCALER", "STATE", "COORDINATOR", "SINCE"), rows, empty="There are no such machines.")


def _show(found: Sequence[Json], *, as_json: bool) -> None:
    if as_json:
        print_json(list(found))
        return
    rows = [
        (
            each["id"],
            each["name"],
            each["target"],
            each["state"] if each["deadReason"] is None else f"{each['state']} ({each['deadReason']})",
            each["attempts"],
            local(each["createdAt"]),
            (each["lastError"] or "")[:80],
        )
        for each in found
    ]
    print_table(("ID", "NAME", "TARGET", "STATE", "TRIES", "SINCE", "ERROR"), rows, empty="There are no such events.")
