"""`kici dashboard`: a link that signs a browser in."""

import click

from kici.cli.client import Client
from kici.cli.connection import with_client
from kici.cli.output import local


@click.command()
@with_client
def dashboard(client: Client, /) -> None:
    """Print a link that signs one browser in, once, as whoever asks here."""
    code = client.post("/api/v1/login-codes")
    click.echo(client.page(code["path"]))
    click.echo(f"It works once, until {local(code['expiresAt'])}.", err=True)
