"""Operators: diagnosis, and scalers."""

from typing import Any

import click

from kici.cli.admin_orphans import orphans
from kici.cli.admin_reap import reap_orphans
from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.errors import Refused
from kici.cli.jobs import as_json
from kici.cli.output import cell, print_json, print_table

EXIT_CODES = {"pass": 0, "warn": 1, "fail": 2}


@click.command()
@click.argument("scaler", required=False)
@as_json
@with_client
@click.pass_context
def diagnose(ctx: click.Context, client: Client, /, *, scaler: str | None, as_json: bool) -> None:
    """Check everything, or one SCALER.  Exits with 0 when all is well, 1 with warnings, 2 with failures."""
    found = client.get(admin_path("diagnose"), scaler=scaler)
    if as_json:
        print_json(found)
    else:
        click.echo(f"Overall: {found['overall']}")
        rows = [(check["status"], check["name"], check["message"]) for check in found["checks"]]
        print_table(("STATUS", "CHECK", "MESSAGE"), rows, empty="There is nothing to check.")
    ctx.exit(EXIT_CODES[found["overall"]])


@click.group()
def scaler() -> None:
    """Scalers: what they hold, and their configuration."""


scaler.add_command(orphans)
scaler.add_command(reap_orphans)


@scaler.command()
@as_json
@with_client
def status(client: Client, /, *, as_json: bool) -> None:
    """List scalers with their agents and what they use."""
    found = client.get(admin_path("scalers"))["items"]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each["name"],
            each["type"],
            each["state"],
            f"{each['active']}/{cell(each['maxAgents'])}",
            each["booting"],
            f"{each['warmReady']}/{each['warmTarget']}",
            pool_text(each["machinePool"]),
            " | ".join(",".join(labels) for labels in each["labelSets"]),
            each["instance"],
        )
        for each in found
    ]
    head = ("NAME", "TYPE", "STATE", "AGENTS", "BOOTING", "WARM", "MACHINE POOL", "LABEL SETS", "INSTANCE")
    print_table(head, rows, empty="There are no scalers; `kici config example` shows how to declare one.")


def pool_text(pool: dict[str, Any] | None) -> str:
    """What everybody holds of it, under the caps that it has."""
    if pool is None:
        return ""
    texts = [pool["name"]]
    if pool["cpusMax"] is not None:
        texts.append(f"{pool['cpusUsed']:g}/{pool['cpusMax']:g} cpus")
    if pool["memoryBytesMax"] is not None:
        texts.append(f"{pool['memoryBytesUsed'] / 2**30:.1f}/{pool['memoryBytesMax'] / 2**30:.1f} GiB")
    return " ".join(texts)


@scaler.command()
@as_json
@with_client
@click.pass_context
def reload(ctx: click.Context, client: Client, /, *, as_json: bool) -> None:
    """Read the configuration of scalers anew.  Exits with 1 when an instance rejects it."""
    try:
        found = client.post(admin_path("scalers", "reload"))["items"]
    except Refused as refusal:
        if "items" not in refusal.answer:
            raise
        found = refusal.answer["items"]
    if as_json:
        print_json(found)
    else:
        for each in found:
            click.echo(f"{each['instance']}: {each['outcome']}")
            for what in ("added", "updated", "retired", "problems"):
                if each[what]:
                    click.echo(f"  {what}: {', '.join(each[what])}")
    ctx.exit(1 if any(each["outcome"] == "rejected" for each in found) else 0)
