"""Operators: letting go of coordinators and workers that are gone for good."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client


@click.group()
def peer() -> None:
    """Coordinators and workers; `peers` lists them."""


@peer.command("forget")
@click.argument("peer_id", metavar="ID")
@click.option("--acknowledge", is_flag=True, help="It may be the last other coordinator that is known.")
@with_client
def forget(client: Client, /, *, peer_id: str, acknowledge: bool) -> None:
    """Forget a coordinator or worker that will never come back.

    Its rows and addresses are freed.  A coordinator that crashed stays known until then, because the others cannot
    tell a crash from a cut; while one sees none of the others, it reclaims no machine.
    """
    query = {"acknowledge": "true"} if acknowledge else None
    answer = client.request("DELETE", admin_path("peers", peer_id), query=query)
    click.echo(answer["detail"])
