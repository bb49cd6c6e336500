"""`kici run`: one command as a job, as if it ran here."""

import os
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from kici.cli.client import Client, Json, job_path
from kici.cli.connection import with_client
from kici.cli.errors import CliError, NeverRan
from kici.cli.following import INTERRUPTED, Printer, ending, exit_code, follow
from kici.cli.interrupting import Cancelling, forget_output
from kici.cli.values import DURATION, PAIR

SUBMIT_SECONDS: Final = 10.0
"""How long a submission is tried again while nobody answers."""
PIPE_CLOSED: Final = 128 + 13


class _Misused(click.UsageError):
    exit_code = NeverRan.exit_code


class _RunCommand(click.Command):
    """Mistakes on the command line exit with 125, so that they cannot be taken for the job's own code."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _Misused(error.message, error.ctx) from error


@click.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False, "show_default": False})
@click.option("-l", "--label", "labels", multiple=True, help="A label that the agent must carry; repeat for more.")
@click.option("--exclude", multiple=True, metavar="LABEL", help="A label that the agent must not carry.")
@click.option("--cpus", type=float, metavar="N", help="Cores, fractions allowed.")
@click.option("--memory", metavar="M", help="Memory, such as 512m or 2g.")
@click.option("--image", metavar="IMAGE", help="Run in a container of this image.")
@click.option("--dockerfile", metavar="FILE", help="Run in a container of an image built from it, below this folder.")
@click.option("-e", "--env", type=PAIR, multiple=True, metavar="K=V", help="A variable of the job's environment.")
@click.option("--secret", type=PAIR, multiple=True, metavar="ENV=CTX:KEY", help="A stored secret as a variable.")
@click.option("--timeout", type=DURATION, metavar="TIME", help="Longest running time: seconds, or such as 30m.")
@click.option("--name", metavar="NAME", help="Name of the job; the command by default.")
@click.option("-d", "--detach", is_flag=True, help="Print the job's id and return.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@with_client
def run(client: Client, /, *, detach: bool, **options: Any) -> NoReturn:
    """Run COMMAND as a job; show its output; exit with its exit code.

    124: it ran for too long.  125: it never ran.  128+n: signal n ended it.  130: interrupted here, and cancelled.
    """
    try:
        job = client.post("/api/v1/jobs", document(**options), key=new_key(), again_seconds=SUBMIT_SECONDS)
    except CliError as error:
        raise NeverRan(error.message) from error
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    if detach:
        click.echo(job["id"])
        leave(0)
    click.echo(f"kici: job {job['id']}  {client.page(job['links']['page'])}", err=True)
    leave(attend(client, job))


def document(  # noqa: PLR0913  # one for each option
    *,
    command: tuple[str, ...],
    labels: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    cpus: float | None = None,
    memory: str | None = None,
    image: str | None = None,
    dockerfile: str | None = None,
    env: tuple[tuple[str, str], ...] = (),
    secret: tuple[tuple[str, str], ...] = (),
    timeout: float | None = None,
    name: str | None = None,
) -> Json:
    """The job document that these options mean."""
    resources = {key: value for key, value in (("cpus", cpus), ("memory", memory)) if value is not None}
    parts: Json = {
        "name": name,
        "runsOn": {"labels": list(labels), "exclude": list(exclude)} if labels or exclude else None,
        "resources": resources or None,
        "container": _container(image, dockerfile),
        "env": dict(env) or None,
        "secrets": dict(secret) or None,
        "timeoutSeconds": timeout,
    }
    return {"command": list(command), **{key: value for key, value in parts.items() if value is not None}}


def _container(image: str | None, dockerfile: str | None) -> Json | None:
    if dockerfile is None:
        return {"image": image} if image is not None else None
    if image is not None:
        raise CliError("--image and --dockerfile: give one of them")
    from kici.cli.build_files import build_files  # few jobs build

    return {"dockerfile": dockerfile, "context": build_files(Path.cwd(), dockerfile)}


def new_key() -> str:
    """An idempotency key: a submission that is tried again makes no second job."""
    return f"cli-{os.urandom(16).hex()}"


def attend(client: Client, job: Json) -> int:
    """Show the job until it is over; the exit code.  A first interruption cancels it, a second one kills it."""
    printer = Printer.standard()
    cancelled = Cancelling(client, job_path(job["id"], "/cancel"))
    try:
        job = follow(client, job["id"], on_chunk=printer.chunk, on_job=printer.job)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        cancelled.cancel(force=False)
        forget_output()
        return PIPE_CLOSED
    printer.clear()
    text = ending(job)
    if text and not cancelled.is_asked:
        click.echo(f"kici: {text}", err=True)
    return INTERRUPTED if cancelled.is_asked else exit_code(job)


def leave(code: int) -> NoReturn:
    raise click.exceptions.Exit(code)
