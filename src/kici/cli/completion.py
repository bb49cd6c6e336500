"""`kici completion`: shell completion."""

import click
from click.shell_completion import get_completion_class

PROGRAMS = ("kici", "kici-admin")


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; for bash: `source <(kici completion bash)`."""
    from kici.cli.main import admin, kici  # it names this command

    kind = get_completion_class(shell)
    assert kind is not None, shell
    for program, group in zip(PROGRAMS, (kici, admin), strict=True):
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        click.echo(kind(group, {}, program, variable).source())
