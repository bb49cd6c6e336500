"""`kici config`: judge and explain a scalers file.  Needs no coordinator, and asks nothing of this machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from kici.config.load import Loaded

INVALID = 2
_FILE = click.argument(
    "file", required=False, envvar="KICI_SCALER_CONFIG_PATH", type=click.Path(path_type=Path, allow_dash=True)
)
_DIRECTORY = click.option(
    "--scalers-dir",
    "directory",
    envvar="KICI_SCALER_CONFIG_DIR",
    type=click.Path(path_type=Path),
    help="Folder whose *.yaml and *.yml files add scalers.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def config() -> None:
    """Check and explain a scalers file, without a coordinator.

    FILE is the scalers file, "-" for standard input; by default what KICI_SCALER_CONFIG_PATH names.
    """


@config.command()
@_FILE
@_DIRECTORY
@_JSON
@click.pass_context
def check(context: click.Context, file: Path | None, directory: Path | None, *, as_json: bool) -> None:
    """Tell every mistake in FILE, each with its line and column.

    Exits with 2 when there is one, else with 0.
    """
    loaded = _load(context, file, directory)
    if as_json:
        _print_json(_judgement(loaded))
    else:
        for notice in loaded.warnings:
            click.echo(f"{notice} (warning)")
        _print_problems(loaded)
        if loaded.config is not None:
            click.echo(_summary(loaded))
    context.exit(INVALID if loaded.config is None else 0)


@config.command()
@_FILE
@_DIRECTORY
@_JSON
@click.pass_context
def explain(context: click.Context, file: Path | None, directory: Path | None, *, as_json: bool) -> None:
    """Say what FILE amounts to on this machine; without FILE, what a coordinator does without one."""
    import platform

    import msgspec

    from kici.cli.config_explain import explained, told
    from kici.domain.platform import Host

    loaded = _load(context, file, directory, default_is_fine=True)
    if loaded.config is None:
        if as_json:
            _print_json(_judgement(loaded))
        else:
            _print_problems(loaded)
        context.exit(INVALID)
        return
    document = explained(loaded.config, Host(sys.platform, platform.machine()))
    if as_json:
        _print_json(msgspec.to_builtins(document))
    else:
        click.echo(told(document), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON Schema (2020-12) of a scalers file, for editors."""
    from kici.config.schema import scalers_schema

    _print_json(scalers_schema())


@config.command()
def example() -> None:
    """Print a commented scalers file to start from."""
    from importlib.resources import files

    click.echo(files("kici.config").joinpath("example.yaml").read_text(encoding="utf-8"), nl=False)


def _load(
    context: click.Context, file: Path | None, directory: Path | None, *, default_is_fine: bool = False
) -> "Loaded":
    from kici.config.load import load_scalers, load_text
    from kici.config.yaml_source import FILE_BYTES_MAX

    if _is_given(context, "file") and not _is_given(context, "directory"):
        directory = None  # a folder of the environment belongs to the file of the environment
    if file is None and directory is None and not default_is_fine:
        raise click.UsageError('name a scalers file ("-": standard input); `kici config example` prints one')
    if file == Path("-"):
        if directory is not None:
            raise click.UsageError("standard input and --scalers-dir do not go together; name a file")
        return load_text(sys.stdin.buffer.read(FILE_BYTES_MAX + 1), "<stdin>")
    return load_scalers(file, directory)


def _is_given(context: click.Context, parameter: str) -> bool:
    return context.get_parameter_source(parameter) is ParameterSource.COMMANDLINE


def _print_problems(loaded: "Loaded") -> None:
    for problem in loaded.problems:
        click.echo(str(problem))
    if loaded.problems_dropped:
        click.echo(f"... and {loaded.problems_dropped} more problems")


def _summary(loaded: "Loaded") -> str:
    assert loaded.config is not None
    scalers = loaded.config.scalers
    sets = sum(len(entry.label_sets) for entry in scalers)
    parts = [_counted(len(scalers), "scaler"), _counted(sets, "label set"), _counted(len(loaded.warnings), "warning")]
    return f"valid: {', '.join(parts)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _judgement(loaded: "Loaded") -> dict[str, object]:
    from dataclasses import asdict

    return {
        "valid": loaded.config is not None,
        "problems": [asdict(problem) for problem in loaded.problems],
        "problemsDropped": loaded.problems_dropped,
        "warnings": [asdict(notice) for notice in loaded.warnings],
        "scalers": [entry.name for entry in loaded.config.scalers] if loaded.config is not None else [],
    }


def _print_json(document: object) -> None:
    import json

    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
