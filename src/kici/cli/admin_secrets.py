"""Operators: secrets that jobs may name."""

import sys

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.errors import CliError
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table

org_option = click.option("--org", default="default", metavar="ORG", help="Of this organisation.")


class Ref(click.ParamType[tuple[str, str]]):
    """`CONTEXT:KEY`."""

    name = "reference"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        context, colon, key = value.partition(":")
        if not (context and colon and key):
            self.fail(f"{value!r} is not CONTEXT:KEY", param, ctx)
        return context, key


@click.group()
def secrets() -> None:
    """Secrets that jobs may name as CONTEXT:KEY."""


@secrets.command("set")
@click.argument("ref", metavar="CONTEXT:KEY", type=Ref())
@org_option
@with_client
def set_secret(client: Client, /, *, ref: tuple[str, str], org: str) -> None:
    """Store a secret.  Its value is asked for, or read from standard input (one final line break is dropped)."""
    is_typed = sys.stdin.isatty()
    value = click.prompt("Value", hide_input=True, err=True) if is_typed else sys.stdin.read().removesuffix("\n")
    if not value:
        raise CliError("an empty value is no secret; nothing was stored")
    client.request("PUT", admin_path("secrets", *ref), body={"value": value}, query={"org": org})
    click.echo(f"{':'.join(ref)} stored")


@secrets.command("list")
@org_option
@as_json
@with_client
def list_secrets(client: Client, /, *, org: str, as_json: bool) -> None:
    """List the names of secrets; values are never listed."""
    found = client.get(admin_path("secrets"), org=org)["items"]
    if as_json:
        print_json(found)
        return
    rows = [(f"{each['context']}:{each['key']}", local(each["updatedAt"])) for each in found]
    print_table(("SECRET", "CHANGED"), rows, empty="There are no secrets; `kici-admin secrets set` stores one.")


@secrets.command("delete")
@click.argument("ref", metavar="CONTEXT:KEY", type=Ref())
@org_option
@with_client
def delete_secret(client: Client, /, *, ref: tuple[str, str], org: str) -> None:
    """Delete a secret."""
    client.request("DELETE", admin_path("secrets", *ref), query={"org": org})
    click.echo(f"{':'.join(ref)} deleted")


@secrets.command("rotate-key")
@as_json
@with_client
@click.pass_context
def rotate_key(ctx: click.Context, client: Client, /, *, as_json: bool) -> None:
    """Seal all secrets by the key that the coordinator was started with.

    Start every coordinator with the new key as KICI_SECRET_KEY and the former one as KICI_SECRET_KEY_OLD, run this,
    and leave the former one out from the next start on.  Exits with 1 when some secrets could not be read.
    """
    done = client.post(admin_path("rotate-key"), {})
    if as_json:
        print_json(done)
    else:
        click.echo(f"{done['resealed']} secrets sealed anew, {done['kept']} were sealed by this key before")
        for each in done["unreadable"]:
            click.echo(f"{each} opens with neither key", err=True)
        if done["unreadable"]:
            click.echo("keep KICI_SECRET_KEY_OLD, or store those secrets again, and repeat this", err=True)
        else:
            click.echo("KICI_SECRET_KEY_OLD is not needed any more once machines that are being made have come")
    ctx.exit(1 if done["unreadable"] else 0)


@secrets.command("reveal")
@click.argument("ref", metavar="CONTEXT:KEY", type=Ref())
@org_option
@with_client
def reveal_secret(client: Client, /, *, ref: tuple[str, str], org: str) -> None:
    """Print the value of a secret.  This is recorded in the access log."""
    found = client.request("POST", admin_path("secrets", *ref, "reveal"), query={"org": org})
    click.echo(found["value"])
