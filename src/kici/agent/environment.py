"""What the agent is told: its environment, read once, every problem reported together.

Nothing here reads the environment of the process: the caller hands over a copy.  Names of our other programs are
let through, so that a shell set up for them can start an agent; any other `KICI_` name is a typing error until
proven otherwise, since a setting that is ignored in silence does harm later.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from kici.domain.errors import Misconfigured
from kici.domain.labels import canonical, is_reserved, role_labels
from kici.domain.platform import os_arch_labels
from kici.wire.agent_settings import AgentSettings
from kici.wire.leaving import Patience
from kici.wire.messages import AgentRegister

ORPHAN_TIMEOUT_MS: Final = 600_000
SANDBOX_MEMORY_BYTES_MIN: Final = 32 * 1024**2
"""What the first process of a container needs, and a little for the job."""

OURS: Final = frozenset(
    {
        "KICI_AGENT_ID",
        "KICI_AGENT_ORPHAN_TIMEOUT_MS",
        "KICI_AGENT_TOKEN",
        "KICI_AGENT_TOKEN_FILE",
        "KICI_BACKPRESSURE_MODE",
        "KICI_DEFAULT_STEP_TIMEOUT_MS",
        "KICI_DEV",
        "KICI_EXECUTION_MODE",
        "KICI_JOB_IMAGE_AGENT",
        "KICI_LABELS",
        "KICI_MAX_LOG_SIZE_BYTES",
        "KICI_ORCHESTRATOR_URL",
        "KICI_PORT",
        "KICI_ROLES",
        "KICI_RUNNER_USER",
        "KICI_RUNTIME_IMAGE",
        "KICI_SANDBOX_HARDENED",
        "KICI_SANDBOX_MEMORY_BYTES",
        "KICI_SANDBOX_NANO_CPUS",
        "KICI_SANDBOX_NETWORK_ISOLATION",
        "KICI_SANDBOX_PIDS_LIMIT",
        "KICI_SANDBOX_READONLY_ROOTFS",
        "KICI_SANDBOX_USER",
        "KICI_SCALER_CLAIM_CODE",
        "KICI_SCALER_IDLE_TIMEOUT",
        "KICI_SCALER_MANAGED",
        "KICI_SCALER_PENDING_DISPATCH_TIMEOUT",
        "KICI_TRUSTED_ENV",
    }
)
"""What this program acts on."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "KICI_AGENT_BETWEEN_JOBS_RESET_COMMAND",
        "KICI_AGENT_BETWEEN_JOBS_RESET_RUN_ON",
        "KICI_AGENT_BETWEEN_JOBS_RESET_TIMEOUT_MS",
        "KICI_AGENT_DRAIN_ON_RESET_FAILURE",
        "KICI_AGENT_ORPHAN_CLEANUP",
        "KICI_ALLOW_INSTALL_SCRIPTS",
        "KICI_CONCURRENCY_WAIT_TIMEOUT_MS",
        "KICI_DOCKER_KEEP_FAILED",
        "KICI_HOST_INSTALL_REGISTRIES",
        "KICI_IN_PLACE",
        "KICI_JOB_HEARTBEAT_INTERVAL_MS",
        "KICI_PROPERTIES",
        "KICI_RUNNER_DEBUG_STDIO",
        "KICI_RUNTIME_NODE_SOURCE",
        "KICI_SANDBOX_NETWORK",
    }
)
"""Documented names that mean nothing here.  `KICI_SANDBOX` is not among them: who asks for it must get it."""
OF_OTHER_PROGRAMS: Final = frozenset(
    {"KICI_ADMIN_TOKEN", "KICI_ADMIN_URL", "KICI_CASES", "KICI_CONFIG", "KICI_DATA_DIR", "KICI_TOKEN", "KICI_URL"}
)

SYSTEM_NAMES: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TMPDIR", "TZ")
COMPUTE_MARK: Final = "AGENT_COMPUTE_MARK"
"""Set by the backend that made this agent; the job's processes keep it, so that they can be found by it."""
_NEVER_TO_STEPS: Final = re.compile(r"\A(KICI_(?!EVENT_)|NOTIFY_SOCKET\Z|LISTEN_|INVOCATION_ID\Z|JOURNAL_STREAM\Z)")

