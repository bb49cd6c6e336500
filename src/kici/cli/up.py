"""`kici up`: run a coordinator here, in the foreground."""

from pathlib import Path

import click

from kici.cli.connection import data_dir as default_data_dir
from kici.cli.connection import environment
from kici.cli.errors import CliError

INVALID = 2
_FILE = click.Path(dir_okay=False, path_type=Path)
_DIR = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--scalers", type=_FILE, metavar="FILE", help="Scalers to work with; by default one for this machine.")
@click.option("--scalers-dir", type=_DIR, metavar="DIR", help="Directory of further scaler files.")
@click.option("--host", metavar="H", help="Address to listen on; 127.0.0.1 by default.")
@click.option("--port", type=int, metavar="P", help="Port to listen on; 4000 by default, 0 for any free one.")
@click.option("--data-dir", "data_directory", type=_DIR, metavar="DIR", help="Where to keep everything.")
@click.option("--database-url", metavar="URL", help="A PostgreSQL database instead of the embedded one.")
@click.pass_context
def up(  # noqa: PLR0913  # one for each option
    ctx: click.Context,
    scalers: Path | None,
    scalers_dir: Path | None,
    host: str | None,
    port: int | None,
    data_directory: Path | None,
    database_url: str | None,
) -> None:
    """Run a coordinator on this machine.

    TERM and INT shut it down in order; USR2 stops it and leaves agents and their jobs running for the next start.
    """
    from kici.apps.coordinator import Ready, serve
    from kici.config.environment import SettingsRefused, read_settings
    from kici.domain.errors import KiciError

    environ = environment()
    named = data_directory or ctx.meta.get("kici.data_dir")
    try:
        settings = read_settings(
            environ,
            scaler_config_path=scalers,
            scaler_config_dir=scalers_dir,
            host=host,
            port=port,
            data_dir=named,
            database_url=database_url,
        )
    except SettingsRefused as error:
        click.echo(str(error), err=True)
        ctx.exit(INVALID)

    def announce(ready: Ready) -> None:
        for notice in ready.notices:
            click.echo(f"note: {notice}", err=True)
        is_found_without = ready.data_dir == default_data_dir(None, environ)
        where = "" if is_found_without else f" --data-dir {ready.data_dir}"
        click.echo(f"kici is up at {ready.url}")
        click.echo(f"  dashboard, once:  {ready.login_url}")
        click.echo(f"  a first job:      kici run{where} -- echo hello")

    try:
        serve(settings, environ, announce)
    except KiciError as error:
        raise CliError(str(error)) from error
