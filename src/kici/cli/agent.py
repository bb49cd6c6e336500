"""`kici agent`: the same program as `kici-agent`."""

import sys

import click


@click.command("agent", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run an agent; it is told everything by KICI_ variables."""
    from kici.apps.agent import main

    sys.exit(main(arguments))
