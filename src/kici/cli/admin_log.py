"""Operators: the access log."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table


@click.command("access-log")
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=50, help="At most so many; 50 by default.")
@as_json
@with_client
def access_log(client: Client, /, *, limit: int, as_json: bool) -> None:
    """Who changed what, newest first."""
    found = client.get(admin_path("access-log"), limit=limit)["items"]
    if as_json:
        print_json(found)
        return
    rows = [
        (local(each["at"]), each["actor"], each["action"], each["target"], each["outcome"], each["detail"])
        for each in found
    ]
    print_table(("AT", "ACTOR", "ACTION", "TARGET", "OUTCOME", "DETAIL"), rows, empty="Nothing was recorded yet.")
