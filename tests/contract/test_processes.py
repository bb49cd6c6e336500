"""Both hosts keep the contract of the process port: the real one, as Linux and as any other, and the fake one."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kici.adapters.processes import LinuxProcesses
from kici.adapters.processes_portable import PortableProcesses
from kici.ports.processes import MARK, Exit, Processes, Program
from kici.testing.contracts.processes import CASES, Case, Kind, runs_short_commands
from kici.testing.fake_files import FakeFiles
from kici.testing.fake_processes import FakeHost, FakeProcesses, Script
from kici.testing.virtual_time import virtual

SCRIPTS = {
    Kind.PRINTS: f'echo hello; echo "$WORD"; tr "\\0" "\\n" </proc/$$/environ >all; grep ^{MARK}= all; '
    f"grep -v -e ^{MARK}= -e ^PATH= all | cut -d= -f1",
    Kind.FAILS: "exit 3",
    Kind.SLEEPS: "exec sleep 1000",
    Kind.STUBBORN: "trap '' TERM; sleep 1000 & wait; sleep 1000",
    Kind.SCATTERS: "sleep 1000 & setsid sleep 1000 & (setsid sleep 1000 &) ; wait",
}


class RealBench:
    def __init__(self, folder: Path, make: Callable[[], Processes]) -> None:
        self.folder = folder
        self.another = make
        self.processes = make()
        for kind, text in SCRIPTS.items():
            path = folder / kind.value
            path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
            path.chmod(0o755)

    def program(self, kind: Kind, name: str = "a") -> Program:
        return Program(
            argv=(str(self.folder / kind.value),),
            env={},
            cwd=self.folder,
            output=self.folder / f"{name}.log",
            mark=f"{self.folder}/agents/{name}",
        )

    def output(self, program: Program) -> str:
        return program.output.read_text()

    def alive(self) -> int:
        return sum(self._is_ours(process) for process in Path("/proc").glob("[0-9]*"))

    def _is_ours(self, process: Path) -> bool:
        try:
            words = (process / "environ").read_bytes()
            state = (process / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return False
        return f"={self.folder}/agents/".encode() in words and state != b"Z"


class FakeBench:
    def __init__(self) -> None:
        self.files = FakeFiles()
        self.host = FakeHost(
            self.files,
            {
                Kind.PRINTS: Script(prints_environment="WORD", lives_seconds=0.01),
                Kind.FAILS: Script(lives_seconds=0.01, exit=Exit(code=3)),
                Kind.SLEEPS: Script(),
                Kind.STUBBORN: Script(ignores_term=True, children=1),
                Kind.SCATTERS: Script(children=3),
            },
        )
        self.processes = self.another()

    def another(self) -> FakeProcesses:
        return FakeProcesses(self.host)

    def program(self, kind: Kind, name: str = "a") -> Program:
        env: Mapping[str, str] = {}
        return Program(argv=(kind,), env=env, cwd=Path("/"), output=Path(f"/{name}.log"), mark=f"/agents/{name}")

    def output(self, program: Program) -> str:
        return self.files.contents[program.output].decode()

    def alive(self) -> int:
        return len(self.host.running())


cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@pytest.mark.spec("scaler 50.5")
@cases
async def test_linux(case: Case, tmp_path: Path) -> None:
    bench = RealBench(tmp_path, LinuxProcesses)
    before = set(os.listdir("/proc/self/fd"))
    await case(bench)
    assert bench.alive() == 0
    assert set(os.listdir("/proc/self/fd")) <= before, "descriptors are left behind"


@cases
async def test_hosts_without_pidfds(case: Case, tmp_path: Path) -> None:
    bench = RealBench(tmp_path, PortableProcesses)
    await case(bench)
    assert bench.alive() == 0


@pytest.mark.parametrize(
    "case", [case for case in CASES if case is not runs_short_commands], ids=lambda case: case.__name__
)
@virtual
async def test_fake(case: Case) -> None:
    bench = FakeBench()
    await case(bench)
    assert bench.alive() == 0
