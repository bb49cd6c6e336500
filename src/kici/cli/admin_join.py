"""Operators: making hosts workers, and ending that."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table
from kici.cli.values import DURATION


@click.group("join-token")
def join_token() -> None:
    """One-time tokens that make hosts workers."""


@join_token.command("create")
@click.option("--expires", type=DURATION, default=3600.0, metavar="TIME", help="Lifetime; 1h by default, 1d at most.")
@as_json
@with_client
def create_join_token(client: Client, /, *, expires: float, as_json: bool) -> None:
    """Make a token for one host; it is printed once.

    Put it into a file on that host and run: kici worker --join URL --token-file FILE --scalers FILE
    """
    made = client.post(admin_path("join-tokens"), {"expiresInSeconds": max(1, round(expires))})
    if as_json:
        print_json(made)
        return
    click.echo(made["token"])
    hint = f"Keep it now: it is not shown again.  One host can use it until {local(made['expiresAt'])}."
    click.echo(f"{hint}  Take it back by: kici-admin join-token revoke {made['id']}", err=True)


@join_token.command("list")
@as_json
@with_client
def list_join_tokens(client: Client, /, *, as_json: bool) -> None:
    """List tokens that have not run out, and the workers that joined with them."""
    found = client.get(admin_path("join-tokens"))["items"]
    if as_json:
        print_json(found)
        return
    rows = [(each["id"], each["createdBy"], local(each["expiresAt"]), each["usedBy"] or "nobody yet") for each in found]
    print_table(("ID", "MADE BY", "GOOD UNTIL", "USED BY"), rows, empty="There are no join tokens.")


@join_token.command("revoke")
@click.argument("token_id", metavar="ID")
@with_client
def revoke_join_token(client: Client, /, *, token_id: str) -> None:
    """Take a token back.  A worker that has joined with it stays one: `worker revoke` ends that."""
    client.request("DELETE", admin_path("join-tokens", token_id))
    click.echo(f"{token_id} revoked")


@click.group()
def worker() -> None:
    """Hosts that are workers; `peers` lists them."""


@worker.command("revoke")
@click.argument("worker_id", metavar="ID")
@with_client
def revoke_worker(client: Client, /, *, worker_id: str) -> None:
    """Cut a worker off for good and end its agents; their running jobs fail.

    Also the way to let go of a host that is gone for ever.
    """
    client.request("DELETE", admin_path("workers", worker_id))
    click.echo(f"{worker_id} revoked")
