"""Operators: microVMs that run although nobody knows them."""

import sys
from collections.abc import Sequence

import click

from kici.cli.client import Client, Json, admin_path
from kici.cli.connection import with_client
from kici.cli.errors import CliError
from kici.cli.jobs import as_json
from kici.cli.output import duration, moment, print_json, print_table
from kici.cli.pausing import wall

NODE = click.option(
    "--node", "--target", metavar="N", help="Coordinator or worker that is meant (default: the one asked)."
)
TIMEOUT = click.option(
    "--timeout", type=click.IntRange(1, 240), default=30, metavar="S", help="Seconds that a node may take to answer."
)
BATCH = 100


@click.group(invoke_without_command=True)
@click.pass_context
def orphans(ctx: click.Context) -> None:
    """List microVMs that run, and stop those that nobody tracks."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_orphans, node=None, timeout=30, show_all=False, as_json=False)


@orphans.command("list")
@NODE
@TIMEOUT
@click.option("--all", "show_all", is_flag=True, help="Show tracked ones too.")
@as_json
@with_client
def list_orphans(client: Client, /, *, node: str | None, timeout: int, show_all: bool, as_json: bool) -> None:
    """List live microVMs of a node that nobody tracks, or all."""
    found = _listed(client, node, timeout)
    shown = [each for each in found["items"] if show_all or each["status"] != "tracked"]
    if as_json:
        print_json({**found, "items": shown})
        return
    _print(shown, found["instance"])


@orphans.command()
@click.argument("vm_ids", metavar="[ID]...", nargs=-1)
@NODE
@TIMEOUT
@click.option("--all-orphaned", is_flag=True, help="Stop every microVM that is listed as orphaned.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be stopped.")
@as_json
@with_client
@click.pass_context
def stop(  # noqa: PLR0913  # one for each option
    ctx: click.Context,
    client: Client,
    /,
    *,
    vm_ids: tuple[str, ...],
    node: str | None,
    timeout: int,
    all_orphaned: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Stop microVMs that nobody tracks: those that are shown, and no others.

    Exits with 0 only when every one of them was stopped.
    """
    if bool(vm_ids) == all_orphaned:
        raise click.UsageError("name the microVMs, or give --all-orphaned")
    found = _listed(client, node, timeout)
    orphaned = {each["id"]: each for each in found["items"] if each["status"] == "orphaned"}
    chosen = [vm_id for vm_id in (vm_ids or orphaned) if vm_id in orphaned]
    unsent = [vm_id for vm_id in dict.fromkeys(vm_ids) if vm_id not in orphaned]
    if not as_json:
        _say_unsent(unsent, found["items"])
        _print([orphaned[vm_id] for vm_id in chosen], found["instance"])
    if not chosen or dry_run:
        if as_json:
            print_json({"instance": found["instance"], "items": [], "unsent": unsent})
        ctx.exit(1 if unsent else 0)
    if not yes:
        _confirm(len(chosen), found["instance"])
    results = _stopped(client, node, timeout, list(dict.fromkeys(chosen)))
    if as_json:
        print_json({"instance": found["instance"], "items": results, "unsent": unsent})
    else:
        for each in results:
            detail = f" - {each['detail']}" if each["detail"] else ""
            click.echo(f"{each['id']} (PID {each['pid'] or '-'}): {each['outcome']}{detail}")
    ctx.exit(1 if unsent or any(each["outcome"] != "stopped" for each in results) else 0)


def _listed(client: Client, node: str | None, timeout: int) -> Json:
    client.request_seconds = timeout + 30.0
    return client.get(admin_path("scaler", "orphans"), target=node, timeoutMs=timeout * 1000)


def _stopped(client: Client, node: str | None, timeout: int, vm_ids: Sequence[str]) -> list[Json]:
    results: list[Json] = []
    for start in range(0, len(vm_ids), BATCH):
        body: Json = {"vmIds": list(vm_ids[start : start + BATCH]), "timeoutMs": timeout * 1000}
        if node is not None:
            body["target"] = node
        results += client.post(admin_path("scaler", "orphans", "stop"), body)["items"]
    return results


def _print(items: Sequence[Json], instance: str) -> None:
    rows = [
        (
            each["id"],
            each["scaler"],
            each["pid"],
            duration(max(0.0, wall() - moment(each["startedAt"]).timestamp())),
            each["status"],
            each["folder"],
            each["why"],
        )
        for each in items
    ]
    head = ("VM ID", "SCALER", "PID", "AGE", "STATUS", "FOLDER", "WHY")
    print_table(head, rows, empty=f"No orphaned VMs on {instance}.")


def _say_unsent(unsent: Sequence[str], items: Sequence[Json]) -> None:
    known = {each["id"]: each for each in items}
    for vm_id in unsent:
        why = f"{known[vm_id]['status']}: {known[vm_id]['why']}" if vm_id in known else "it does not run there"
        click.echo(f"{vm_id} is not stopped - {why}", err=True)


def _confirm(count: int, instance: str) -> None:
    if not sys.stdin.isatty():
        raise CliError("nobody is there to confirm: give --yes")
    click.confirm(f"Stop {count} microVM{'s' if count > 1 else ''} on {instance}?", abort=True)
