"""Everything that the agent needs to run in an image that has nothing: made from this installation's own Python.

One archive with interpreter, standard library, shared libraries, their loader and the agent.  It is started by its
loader, which is told where the libraries are: no variable does, so what the agent starts runs with the image's own.

Run as a program (`python -m kici.adapters.agent_runtime FOLDER [--write]`) it says on standard output which archive
this installation makes, and writes it into the folder if it is told to and it is not there.  Reading and compiling
take seconds, which a coordinator has better uses for.
"""

import hashlib
import io
import json
import os
import py_compile
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RECIPE: Final = "1"
"""Part of the version: raise it when the layout changes."""
PLACE: Final = "/opt/kici"
"""Where the runtime is in a container."""
_LEFT_OUT: Final = frozenset(
    {
        *{"__pycache__", "config", "curses", "dbm", "distutils", "ensurepip", "idlelib", "lib-dynload", "lib2to3"},
        *{"pydoc_data", "site-packages", "dist-packages", "sqlite3", "test", "tests", "tkinter", "turtledemo", "venv"},
        *{"wsgiref", "xmlrpc"},
    }
)
_EXTENSIONS_LEFT_OUT: Final = ("_test", "_tkinter", "_curses", "_dbm", "_gdbm", "_sqlite3", "_xx", "xx", "readline")
_OURS: Final = ("agent", "domain", "kit", "wire", "apps/agent.py", "apps/__init__.py", "__init__.py")
_LIBRARIES: Final = ("msgspec", "websockets")
_OPENED_LATE: Final = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
"""Libraries that the C library opens by itself when it needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeArchive:
    """A runtime that is ready to be unpacked at `PLACE`."""

    version: str
    """Names the content: equal versions are equal to the byte."""
    tar: Path
    python: str
    """File name of the interpreter."""

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """How the agent is started in a container."""
        python = f"{PLACE}/bin/{self.python}"
        options = ("-I", "-S", "-X", "utf8", "-m", "kici.apps.agent")
        return (f"{PLACE}/lib/ld.so", "--library-path", f"{PLACE}/lib", python, *options)


class RuntimeUnavailable(Exception):
    """This installation cannot be put into containers."""


def parse_report(text: str, folder: Path) -> RuntimeArchive:
    """What the program said of the archive in this folder.  Raises `ValueError`."""
    told = json.loads(text.strip().splitlines()[-1]) if text.strip() else None
    if not isinstance(told, dict) or not {"version", "python"} <= told.keys():
        raise ValueError(text[-2000:])
    return RuntimeArchive(version=told["version"], tar=_tar(folder, told["version"]), python=told["python"])


def archive_of(folder: Path, *, write: bool) -> RuntimeArchive:
    """What this installation makes of itself; on disk when it returns, if `write`.  Raises `RuntimeUnavailable`."""
    interpreter = Path(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))
    files = dict(_files(interpreter))
    version = _version(files)
    archive = RuntimeArchive(version=version, tar=_tar(folder, version), python=interpreter.name)
    if write and not archive.tar.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.tar"):
            old.unlink(missing_ok=True)
        _write(archive.tar, files)
    return archive


def _tar(folder: Path, version: str) -> Path:
    return folder / f"{version}.tar"


def _files(interpreter: Path) -> Iterator[tuple[str, Path]]:
    """Path in the runtime and where it comes from; sources stand for what they will be compiled to."""
    here = f"{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
    elf = {f"bin/{interpreter.name}": interpreter}
    for path in _extensions():
        elf[f"{here}/lib-dynload/{path.name}"] = path
    for name, path in _packages(here):
        if path.suffix == ".so":
            elf[name] = path
        else:
            yield name, path
    yield from elf.items()
    yield from _shared(list(elf.values())).items()
    certificates = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    if Path(certificates).exists():
        yield "etc/ca.pem", Path(certificates)


def _extensions() -> list[Path]:
    folder = next((Path(name) for name in sys.path if name.endswith("lib-dynload")), None)
    found = [] if folder is None else sorted(folder.glob("*.so"))
    return [path for path in found if not path.name.startswith(_EXTENSIONS_LEFT_OUT)]


def _packages(here: str) -> Iterator[tuple[str, Path]]:
    yield from _tree(Path(sysconfig.get_path("stdlib")), here)
    for name in _LIBRARIES:
        module = sys.modules.get(name) or __import__(name)
        yield from _tree(Path(str(module.__file__)).parent, f"{here}/{name}")
    package = Path(__file__).parents[1]
    for part in _OURS:
        source = package / part
        if source.is_dir():
            yield from _tree(source, f"{here}/kici/{part}")
        else:
            yield f"{here}/kici/{part}", source


def _tree(folder: Path, at: str) -> Iterator[tuple[str, Path]]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name not in _LEFT_OUT and not entry.name.startswith("config-"):
                yield from _tree(entry, f"{at}/{entry.name}")
        elif entry.suffix in (".py", ".so"):
            yield f"{at}/{entry.name}", entry


def _shared(programs: list[Path]) -> dict[str, Path]:
    """The libraries of these programs, and their loader as `lib/ld.so`."""
    try:
        command = ["ldd", *map(str, programs)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"the libraries of this Python cannot be listed: ldd: {error}") from error
    found: dict[str, Path] = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if "=>" in words and len(words) >= 3 and words[2].startswith("/"):
            found[f"lib/{words[0]}"] = Path(words[2])
        elif words and words[0].startswith("/") and "ld-" in Path(words[0]).name and len(words) == 2:
            found["lib/ld.so"] = Path(words[0])
    if "lib/ld.so" not in found:
        raise RuntimeUnavailable(f"ldd names no loader of this Python: {done.stdout[-500:]}{done.stderr[-500:]}")
    for name, path in list(found.items()):
        if Path(name).name.startswith("libc."):
            late = [path.parent / each for each in _OPENED_LATE]
            found |= {f"lib/{each.name}": each for each in late if each.exists()}
    return found


def _version(files: Mapping[str, Path]) -> str:
    """Of the content, not of names or times."""
    digest = hashlib.sha256(f"{RECIPE} {sys.version} {sys.implementation.cache_tag}".encode())
    for name in sorted(files):
        content = hashlib.sha256(files[name].read_bytes()).hexdigest()
        digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()[:32]


def _write(target: Path, files: Mapping[str, Path]) -> None:
    """Whole or not at all: others may look for it at any moment."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".runtime-")
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for folder in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
                member = tarfile.TarInfo(folder)
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            for inside, source in sorted(files.items()):
                _add(tar, inside, source)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _add(tar: tarfile.TarFile, inside: str, source: Path) -> None:
    is_program = inside.startswith(("bin/", "lib/"))
    content = source.read_bytes()
    if source.suffix == ".py":
        # Without sources a module is found by this name, and nothing is ever compiled or compared in a container.
        inside, content = f"{inside.removesuffix('.py')}.pyc", _compiled(source, inside)
    member = tarfile.TarInfo(inside)
    member.size, member.mode = len(content), 0o755 if is_program else 0o644
    tar.addfile(member, io.BytesIO(content))


def _compiled(source: Path, inside: str) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".pyc") as file:
        py_compile.compile(
            str(source),
            cfile=file.name,
            dfile=f"{PLACE}/{inside}",
            doraise=True,
            optimize=0,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            quiet=1,
        )
        return Path(file.name).read_bytes()


if __name__ == "__main__":
    try:
        made = archive_of(Path(sys.argv[1]), write="--write" in sys.argv[2:])
    except (RuntimeUnavailable, OSError, py_compile.PyCompileError) as fault:
        sys.exit(f"kici: {fault}")
    sys.stdout.write(json.dumps({"version": made.version, "python": made.python}) + "\n")
