"""The files of a build, read from where the command runs: what `docker build` would send, for a job that builds."""

from collections.abc import Iterator
from pathlib import Path

from kici.cli.errors import CliError
from kici.decide.build_files import copied_files

BYTES_MAX = 256 * 1024
LEFT_OUT = frozenset({".git"})


def with_files(document: object, folder: Path) -> object:
    """A run file's data, with the files of each job's Dockerfile below this folder, where the job brings none itself.

    What is not of the expected shape stays as it is: the coordinator says what is wrong with it.
    """
    jobs = document.get("jobs") if isinstance(document, dict) else None
    for job in jobs.values() if isinstance(jobs, dict) else ():
        container = job.get("container") if isinstance(job, dict) else None
        if isinstance(container, dict) and isinstance(container.get("dockerfile"), str) and "context" not in container:
            container["context"] = build_files(folder, container["dockerfile"])
    return document


def build_files(folder: Path, dockerfile: str) -> dict[str, str]:
    """The Dockerfile and what it copies, by their paths below the folder.  Raises `CliError`."""
    root = folder.resolve()
    files = {dockerfile: _text(root, root / dockerfile)}
    for source in copied_files(files[dockerfile]):
        for path in _below(root, source):
            files[path.relative_to(root).as_posix()] = _text(root, path)
    size = sum(len(name.encode()) + len(text.encode()) for name, text in files.items())
    if size > BYTES_MAX:
        raise CliError(
            f"{dockerfile} copies {len(files) - 1} files, {size} bytes with itself, and {BYTES_MAX} go with a job; "
            "let an instruction fetch them, or the job itself"
        )
    return files


def _below(root: Path, source: str) -> Iterator[Path]:
    found = [root] if source == "." else sorted(root.glob(source)) if ".." not in source.split("/") else []
    for path in found:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and LEFT_OUT.isdisjoint(file.relative_to(root).parts):
                yield file


def _text(root: Path, path: Path) -> str:
    try:
        if not path.resolve().is_relative_to(root):
            raise CliError(f"{path} leads out of {root}, and only what is below it goes into a build")
        return path.read_bytes().decode()
    except OSError as error:
        raise CliError(f"{path}, which the build needs, cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is no text, and only text goes with a job; let an instruction fetch it") from error
