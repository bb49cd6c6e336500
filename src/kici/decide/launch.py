"""How an agent process is started and ended on this host: command line, environment, control group, or a refusal.

Pure: the platform is an input, so that a test computes the exact command of any host.  Not here: starting
anything (`adapters.processes`), and which label set an order means (`backends.bare_metal`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kici.decide.agent_env import agent_environment, contract
from kici.domain.resources import Amount

OWN_AGENT: Final = "kici-agent"
PIDS_MAX: Final = 4096
"""Processes of one agent where we make its group ourselves; the same number that container agents get."""
CPU_PERIOD_US: Final = 100_000
SLICE: Final = "kici-scaler"

_BATCH: Final = re.compile(r"\.(cmd|bat)\Z", re.IGNORECASE)
_SYNTAX_ALWAYS: Final = re.compile(r'["%^\x00-\x1f]')
_SYNTAX_UNQUOTED: Final = re.compile(r"[&|<>(),;=]")


class Systemd(StrEnum):
    """Which service manager would take a transient scope from us."""

    NONE = "none"
    USER = "user"
    SYSTEM = "system"
    """We are root and have no manager of our own."""


class LimitsBy(StrEnum):
    NONE = "none"
    V1 = "v1"
    V2 = "v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupSupport:
    """What we may do with control groups ourselves."""

    tracking: bool = False
    """Make a group that finds and ends every process in it."""
    limits: LimitsBy = LimitsBy.NONE
    """Set cpu, memory and process limits on such a group."""
    problem: str = ""
    """Why not, where one of them is missing."""


@dataclass(frozen=True, slots=True)
class CgroupSetting:
    controller: str
    """Empty in the unified hierarchy."""
    file: str
    value: str
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupPlan:
    """A group for one agent; without settings it only keeps its processes together."""

    settings: tuple[CgroupSetting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHost:
    """The machine and the installation that start agents."""

    system: str
    """As `sys.platform` says it."""
    environment: Mapping[str, str] = field(repr=False)
    python: str
    """This installation's interpreter."""
    program_folder: str
    """Where this installation's commands are."""
    systemd: Systemd = Systemd.NONE
    cgroups: CgroupSupport = CgroupSupport()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSet:
    """What one label set says about its agent processes."""

    labels: tuple[str, ...]
    binary_path: str | None
    """None: this set starts containers (the job's image is the agent)."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    backpressure_mode: str | None = None
    image: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    agent_id: str
    labels: tuple[str, ...]
    url: str
    token: str | None = field(repr=False)
    limits: Amount
    enforce_cgroups: bool
    mark: str
    """Assignment that says which compute this is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    group: CgroupPlan | None = None
    """The group that we make; None: none."""
    unit: str | None = None
    """The scope that systemd makes."""
    is_own_agent: bool = False
    """This installation's agent, started plainly: a fork of a prepared process may serve instead."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """This host will not start this agent, ever, unless somebody changes what the reason says."""

    reason: str


def systemd_of(*, is_booted: bool, has_user_manager: bool, is_root: bool) -> Systemd:
    """Which manager to ask for scopes: our own user's where there is one, the system's only as root."""
    if not is_booted:
        return Systemd.NONE
    if has_user_manager:
        return Systemd.USER
    return Systemd.SYSTEM if is_root else Systemd.NONE


def plan_launch(host: LaunchHost, chosen: ProcessSet, order: LaunchOrder) -> Launch | Refusal:
    """How to start the agent that `order` asks for with the settings of `chosen`."""
    if chosen.binary_path is None:
        return Refusal(
            f"label set [{', '.join(chosen.labels)}] has an image and no binaryPath: its agents are containers, which "
            "need a container runtime on this host (label kici:runtime:docker); add a binaryPath for process agents"
        )
    refusal = batch_refusal(chosen.binary_path, host.system)
    if refusal is not None:
        return Refusal(refusal)
    env = _environment(host, chosen, order)
    program = program_argv(host, chosen.binary_path, mark=order.mark)
    is_limited = host.system == "linux" and order.enforce_cgroups and bool(order.limits)
    if is_limited and host.systemd is not Systemd.NONE:
        unit = f"kici-agent-{order.agent_id}"
        argv = (*_scope_argv(host.systemd, unit, order.limits), *program)
        return Launch(argv=argv, env={**_manager_address(host), **env}, unit=unit)
    if is_limited and host.cgroups.limits is LimitsBy.NONE:
        return Refusal(
            f"enforceCgroups asks for limits on agent {order.agent_id}, and this host has no way to set them: "
            f"no systemd, and {host.cgroups.problem or 'no control groups'}; "
            "run the coordinator where systemd runs or with delegated control groups, or turn enforceCgroups off"
        )
    group = CgroupPlan() if host.cgroups.tracking else None
    if is_limited:
        group = limits_plan(host.cgroups.limits, order.limits)
    is_own = host.system == "linux" and chosen.binary_path == OWN_AGENT
    return Launch(argv=program, env=env, group=group, is_own_agent=is_own)


def program_argv(host: LaunchHost, binary_path: str, *, mark: str) -> tuple[str, ...]:
    """The agent program itself.  A name without a slash is this installation's.

    Our own agent carries its mark on the command line, as an option that the interpreter does not know and keeps.
    """
    if binary_path == OWN_AGENT:
        # -P: the work folder is no place to import from.
        return (host.python, "-P", "-X", mark, "-m", "kici.apps.agent")
    windows = host.system == "win32"
    if "/" not in binary_path and not (windows and "\\" in binary_path):
        separator = "\\" if windows else "/"
        binary_path = f"{host.program_folder}{separator}{binary_path}"
    if windows and _BATCH.search(binary_path):
        return (_system_program(host, "cmd.exe"), "/d", "/e:on", "/v:off", "/c", "call", binary_path, "<NUL")
    return (binary_path,)


def batch_refusal(binary_path: str, system: str) -> str | None:
    """Why `cmd.exe` cannot be trusted with this path; None: it can, or does not get it.

    A path with a space is quoted, which disarms most of what `cmd.exe` reads as syntax; `call` reads the rest
    even in quotes.
    """
    if system != "win32" or not _BATCH.search(binary_path):
        return None
    found = _SYNTAX_ALWAYS.search(binary_path) or (None if " " in binary_path else _SYNTAX_UNQUOTED.search(binary_path))
    if found is None:
        return None
    return (
        f"binaryPath {binary_path} contains {found[0]!r}, which cmd.exe reads as syntax; "
        "move or rename the batch file, or name a program that is none"
    )


def limits_plan(by: LimitsBy, limits: Amount) -> CgroupPlan:
    """The group that enforces these limits; a dimension of 0 is unlimited."""
    quota = cpu_percent(limits.cpus) * CPU_PERIOD_US // 100
    memory = str(limits.memory_bytes)
    settings: list[CgroupSetting] = []
    if by is LimitsBy.V1:
        if limits.cpus > 0:
            settings.append(CgroupSetting("cpu", "cpu.cfs_period_us", str(CPU_PERIOD_US)))
            settings.append(CgroupSetting("cpu", "cpu.cfs_quota_us", str(quota)))
        if limits.memory_bytes > 0:
            settings.append(CgroupSetting("memory", "memory.limit_in_bytes", memory))
            settings.append(CgroupSetting("memory", "memory.memsw.limit_in_bytes", memory, required=False))
        settings.append(CgroupSetting("pids", "pids.max", str(PIDS_MAX), required=False))
    elif by is LimitsBy.V2:
        if limits.cpus > 0:
            settings.append(CgroupSetting("", "cpu.max", f"{quota} {CPU_PERIOD_US}"))
        if limits.memory_bytes > 0:
            settings.append(CgroupSetting("", "memory.max", memory))
            settings.append(CgroupSetting("", "memory.swap.max", "0", required=False))
        settings.append(CgroupSetting("", "pids.max", str(PIDS_MAX), required=False))
    return CgroupPlan(settings=tuple(settings))


def cpu_percent(cpus: float) -> int:
    """Percent of one core, at least one."""
    return max(1, round(cpus * 100))


def tree_kill_argv(host: LaunchHost, pid: int) -> tuple[str, ...]:
    """The Windows command that ends a process and everything it started."""
    return (_system_program(host, "taskkill.exe"), "/T", "/F", "/PID", str(pid))


class TreeKill(StrEnum):
    ENDED = "ended"
    ALREADY_GONE = "already-gone"
    FAILED = "failed"


def tree_kill_outcome(code: int | None) -> TreeKill:
    """What an exit code of `taskkill` says; None: it did not come back in time."""
    return {0: TreeKill.ENDED, 128: TreeKill.ALREADY_GONE}.get(-1 if code is None else code, TreeKill.FAILED)


def _environment(host: LaunchHost, chosen: ProcessSet, order: LaunchOrder) -> dict[str, str]:
    told = contract(
        agent_id=order.agent_id,
        labels=order.labels,
        url=order.url,
        token=order.token,
        image=chosen.image,
        backpressure=chosen.backpressure_mode,
    )
    return agent_environment(host.environment, told=told, label_set=chosen.env, windows=host.system == "win32")


def _scope_argv(manager: Systemd, unit: str, limits: Amount) -> tuple[str, ...]:
    user = ("--user",) if manager is Systemd.USER else ()
    cpus = (f"--property=CPUQuota={cpu_percent(limits.cpus)}%",) if limits.cpus > 0 else ()
    memory = (f"--property=MemoryMax={limits.memory_bytes}",) if limits.memory_bytes > 0 else ()
    return ("systemd-run", *user, "--scope", "--quiet", f"--slice={SLICE}", f"--unit={unit}", *cpus, *memory)


def _manager_address(host: LaunchHost) -> dict[str, str]:
    """What `systemd-run` needs to find the user's manager; the agent inherits it, and could find it anyway."""
    names = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    return {name: host.environment[name] for name in names if name in host.environment}


def _system_program(host: LaunchHost, name: str) -> str:
    names = {key.upper(): value for key, value in host.environment.items()}
    if name == "cmd.exe" and names.get("COMSPEC"):
        return names["COMSPEC"]
    root = names.get("SYSTEMROOT") or "C:\\Windows"
    return f"{root}\\System32\\{name}"
