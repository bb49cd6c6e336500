"""The agent as a distribution of its own: builds, holds what it imports and no more, and runs a job."""

import asyncio
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import websockets

from kici.kit.version import VERSION
from kici.testing.agent_harness import AgentHarness

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "packages" / "agent"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel unpacked and its two dependencies, as an installer would leave it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=PACKAGE, check=True, capture_output=True)
    (wheel,) = out.glob("kici_agent-*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for module in (msgspec, websockets):
        assert module.__file__ is not None
        (site / module.__name__).symlink_to(Path(module.__file__).parent)
    return site


def python(site: Path, script: str) -> list[str]:
    """An interpreter that sees the standard library and `site`, nothing else."""
    return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(site)!r}); {script}"]


ENTRIES = "kici.agent.container_step, kici.agent.guest, kici.agent.inner, kici.agent.program, kici.apps.agent"
IMPORTED = f"import {ENTRIES}; print(*sorted(m for m in sys.modules if m.startswith('kici')))"


def test_it_holds_exactly_what_it_imports(site: Path) -> None:
    done = subprocess.run(python(site, IMPORTED), check=True, capture_output=True, text=True)
    held = {
        ".".join(path.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
        for path in (site / "kici").rglob("*.py")
    }
    assert set(done.stdout.split()) == held


def test_it_says_its_version(site: Path) -> None:
    command = python(site, "from kici.apps.agent import main; sys.exit(main(['--version']))")
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"kici-agent {VERSION}\n"


@pytest.mark.parametrize("file", [ROOT / "pyproject.toml", PACKAGE / "pyproject.toml"], ids=["kici", "kici-agent"])
def test_there_is_one_version(file: Path) -> None:
    assert tomllib.loads(file.read_text())["project"]["version"] == VERSION


def test_it_needs_nothing_that_the_whole_does_not_need() -> None:
    whole = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    alone = set(tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["dependencies"])
    assert alone <= whole


@contextmanager
def started(site: Path, environ: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    command = python(site, "from kici.apps.agent import main; sys.exit(main([]))")
    with subprocess.Popen(command, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_it_runs_a_job_without_anything_of_the_coordinator(
    site: Path, coordinator: AgentHarness, tmp_path: Path
) -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "KICI_ORCHESTRATOR_URL": coordinator.url,
        "KICI_SCALER_MANAGED": "1",
    }
    with started(site, environ) as process:
        job = await coordinator.run("sh", "-c", "echo alone")
        assert job.stdout == b"alone\n"
        assert await asyncio.to_thread(process.wait, 10) == 0
