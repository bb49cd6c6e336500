"""`kici logs`: the output of a job, its streams apart and byte for byte."""

import click

from kici.cli.client import Client, Json, job_path
from kici.cli.connection import with_client
from kici.cli.following import OnChunk, Printer, chunk_bytes, follow
from kici.cli.interrupting import forget_output

_PAGE_TYPE = "application/json"


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("-f", "--follow", "is_followed", is_flag=True, help="Go on until the job is over.")
@click.option("--system", is_flag=True, help="The orchestrator's lines about the job instead of its output.")
@with_client
def logs(client: Client, /, *, job_id: str, is_followed: bool, system: bool) -> None:
    """Print what a job wrote: its standard output to ours, its error output to ours."""
    printer = Printer.standard()

    def write(stream: str, data: bytes) -> None:
        if system:
            if stream == "system":
                printer.chunk("stdout", data)
        else:
            printer.chunk(stream, data)

    try:
        if is_followed:
            follow(client, job_id, on_chunk=write, on_job=_ignore)
            return
        after, pages = -1, 0
        while after != pages:
            after = pages
            pages = _page(client, job_id, after, write)
    except BrokenPipeError:
        forget_output()


def _page(client: Client, job_id: str, after: int, write: OnChunk) -> int:
    page = client.request(
        "GET", job_path(job_id, "/logs"), query={"after": after}, headers={"Accept": _PAGE_TYPE}, again_seconds=5.0
    )
    for item in page["items"]:
        write(item["stream"], chunk_bytes(item))
    end: int = page["next"]
    return end


def _ignore(job: Json) -> None:
    pass