_MODES: Final = ("auto", "bare-metal", "container", "firecracker")
_URL: Final = re.compile(r"wss?://[^/\s?#@]+(/[^\s#]*)?\Z")


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine says of itself."""

    system: str
    machine: str
    hostname: str
    cpu_count: int
    memory_mb: int
    user: str
    uid: int
    random_hex8: str
    """For an agent that was given no id."""
    engine: tuple[str, str] | None = None
    """Kind (`docker` or `podman`) and address of a container engine that this agent can use."""


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The containers that this agent makes for jobs."""

    hardened: bool = True
    """All capabilities dropped and no new privileges.  Off for jobs that must change users or owners."""
    pids_max: int = 512
    """Processes and threads of one container, so that a fork bomb stays in it."""
    memory_bytes: int = 2 * 1024**3
    """Limit of jobs that declare none, in bytes: a job with a leak ends, not the host."""
    cpus: float = 2.0
    """Limit of jobs that declare none, in cores; never more than the host has."""
    isolated: bool | None = None
    """Rules of the packet filter.  None, the default: where this agent may set them, since most may not."""
    root_read_only: bool = False
    """The image's files cannot be changed.  Off by default: most jobs install something."""
    user: str | None = None
    """Run jobs as this user of their images; None, the default: as whom the image says."""


class ProgramSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the agent program was told."""

    half: AgentSettings
    """What the protocol half needs."""
    step_env: dict[str, str]
    """What every step gets, before what its job says."""
    tmp: str
    """Where work directories are made."""
    runner_user: str | None = None
    """Run steps as this user; None: as the agent's own."""
    health_port: int | None = None
    """Loopback port of the health pages; None: there are none, which saves most agents a socket."""
    engine: str | None = None
    """Address of the container engine; None: jobs with a container cannot run here."""
    sandbox: SandboxSettings = SandboxSettings()
    """How closed those containers are."""
    inside_job_image: bool = False
    """The agent lives in the image of the one job that it was made for: no other container is needed."""
    inside_vm: bool = False
    """The agent is alone in a microVM: it closes the metadata address before jobs can read it."""
    warnings: tuple[str, ...] = ()
    """What the operator should know, but nothing hangs on."""


