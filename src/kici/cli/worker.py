"""`kici worker`: make this host one that spawns agents for coordinators elsewhere."""

from pathlib import Path

import click

from kici.cli.connection import environment
from kici.cli.errors import CliError

INVALID = 2
_FILE = click.Path(dir_okay=False, path_type=Path)
_DIR = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--join",
    metavar="URL[,URL]",
    help="Addresses of the coordinators (KICI_CLUSTER_COORDINATOR_URLS).",
)
@click.option("--token-file", type=_FILE, metavar="FILE", help="File with a join token; needed once.")
@click.option("--scalers", type=_FILE, metavar="FILE", required=True, help="What this host can make.")
@click.option("--host", metavar="H", help="Address that agents of this host connect to; 127.0.0.1 by default.")
@click.option("--port", type=int, metavar="P", help="Port for that; by default any free one, and then always that.")
@click.option("--data-dir", "data_directory", type=_DIR, metavar="DIR", help="Where to keep everything.")
@click.pass_context
def worker(  # noqa: PLR0913  # one for each option
    ctx: click.Context,
    join: str | None,
    token_file: Path | None,
    scalers: Path,
    host: str | None,
    port: int | None,
    data_directory: Path | None,
) -> None:
    """Run a worker on this machine: it makes agents for coordinators elsewhere, and needs no database.

    The first start trades the join token (`kici-admin join-token create`) for a credential, which is kept.  TERM and
    INT end the agents; USR2 stops the worker and leaves them running for the next start.
    """
    from kici.adapters.worker_keys import read_token_file
    from kici.apps.worker import WorkerOptions, WorkerReady, serve
    from kici.config.environment import SettingsRefused, read_settings
    from kici.domain.errors import KiciError

    environ = environment()
    urls = join or environ.get("KICI_CLUSTER_COORDINATOR_URLS") or environ.get("KICI_CLUSTER_COORDINATOR_URL") or ""
    addresses = tuple(url.strip() for url in urls.split(",") if url.strip())
    if not addresses:
        raise click.UsageError("name a coordinator: --join https://coordinator:4000", ctx)
    own_port = None if port is None and environ.get("KICI_PORT") else port or 0
    try:
        settings = read_settings(
            environ,
            scaler_config_path=scalers,
            host=host,
            port=own_port,
            data_dir=data_directory or ctx.meta.get("kici.data_dir"),
        )
    except SettingsRefused as error:
        click.echo(str(error), err=True)
        ctx.exit(INVALID)

    def announce(ready: WorkerReady) -> None:
        for notice in ready.notices:
            click.echo(f"note: {notice}", err=True)
        click.echo(f"worker {ready.name} is up for {', '.join(ready.coordinators)}")
        click.echo(f"  its agents connect to {ready.relay_url}")

    try:
        token = environ.get("KICI_CLUSTER_JOIN_TOKEN") if token_file is None else read_token_file(token_file)
        serve(settings, WorkerOptions(join=addresses, join_token=token or None), environ, announce)
    except KiciError as error:
        raise CliError(str(error)) from error
