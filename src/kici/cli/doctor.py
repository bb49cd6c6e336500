"""`kici doctor`: can this machine do what is asked of it?"""

from pathlib import Path

import click

from kici.cli.connection import environment
from kici.cli.jobs import as_json
from kici.cli.output import print_json, print_table

_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_DIR = click.Path(file_okay=False, exists=True, path_type=Path)


@click.command()
@click.option("--scalers", type=_FILE, metavar="FILE", help="Scalers that are to run here.")
@click.option("--scalers-dir", type=_DIR, metavar="DIR", help="Directory of further scaler files.")
@click.option("--host", metavar="H", help="Address to listen on.")
@click.option("--port", type=int, metavar="P", help="Port to listen on.")
@click.option("--data-dir", metavar="DIR", help="Data directory to use.")
@as_json
@click.pass_context
def doctor(  # noqa: PLR0913  # one for each option
    ctx: click.Context,
    scalers: Path | None,
    scalers_dir: Path | None,
    host: str | None,
    port: int | None,
    data_dir: str | None,
    *,
    as_json: bool,
) -> None:
    """Check this machine: Python, data directory, port, control groups, isolation, and each scaler.

    Exits with 1 when something is in the way, with 2 when the settings themselves are wrong.
    """
    from kici.cli.doctor_checks import Grade, examine, this_machine
    from kici.config.environment import SettingsRefused, read_settings

    environ = environment()
    try:
        settings = read_settings(
            environ,
            scaler_config_path=scalers,
            scaler_config_dir=scalers_dir,
            host=host,
            port=port,
            data_dir=data_dir or ctx.meta.get("kici.data_dir"),
        )
    except SettingsRefused as error:
        click.echo(str(error), err=True)
        ctx.exit(2)
    found = list(examine(this_machine(environ, settings)))
    if as_json:
        print_json([{"status": each.grade.value, "check": each.check, "message": each.text} for each in found])
    else:
        rows = [(each.grade.value, each.check, each.text) for each in found]
        print_table(("", "CHECK", "FOUND"), rows, empty="There was nothing to check.")
    ctx.exit(1 if any(each.grade is Grade.FAIL for each in found) else 0)
