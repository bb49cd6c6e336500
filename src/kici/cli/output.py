"""What commands print: JSON for programs, aligned columns and short times for people."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import click

NOTHING: Final = "-"


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Columns as wide as they must be; `empty` on the error output when there are no rows."""
    if not rows:
        click.echo(empty, err=True)
        return
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(head), *texts]) for column in range(len(head))]
    for row in [list(head), *texts]:
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        click.echo(f"{name.ljust(width)}  {cell(value)}")


def cell(value: object) -> str:
    if value is None or value in ("", []):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return " ".join(str(value).split())


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def took(job: Mapping[str, Any]) -> str:
    """How long a job ran, in words; empty while there is nothing to say."""
    if not job.get("startedAt") or not job.get("finishedAt"):
        return ""
    return duration((moment(job["finishedAt"]) - moment(job["startedAt"])).total_seconds())


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes}m{rest:02}s"
    return f"{minutes // 60}h{minutes % 60:02}m"


def local(text: str | None) -> str | None:
    """A moment in the time of this machine, to the second."""
    if text is None:
        return None
    return moment(text).astimezone().replace(tzinfo=None).isoformat(sep=" ", timespec="seconds")
