"""Operators: microVMs that died and left something on this host.  Works on this machine, without a coordinator."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kici.cli.client import Client
from kici.cli.connection import environment
from kici.cli.errors import CliError, NoCoordinator, Refused
from kici.cli.jobs import as_json
from kici.cli.output import print_json
from kici.domain.errors import KiciError

if TYPE_CHECKING:
    from kici.config.environment import CoordinatorSettings
    from kici.decide.disk import DiskVerdict

ANSWER_SECONDS: Final = 2.0
_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_DIR = click.Path(file_okay=False, path_type=Path)
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104  # where a listener at any address is reached


@click.command("reap-orphans")
@click.option("--scalers", type=_FILE, metavar="FILE", help="Scalers of this host (default: as `kici up` finds them).")
@click.option("--scalers-dir", type=_DIR, metavar="DIR", help="Directory of further scaler files.")
@click.option("--data-dir", "data_directory", type=_DIR, metavar="DIR", help="Data directory of the coordinator here.")
@click.option("--force", is_flag=True, help="Although a coordinator runs here: machines that it is making may go.")
@as_json
@click.pass_context
def reap_orphans(
    ctx: click.Context,
    scalers: Path | None,
    scalers_dir: Path | None,
    data_directory: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Clear away what microVMs left that died on this host.

    For a host whose disk is full.  Machines that run are left alone.  Exits with 1 when there is still too little room.
    """
    from kici.adapters.clock import RealClock
    from kici.apps.microvm_room import reap
    from kici.config.environment import SettingsRefused, read_settings
    from kici.config.load import load_scalers

    try:
        settings = read_settings(
            environment(), scaler_config_path=scalers, scaler_config_dir=scalers_dir, data_dir=data_directory
        )
    except SettingsRefused as error:
        raise CliError(str(error)) from error
    loaded = load_scalers(settings.scaler_config_path, settings.scaler_config_dir)
    if loaded.config is None:
        raise CliError("\n".join(str(problem) for problem in loaded.problems))
    try:
        with _alone(settings, force=force):
            verdict = asyncio.run(reap(loaded.config, data_dir=settings.data_dir, clock=RealClock()))
    except KiciError as error:
        raise CliError(f"reap-orphans failed: {error}") from error
    if verdict is None:
        click.echo("There is no scaler of microVMs in these files.")
        return
    _print(verdict, as_json=as_json)
    ctx.exit(0 if verdict.recovered else 1)


def _print(verdict: "DiskVerdict", *, as_json: bool) -> None:
    from kici.decide.disk import size

    if as_json:
        told = {
            "reaped": verdict.reaped,
            "recovered": verdict.recovered,
            "freeBytesAfter": verdict.free_bytes_after,
        }
        print_json(told)
        return
    things = "1 leftover was" if verdict.reaped == 1 else f"{verdict.reaped} leftovers were"
    still = "" if verdict.recovered else ", which is still too little"
    click.echo(f"{things} cleared away; {size(verdict.free_bytes_after)} are free{still}.")


@contextmanager
def _alone(settings: "CoordinatorSettings", *, force: bool) -> Iterator[None]:
    """Nobody makes machines here while the block runs, as far as that can be told."""
    from kici.adapters.data_dir import DataDir

    if force or not settings.data_dir.exists():
        yield
        return
    url = _address(settings)
    if _answers(url):
        raise CliError(
            f"a coordinator answers at {url}: it clears away what is dead by itself, and what it is making now would "
            "go with the rest; stop it first, or give --force"
        )
    data_dir = DataDir.open(settings.data_dir)  # a worker answers nobody, and holds this one as well
    try:
        yield
    finally:
        data_dir.close()


def _address(settings: "CoordinatorSettings") -> str:
    from kici.adapters.data_dir import ENDPOINT

    try:
        told = (settings.data_dir / ENDPOINT).read_text().strip()
    except OSError:
        told = ""
    return told or f"http://{_ANY.get(settings.host, settings.host)}:{settings.port}"


def _answers(url: str) -> bool:
    client = Client(url, None)
    client.request_seconds = ANSWER_SECONDS
    try:
        client.request("GET", "/health")
    except (NoCoordinator, Refused):
        return False
    finally:
        client.close()
    return True
