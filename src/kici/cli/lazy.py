"""Command groups that import a command only when it is used, so that each start pays for one command."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click

from kici.kit.version import VERSION


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command by its place, `module:attribute`, and the line that `--help` shows for it."""

    place: str
    summary: str


class LazyGroup(click.Group):
    """Knows its commands by place.  A misspelt name is answered with the nearest one."""

    def __init__(self, *, commands: Mapping[str, Lazy], name: str, summary: str, epilog: str | None = None) -> None:
        super().__init__(
            name=name,
            help=summary,
            epilog=epilog,
            params=[_version_option(), *_where_options()],
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        self._places = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = self._places.get(cmd_name)
        if lazy is None:
            return None
        module, _, attribute = lazy.place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._places and not args[0].startswith("-"):
            from kici.domain.strict import nearest  # only a mistake needs it

            guess = nearest(args[0], self._places)
            hint = f"Did you mean {guess}?" if guess else f"Try {ctx.command_path} --help."
            raise click.UsageError(f"there is no command {args[0]!r}.  {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: importing every command for its help would take longer than printing it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in self._places.items()])


def _version_option() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001  # click's signature
        if wanted and not ctx.resilient_parsing:
            click.echo(f"{ctx.find_root().info_name} {VERSION}")
            ctx.exit()

    return click.Option(
        ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=show, help="Show the version and exit."
    )


def _where_options() -> list[click.Option]:
    """`--url` and `--data-dir` may stand before the command too; commands read them from the context's `meta`."""

    def remember(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.meta[f"kici.{option.name}"] = value

    return [
        click.Option([name], metavar=metavar, expose_value=False, callback=remember, help=text)
        for name, metavar, text in (
            ("--url", "URL", "Address of the coordinator (KICI_URL)."),
            ("--data-dir", "DIR", "Data directory of the coordinator on this machine (KICI_DATA_DIR)."),
        )
    ]
