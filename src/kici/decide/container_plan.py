"""What an agent's container is made of: name, labels, environment, mounts, limits.

Pure: the engine, the network and the runtime to be injected are inputs.  The token is not among what is decided here,
since everything decided here can be read back from the engine by whoever may ask it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from kici.decide.agent_env import forwarded
from kici.decide.isolate import DEFAULT_POLICY, Policy
from kici.domain.container import ContainerFile, ContainerSpec
from kici.domain.ids import AgentId, Instant, JobId, RunId, ScalerName
from kici.domain.resources import NOTHING, Amount

MANAGED: Final = "kici-managed"
OWNER: Final = "kici-owner"
"""Label: the installation that made it.  The name of a scaler is no proof where several share an engine."""
SCALER: Final = "kici-scaler-name"
AGENT: Final = "kici-agent-id"
LABELS: Final = "kici-labels"
LABEL_SET: Final = "kici-label-set"
JOB: Final = "kici-bound-job-id"
RUN: Final = "kici-run-id"
SPAWNED_AT: Final = "kici-spawned-at"
CARRIES_AGENT: Final = "kici-agent"
"""Label of an image; `own`: it carries an agent program and starts it, nothing is injected."""

AGENT_PLACE: Final = ".kici"
"""Folder in a container that is the agent's, below the root."""
TOKEN_FILE: Final = "/dev/stdin"
"""Where an agent in a container finds its token: given to it when it starts, in no file and no variable."""
RUNTIME_PLACE: Final = "/opt/kici"
HOST_NAME: Final = "host.docker.internal"
"""The engine's host by the name that containers know it by, where they are not isolated."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSet:
    """What one label set says about its agents' containers."""

    labels: tuple[str, ...]
    image: str
    pull_policy: str = "IfNotPresent"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    backpressure_mode: str | None = None
    volumes: tuple[str, ...] = ()
    container_socket: bool = False
    policy: Policy = DEFAULT_POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """One agent to be made."""

    agent_id: AgentId
    scaler: ScalerName
    owner: str
    label_set: tuple[str, ...]
    labels: tuple[str, ...]
    url: str
    spawned_at: Instant
    limits: Amount = NOTHING
    job_image: str | None = None
    job_id: JobId | None = None
    run_id: RunId | None = None
    has_token: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """The runtime that makes an agent of any image."""

    volume: str
    entrypoint: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The engine and the host on which the container will live."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The coordinator's own."""
    network: str | None = None
    extra_hosts: tuple[str, ...] = ()
    socket: str | None = None
    """The engine's own; None: it is on another machine."""
    injected: Injected | None = None
    """None: the image carries its agent."""


def plan_container(chosen: ContainerSet, order: AgentOrder, around: Surroundings) -> ContainerSpec:
    """The container of one agent."""
    injected = around.injected
    return ContainerSpec(
        name=order.agent_id,
        image=chosen.image if order.job_image is None else order.job_image,
        entrypoint=None if injected is None else injected.entrypoint,
        env=_environment(chosen, order, around),
        labels=labels_of(order),
        working_dir=work_folder(order.agent_id),
        binds=_binds(chosen, around),
        network=around.network,
        extra_hosts=around.extra_hosts,
        limits=order.limits,
        reads_input=order.has_token,
    )


def owned_by(owner: str, scaler: ScalerName, agent_id: AgentId | None = None) -> dict[str, str]:
    """Labels that find the containers of one installation's scaler, or of one agent of it."""
    which = {} if agent_id is None else {AGENT: agent_id}
    return {MANAGED: "true", OWNER: owner, SCALER: scaler, **which}


def labels_of(order: AgentOrder) -> dict[str, str]:
    told = {
        **owned_by(order.owner, order.scaler, order.agent_id),
        LABELS: ",".join(order.labels),
        LABEL_SET: ",".join(order.label_set),
        SPAWNED_AT: str(order.spawned_at),
        JOB: order.job_id,
        RUN: order.run_id,
    }
    return {name: value for name, value in told.items() if value is not None}


def work_folder(agent_id: AgentId) -> str:
    """Where an agent works in its container; it takes a folder of its own name for one that was made for it."""
    return f"/{AGENT_PLACE}/{agent_id}"


def token_input(token: str | None) -> bytes:
    """The standard input of an agent in a container."""
    return b"" if token is None else f"{token}\n".encode()


def agent_folder(agent_id: AgentId, *, uid: int, gid: int) -> tuple[ContainerFile, ...]:
    """What is put into the container of an agent that is not root: the folder where it works, as its own.

    For root the engine makes it, as it makes every working directory.
    """
    folder = work_folder(agent_id).removeprefix("/")
    return (
        ContainerFile(path=AGENT_PLACE, mode=0o755),
        ContainerFile(path=folder, mode=0o700, uid=uid, gid=gid),
    )


def may_connect_late(order: AgentOrder, around: Surroundings) -> bool:
    """Whether an agent's container may run for a while before it has a network.

    Our own agent opens no connection before it has its token, and loads its modules meanwhile; what another one does
    is not ours to know.
    """
    return order.has_token and around.injected is not None and around.network is not None


def user_ids(user: str, passwd: str) -> tuple[int, int] | None:
    """The numbers of an image's user, given its `/etc/passwd`.  None: no such user there."""
    name, _, group = user.partition(":")
    if not name:
        return 0, 0
    number = int(name) if name.isascii() and name.isdigit() else None
    gid = int(group) if group.isascii() and group.isdigit() else None
    for line in passwd.splitlines():
        words = line.split(":")
        if len(words) >= 4 and (words[0] == name or (number is not None and words[2] == str(number))):
            return int(words[2]), int(words[3]) if gid is None else gid
    return None if number is None else (number, gid or 0)


def is_loopback(url: str) -> bool:
    """Whether a coordinator's address means this host to whoever is on this host, and nothing to a container."""
    return urlsplit(url).hostname in _LOOPBACK


def reached_at(url: str, host: str) -> str:
    """The same coordinator by another name of its host."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return parts._replace(netloc=f"{host}{port}").geturl()


def _environment(chosen: ContainerSet, order: AgentOrder, around: Surroundings) -> dict[str, str]:
    """Later ones win: what we tell the agent, what the operator forwards to all agents, what the label set says."""
    told = {
        "KICI_ORCHESTRATOR_URL": order.url,
        "KICI_AGENT_ID": order.agent_id,
        "KICI_LABELS": ",".join(order.labels),
        "KICI_SCALER_MANAGED": "1",
        "KICI_EXECUTION_MODE": "bare-metal",
        "KICI_RUNTIME_IMAGE": chosen.image,
        "KICI_AGENT_TOKEN_FILE": TOKEN_FILE if order.has_token else None,
        "KICI_BACKPRESSURE_MODE": chosen.backpressure_mode,
        "KICI_JOB_IMAGE_AGENT": "1" if order.job_image is not None else None,
    }
    known = {name: value for name, value in told.items() if value is not None}
    return {**known, **forwarded(around.environment), **chosen.env}


def _binds(chosen: ContainerSet, around: Surroundings) -> tuple[str, ...]:
    binds: Sequence[str] = chosen.volumes
    if chosen.container_socket and around.socket is not None:
        binds = (*binds, f"{around.socket}:{around.socket}")
    if around.injected is not None:
        binds = (*binds, f"{around.injected.volume}:{RUNTIME_PLACE}:ro")
    return tuple(binds)
