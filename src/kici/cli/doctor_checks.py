"""What `kici doctor` looks at.  Each check gives findings: good, worth knowing, or in the way.

Checks of one type of scaler are listed in `SCALER_CHECKS`; a new backend adds its own there.
"""

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kici.adapters.data_dir import ENDPOINT
from kici.adapters.ledger_files import foresee_folder, usual_places
from kici.adapters.this_host import launch_host, this_cgroups
from kici.backends.bare_metal.factory import readiness_problems
from kici.config.environment import CoordinatorSettings
from kici.config.load import load_scalers
from kici.config.model import BackendType, ScalerEntry
from kici.decide.launch import CgroupSupport, LimitsBy
from kici.domain.errors import Misconfigured
from kici.kit.version import VERSION

PYTHON_MIN: Final = (3, 11)
DISK_WARN_BYTES: Final = 1024**3
DISK_FAIL_BYTES: Final = 100 * 1024**2


class Grade(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, and somebody may want to know."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Found:
    grade: Grade
    check: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the checks need to know of this machine and this installation."""

    environ: Mapping[str, str]
    settings: CoordinatorSettings
    cgroups: CgroupSupport


def this_machine(environ: Mapping[str, str], settings: CoordinatorSettings) -> Machine:
    return Machine(environ=environ, settings=settings, cgroups=this_cgroups().support)


def examine(machine: Machine) -> Iterator[Found]:
    for check in MACHINE_CHECKS:
        yield from check(machine)
    yield from scalers(machine)


def python(_: Machine) -> Iterator[Found]:
    version = ".".join(map(str, sys.version_info[:3]))
    text = f"Python {version}, kici {VERSION} in {Path(sys.executable).parent}"
    if sys.version_info[:2] < PYTHON_MIN:
        yield Found(Grade.FAIL, "python", f"{text}; 3.11 or newer is needed")
    else:
        yield Found(Grade.OK, "python", text)


def data_directory(machine: Machine) -> Iterator[Found]:
    folder = machine.settings.data_dir
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Found(Grade.FAIL, "data directory", f"{existing} is not writable for us; choose another with --data-dir")
        return
    free = shutil.disk_usage(existing).free
    text = f"{folder}, {free / 1024**3:.1f} GiB free"
    if free < DISK_FAIL_BYTES:
        yield Found(Grade.FAIL, "data directory", f"{text}; make room, or choose another with --data-dir")
    elif free < DISK_WARN_BYTES:
        yield Found(Grade.NOTE, "data directory", f"{text}: that is little")
    else:
        yield Found(Grade.OK, "data directory", text)


def port(machine: Machine) -> Iterator[Found]:
    host, number = machine.settings.host, machine.settings.port
    endpoint = machine.settings.data_dir / ENDPOINT
    if endpoint.exists():
        yield Found(Grade.OK, "port", f"a coordinator of this data directory runs at {endpoint.read_text().strip()}")
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            why = f"{host} port {number} cannot be used: {error.strerror}; choose another with --port or --host"
            yield Found(Grade.FAIL, "port", why)
            return
    yield Found(Grade.OK, "port", f"{host} port {number} is free")


def control_groups(machine: Machine) -> Iterator[Found]:
    support = machine.cgroups
    if support.tracking and support.limits is not LimitsBy.NONE:
        text = f"agents can be kept together and limited ({support.limits.value})"
        yield Found(Grade.OK, "control groups", text)
        return
    what = "agents can be kept together but not limited" if support.tracking else "not available to us"
    why = f" ({support.problem})" if support.problem else ""
    yield Found(Grade.NOTE, "control groups", f"{what}{why}; only scalers with enforceCgroups need them")


def isolation(machine: Machine) -> Iterator[Found]:
    user = machine.environ.get("KICI_AGENT_ENV_KICI_RUNNER_USER")
    if user:
        yield Found(Grade.OK, "isolation", f"steps of process agents run as {user}")
        return
    why = "steps of process agents can read what you can; KICI_AGENT_ENV_KICI_RUNNER_USER=NAME runs them as another"
    yield Found(Grade.NOTE, "isolation", why)


MACHINE_CHECKS: Final[tuple[Callable[[Machine], Iterator[Found]], ...]] = (
    python,
    data_directory,
    port,
    control_groups,
    isolation,
)


def scalers(machine: Machine, *, only: str | None = None) -> Iterator[Found]:
    """`only`: one type of scalers."""
    settings = machine.settings
    loaded = load_scalers(settings.scaler_config_path, settings.scaler_config_dir)
    for problem in loaded.problems:
        yield Found(Grade.FAIL, "scalers", str(problem))
    for notice in loaded.warnings:
        yield Found(Grade.NOTE, "scalers", str(notice))
    if loaded.config is not None and loaded.config.machine_pools:
        yield machine_pools(machine)
    for entry in loaded.config.scalers if loaded.config else ():
        if only not in (None, entry.type.value):
            continue
        check = SCALER_CHECKS.get(entry.type)
        if check is None:
            why = f"of type {entry.type.value}, which this version has no checks for"
            yield Found(Grade.NOTE, f"scaler {entry.name}", why)
        else:
            yield from check(machine, entry)


def machine_pools(machine: Machine) -> Found:
    """Where their ledgers are kept: the coordinators of this host must find the same folder."""
    places = usual_places(machine.environ, Path.home())
    folder = foresee_folder(machine.settings.machine_ledger_dir, places)
    if folder is None:
        named = machine.settings.machine_ledger_dir
        where = f"{named} is" if named else f"none of {', '.join(map(str, places))} is"
        return Found(Grade.FAIL, "machine pools", f"{where} writable for us; choose with KICI_MACHINE_LEDGER_DIR")
    text = f"ledgers in {folder}; each coordinator of this host must use this folder"
    return Found(Grade.OK, "machine pools", text)


def _bare_metal(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    from kici.backends.container.factory import makes_containers  # for scalers of this type only
    from kici.cli.doctor_containers import job_containers

    try:
        if makes_containers(entry):
            yield from _containers(machine, entry)
            return
    except Misconfigured as error:
        yield Found(Grade.FAIL, f"scaler {entry.name}", str(error))
        return
    yield from _processes(machine, entry)
    yield from job_containers(machine, entry)


def _processes(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    problems = readiness_problems(entry, launch_host(machine.environ, machine.cgroups))
    if entry.enforce_cgroups and machine.cgroups.limits is LimitsBy.NONE:
        problems.append(f"scaler {entry.name}: enforceCgroups asks for limits that cannot be set here")
    name = f"scaler {entry.name}"
    yield from (Found(Grade.FAIL, name, problem) for problem in problems)
    if not problems:
        yield Found(Grade.OK, name, f"up to {entry.max_agents} process agents can be started")


def _microvms(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    from kici.cli.doctor_microvms import microvms  # what it takes is loaded where there is such a scaler

    return microvms(machine, entry)


def _containers(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    from kici.cli.doctor_containers import containers  # what it takes is loaded where there is such a scaler

    return containers(machine, entry)


SCALER_CHECKS: Final[dict[BackendType, Callable[[Machine, ScalerEntry], Iterator[Found]]]] = {
    BackendType.FIRECRACKER: _microvms,
    BackendType.BARE_METAL: _bare_metal,
    BackendType.CONTAINER: _containers,
}
