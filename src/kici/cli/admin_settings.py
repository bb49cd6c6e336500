"""Operators: live settings."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.jobs import as_json
from kici.cli.output import print_json, print_table
from kici.cli.values import PAIR

org_option = click.option("--org", metavar="ORG", help="Of one organisation instead of the cluster.")


@click.group(invoke_without_command=True)
@as_json
@click.pass_context
def settings(ctx: click.Context, *, as_json: bool) -> None:
    """Show and change live settings."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(get, as_json=as_json)


@settings.command()
@click.argument("name", required=False)
@org_option
@as_json
@with_client
@click.pass_context
def get(
    ctx: click.Context, client: Client, /, *, name: str | None = None, org: str | None = None, as_json: bool = False
) -> None:
    """Show all settings, or the value in force of one."""
    found = client.get(admin_path("settings"), org=org)
    items = [each for each in found["items"] if name in (None, each["name"])]
    if not items:
        raise click.UsageError(f"there is no setting {name!r}; `kici-admin settings get` lists them", ctx)
    if as_json:
        print_json({**found, "items": items})
    elif name is not None:
        click.echo(items[0]["effective"])
    else:
        rows = [(each["name"], each["effective"], each["value"], each["default"], each["unit"]) for each in items]
        print_table(("NAME", "IN FORCE", "SET", "DEFAULT", "UNIT"), rows, empty="There are no settings.")


@settings.command("set")
@click.argument("changes", metavar="NAME=VALUE...", nargs=-1, required=True, type=PAIR)
@org_option
@with_client
def set_values(client: Client, /, *, changes: tuple[tuple[str, str], ...], org: str | None) -> None:
    """Change settings, all or none.  `NAME=default` takes a value back."""
    body = {name: _value(name, text) for name, text in changes}
    query = {"org": org} if org else None
    found = client.request("PATCH", admin_path("settings"), body=body, query=query)
    for each in found["items"]:
        if each["name"] in body:
            click.echo(f"{each['name']}={each['effective']}{'' if each['value'] is not None else ' (default)'}")


def _value(name: str, text: str) -> int | None:
    if text in ("default", ""):
        return None
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"{name}: {text!r} is no whole number (and not `default`)") from None