class _Reader:
    """Takes values out of an environment and collects what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        """None when absent or empty."""
        return self._environ.get(name, "").strip() or None

    def number(self, name: str, default: int, *, minimum: int = 0, maximum: int = 2**53) -> int:
        text = self.text(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or not minimum <= int(text) <= maximum:
            self.problems.append(f"{name} is {text!r}: a whole number of at least {minimum} is expected")
            return default
        return int(text)

    def flag(self, name: str) -> bool:
        text = self.text(name)
        if text is not None and text not in ("0", "1", "true", "false"):
            self.problems.append(f"{name} is {text!r}: 1, true, 0 or false is expected")
        return text in ("1", "true")

    def switch(self, name: str) -> bool | None:
        """None when absent."""
        return None if self.text(name) is None else self.flag(name)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """The value, or the first choice when absent."""
        text = self.text(name)
        if text is not None and text not in choices:
            self.problems.append(f"{name} is {text!r}: one of {', '.join(choices)} is expected")
        return choices[0] if text is None else text

    def names(self, name: str) -> tuple[str, ...] | None:
        """Comma-separated; None when absent."""
        if name not in self._environ:
            return None
        return canonical(part for part in self._environ[name].split(",") if part.strip())


def read_settings(environ: Mapping[str, str], host: HostFacts, *, version: str) -> ProgramSettings:
    """Raises `Misconfigured` with every problem, a line each."""
    reader = _Reader(environ)
    warnings = _check_names(environ, reader)
    scaler_managed = reader.flag("KICI_SCALER_MANAGED")
    half = _read_half(reader, host, scaler_managed=scaler_managed, version=version)
    settings = ProgramSettings(
        half=half,
        step_env=_step_env(environ, everything=reader.flag("KICI_TRUSTED_ENV") or reader.flag("KICI_JOB_IMAGE_AGENT")),
        tmp=environ.get("TMPDIR") or "/tmp",  # noqa: S108 (only a private directory in it is used)
        runner_user=reader.text("KICI_RUNNER_USER"),
        health_port=reader.number("KICI_PORT", 0, maximum=65535) or None,
        engine=None if host.engine is None else host.engine[1],
        sandbox=_read_sandbox(reader),
        inside_job_image=reader.flag("KICI_JOB_IMAGE_AGENT"),
        inside_vm=reader.choice("KICI_EXECUTION_MODE", _MODES) == "firecracker",
        warnings=tuple(warnings),
    )
    if reader.flag("KICI_SANDBOX"):
        reader.problems.append("KICI_SANDBOX is not supported: run steps in containers or microVMs instead")
    if reader.problems:
        raise Misconfigured("\n".join(reader.problems))
    return settings


def _read_sandbox(reader: _Reader) -> SandboxSettings:
    usual = SandboxSettings()
    return SandboxSettings(
        hardened=reader.switch("KICI_SANDBOX_HARDENED") is not False,
        pids_max=reader.number("KICI_SANDBOX_PIDS_LIMIT", usual.pids_max, minimum=8, maximum=2**22),
        memory_bytes=reader.number("KICI_SANDBOX_MEMORY_BYTES", usual.memory_bytes, minimum=SANDBOX_MEMORY_BYTES_MIN),
        cpus=reader.number("KICI_SANDBOX_NANO_CPUS", round(usual.cpus * 1e9), minimum=10_000_000) / 1e9,
        isolated=reader.switch("KICI_SANDBOX_NETWORK_ISOLATION"),
        root_read_only=reader.switch("KICI_SANDBOX_READONLY_ROOTFS") is True,
        user=reader.text("KICI_SANDBOX_USER"),
    )


def _check_names(environ: Mapping[str, str], reader: _Reader) -> list[str]:
    known = OURS | WITHOUT_EFFECT | OF_OTHER_PROGRAMS | {"KICI_SANDBOX"}
    warnings = []
    for name in sorted(environ):
        if not name.startswith("KICI_") or name in known:
            if name in WITHOUT_EFFECT:
                warnings.append(f"{name} has no effect here")
            continue
        text = f"{name} is not a setting of the agent{_suggestion(name)}"
        if environ.get("KICI_DEV") == "true":
            warnings.append(text)
        else:
            reader.problems.append(text)
    return warnings


def _suggestion(name: str) -> str:
    from difflib import get_close_matches  # costs more than the rest of this module, and almost never runs

    near = get_close_matches(name, sorted(OURS), n=1)
    return f": did you mean {near[0]}?" if near else ""


def _read_half(reader: _Reader, host: HostFacts, *, scaler_managed: bool, version: str) -> AgentSettings:
    url = reader.text("KICI_ORCHESTRATOR_URL")
    if url is None:
        reader.problems.append("KICI_ORCHESTRATOR_URL is missing: give the coordinator, such as ws://127.0.0.1:4000/ws")
    elif not _URL.match(url):
        reader.problems.append(f"KICI_ORCHESTRATOR_URL is {url!r}: ws://host:port/ws or wss://host/ws is expected")
    labels = reader.names("KICI_LABELS") or ()
    reserved = [label for label in labels if is_reserved(label)]
    if reserved and not scaler_managed:
        reader.problems.append(f"KICI_LABELS holds {reserved[0]!r}: labels that start with kici: are reserved")
    self_labels = [*os_arch_labels(_os(host.system), host.machine), f"kici:host:{host.hostname}"]
    if host.engine is not None:
        self_labels += [f"kici:runtime:{host.engine[0]}", "kici:runtime:container-build"]
    roles = () if scaler_managed else role_labels(reader.names("KICI_ROLES"))
    orphan_ms = reader.number("KICI_AGENT_ORPHAN_TIMEOUT_MS", ORPHAN_TIMEOUT_MS if scaler_managed else 0)
    return AgentSettings(
        url=url or "",
        register=AgentRegister(
            agent_id=reader.text("KICI_AGENT_ID") or f"{host.hostname}-{host.random_hex8}",
            labels=list(canonical([*labels, *roles, *self_labels])),
            platform=_os(host.system),
            arch={"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(host.machine.lower(), host.machine),
            version=version,
            hostname=host.hostname,
            cpu_count=host.cpu_count,
            total_memory_mb=host.memory_mb,
            running_as_user=host.user,
            running_as_uid=host.uid,
            scaler_managed=scaler_managed,
        ),
        self_labels=canonical(self_labels),
        token=reader.text("KICI_AGENT_TOKEN"),
        claim_code=reader.text("KICI_SCALER_CLAIM_CODE"),
        patience=Patience(
            idle_seconds=reader.number("KICI_SCALER_IDLE_TIMEOUT", 5000) / 1000,
            pending_dispatch_seconds=reader.number("KICI_SCALER_PENDING_DISPATCH_TIMEOUT", 60_000) / 1000,
        ),
        orphan_seconds=orphan_ms / 1000 if orphan_ms else None,
        step_timeout_ms=reader.number("KICI_DEFAULT_STEP_TIMEOUT_MS", 1_800_000, minimum=1),
        log_bytes_max=reader.number("KICI_MAX_LOG_SIZE_BYTES", 10 * 1024 * 1024),
        drops_output=reader.choice("KICI_BACKPRESSURE_MODE", ("pause", "drop")) == "drop",
    )


def _step_env(environ: Mapping[str, str], *, everything: bool) -> dict[str, str]:
    """The part of the agent's environment that steps see.

    Everything in trusted mode and in a job's own image (whose `ENV` lines the job counts on), never a name of ours.
    """
    return {
        name: value
        for name, value in environ.items()
        if (everything or name in SYSTEM_NAMES or name == COMPUTE_MARK) and may_reach_steps(name)
    }


def may_reach_steps(name: str) -> bool:
    """Whether a step may have a variable of this name, wherever it comes from."""
    return name != "" and "=" not in name and _NEVER_TO_STEPS.match(name) is None


def _os(system: str) -> str:
    return {"darwin": "macos", "win32": "windows"}.get(system, system)
