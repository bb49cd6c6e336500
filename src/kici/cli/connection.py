"""How a command finds its coordinator and its token.

The coordinator: `--url`, `KICI_URL`, `KICI_ADMIN_URL`, else the file `endpoint` in the data directory, which a
running coordinator writes.  The token: `KICI_TOKEN`, `KICI_ADMIN_TOKEN`, else the file `owner-token` there.
That file's token is sent only to the machine whose coordinator wrote it, unless the directory was named.
"""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

import click

from kici.adapters.data_dir import ENDPOINT, OWNER_TOKEN, default_data_dir
from kici.cli.client import Client
from kici.cli.errors import CliError, NoCoordinator

P = ParamSpec("P")
R = TypeVar("R")

_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def environment() -> Mapping[str, str]:
    return dict(os.environ)  # noqa: TID251  # `config.environment` reads a coordinator's settings; a client needs five names


def with_client(command: Callable[Concatenate[Client, P], R]) -> Callable[P, R]:
    """Options of every command that talks to a coordinator; the command is given a client first."""

    @click.option("--url", metavar="URL", help="Address of the coordinator (KICI_URL).")
    @click.option("--data-dir", metavar="DIR", help="Data directory of the coordinator here (KICI_DATA_DIR).")
    @wraps(command)
    def connected(*args: P.args, **kwargs: P.kwargs) -> R:
        ctx = click.get_current_context()
        before = ctx.meta
        url = kwargs.pop("url") or before.get("kici.url")
        data_directory = kwargs.pop("data_dir") or before.get("kici.data_dir")
        client = connect(_text(url), _text(data_directory))
        ctx.call_on_close(client.close)
        return command(client, *args, **kwargs)

    return connected


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def data_dir(given: str | None, environ: Mapping[str, str]) -> Path:
    """The one that is named, else `KICI_DATA_DIR`, else by the XDG rules."""
    return Path(given).expanduser() if given else default_data_dir(environ, Path.home())


def connect(url: str | None, data_directory: str | None) -> Client:
    """A client for the options of a command.  Raises `NoCoordinator` when there is none to be found."""
    environ = environment()
    folder = data_dir(data_directory, environ)
    endpoint = _line(folder / ENDPOINT)
    address = url or environ.get("KICI_URL") or environ.get("KICI_ADMIN_URL") or endpoint
    if not address:
        raise NoCoordinator(
            f"no coordinator is known here: {folder / ENDPOINT} does not exist.\n"
            "Start one with `kici up`, or name another with --url or KICI_URL."
        )
    is_named = bool(data_directory or environ.get("KICI_DATA_DIR"))
    return Client(address, _token(environ, folder, is_trusted=is_named or _is_here(address, endpoint)))


def _token(environ: Mapping[str, str], folder: Path, *, is_trusted: bool) -> str | None:
    token = environ.get("KICI_TOKEN") or environ.get("KICI_ADMIN_TOKEN")
    if token:
        return token.strip()
    return _line(folder / OWNER_TOKEN) if is_trusted else None


def _is_here(address: str, endpoint: str | None) -> bool:
    return address == endpoint or urlsplit(address).hostname in _LOOPBACK


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}") from error
