"""What `scalers.yaml` says, once it is read: the nouns that everything else works with.

Names are those of the file in snake case.  Each field's annotation carries the rule for its value, each field's
docstring its unit, the meaning of none, and why the default is what it is; the reader, the reference page and the
JSON schema are all made from these.  A `ScalersConfig` that came out of `kici.config.load` obeys every rule of
`kici.config.rules` as well; one that is built by hand (in tests) obeys what its author made it obey.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, Final

from kici.config import grammar
from kici.config.grammar import ExtraHost, HostAccess
from kici.config.kinds import Exactly, For, Items, Key, Number, Stated, Text, Whole
from kici.domain.ids import ScalerName
from kici.domain.labels import canonical
from kici.domain.platform import Platform
from kici.domain.resources import MEMORY_GRAMMAR, UNDECLARED, Amount, ResourceRequest


class BackendType(StrEnum):
    """What a scaler makes agents of."""

    CONTAINER = "container"
    BARE_METAL = "bare-metal"
    FIRECRACKER = "firecracker"
    EVENT = "event"


class Runtime(StrEnum):
    """Container engines; `auto` takes the first whose socket answers."""

    AUTO = "auto"
    DOCKER = "docker"
    PODMAN = "podman"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Backpressure(StrEnum):
    """What an agent does when its output is not taken fast enough: wait, or lose some."""

    PAUSE = "pause"
    DROP = "drop"


class Vmm(StrEnum):
    """The program that runs a microVM."""

    FIRECRACKER = "firecracker"
    QEMU = "qemu"


class Accel(StrEnum):
    """How a microVM's processor is made: by the kernel, by emulation, or the better one that works."""

    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


class RoleName(StrEnum):
    """Internal jobs that agents of a scaler take besides ordinary ones."""

    BUILDER = "builder"
    INIT_RUNNER = "init-runner"
    ALL = "all"


def _without_all(roles: tuple[RoleName, ...]) -> tuple[RoleName, ...] | None:
    """A list that contains `all` means the same as no list."""
    return None if RoleName.ALL in roles else tuple(dict.fromkeys(roles))


MEMORY_PATTERN: Final = r"^\s*[0-9]+(\.[0-9]+)?\s*[kKmMgG][iI]?\s*$"
MIB: Final = 1024 * 1024
_BRIDGE_CIDR: Final = IPv4Network("10.0.0.0/24")
_CONTAINER: Final = For(("container",))
_BARE_METAL: Final = For(("bare-metal",))
_MICROVM: Final = For(("firecracker",))
_EVENT: Final = For(("event",))
_IN_CONTAINERS: Final = For(("container", "bare-metal"))
_LOCAL: Final = For(("container", "bare-metal", "firecracker"))

Count = Annotated[int, Whole(minimum=1)]
Words = Annotated[str, Text("text", grammar.text)]
FilePath = Annotated[str, Text("a path", grammar.text)]
Label = Annotated[str, Text("a label", grammar.label, pattern="^(?!\\s*[kK][iI][cC][iI]:)[^,]*$")]
Memory = Annotated[int, Text(f"memory: {MEMORY_GRAMMAR}", grammar.memory_bytes, pattern=MEMORY_PATTERN, blank=1)]
Address = Annotated[IPv4Address, Text("an IPv4 address", grammar.address)]
Network = Annotated[IPv4Network, Text("an IPv4 network such as 10.0.0.0/24", grammar.network)]
HostAccessEntry = Annotated[
    HostAccess,
    Text("a port, an address, or <address, network or *>:<port or *>", grammar.host_access, numbers=True),
]
Seconds = Annotated[float, Number(minimum=0, unit="seconds")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A ceiling over the *requests* of agents.  A dimension of None is not capped."""

    max_cpu: Annotated[float, Number(above=0, unit="cpus")] | None = None
    """Cpus, fractions allowed.  None: no ceiling.  No default, as no machine is like another."""
    max_memory_bytes: Annotated[Memory | None, Key("maxMemory")] = None
    """Memory, written like `64g` or `64Gi`.  None: no ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePool:
    """A ceiling shared by every orchestrator process of one host that names the same pool."""

    name: Annotated[str, Text("a pool name", grammar.pool_name, pattern="^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
    """Also the name of the ledger file on the host, hence few characters."""
    cap: Cap
    """What all agents of the pool may request together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What label sets inherit."""

    resources: ResourceRequest = UNDECLARED
    """The weakest layer: used for each field that neither the job nor the label set declares.  None: undeclared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerNetwork:
    """The bridge of this host's microVMs; all firecracker scalers share it."""

    cidr: Network = _BRIDGE_CIDR
    """Addresses of the bridge and its microVMs."""
    bridge_name: Annotated[str, Text("a network interface name", grammar.interface)] = "kici-br0"
    """The bridge.  Two orchestrators on one host need two names."""
    gateway: Address | None = None
    """Address of the host on the bridge.  None: the first one of `cidr`."""
    netmask: Annotated[IPv4Address, Text("a netmask such as 255.255.255.0", grammar.netmask)] | None = None
    """Mask given to guests.  None: the one of `cidr`."""
    table: Annotated[str, Text("an nftables table name", grammar.nft_table)] = "kici"
    """The nftables table of this bridge's rules.  A table shared by two bridges loses the rules of one."""
    auto_provision_host: bool = True
    """Make and mend the bridge at start.  False: an operator does (`kici-admin firecracker provision`)."""

    @property
    def gateway_address(self) -> IPv4Address:
        return self.cidr.network_address + 1 if self.gateway is None else self.gateway

    @property
    def guest_netmask(self) -> IPv4Address:
        return self.cidr.netmask if self.netmask is None else self.netmask


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPool:
    """Idle agents kept ready, for each label set of the scaler."""

    enabled: bool = False
    """Off by default: an idle agent costs what a busy one does."""
    size: Annotated[int, Whole(minimum=0)] = 0
    """Agents for each label set and orchestrator.  0 lets all go once they idled long enough."""
    idle_timeout_seconds: Seconds = 300.0
    """Seconds after which an idle agent *above* `size` goes; those within `size` stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Leave to run more than one job in one agent: faster, and the next job sees what the last one left."""

    idle_seconds: Annotated[float, Number(above=0, unit="seconds")] = 60.0
    """Seconds an agent waits for a further job before it goes."""
    max_jobs: Count | None = None
    """Jobs after which an agent goes in any case.  None: no such limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicy:
    """What the agents of a label set may reach; enforced by packet filter rules on this host."""

    allowlist: tuple[Network, ...] = ()
    """Networks that stay reachable although private networks and metadata services are not."""
    deny_all: bool = False
    """Let nothing out but `allowlist`.  False: the internet is open, private networks are not."""
    host_access: tuple[HostAccessEntry, ...] | None = None
    """What may be reached on the host itself.  None: name service and the orchestrator; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """One kind of agent that a scaler makes: what it offers, and how it is made."""

    labels: Annotated[tuple[Label, ...], Items(minimum=1, then=canonical)]
    """What jobs ask for; any of them may be asked.  Lower case, trimmed, in the order of the file."""
    image: Annotated[Annotated[str, Text("an image reference", grammar.image)] | None, _IN_CONTAINERS] = None
    """container: the agent's image, required.  bare-metal: alone, agents live in the job's own image;
    with `binaryPath`, where nested job containers get their runtime from."""
    image_pull_policy: Annotated[PullPolicy, _IN_CONTAINERS] = PullPolicy.IF_NOT_PRESENT
    """When `image` is pulled.  A job's own image has its own rule."""
    binary_path: Annotated[FilePath | None, _BARE_METAL] = None
    """The agent program.  A name without a slash is the program of this installation."""
    resources: ResourceRequest = UNDECLARED
    """What an agent requests (billed against caps) and is limited to (enforced).  None: see `defaults`."""
    volumes: Annotated[
        tuple[Annotated[str, Text("a bind mount <source>:<target>[:<options>]", grammar.volume)], ...], _CONTAINER
    ] = ()
    """Bind mounts."""
    container_socket: Annotated[bool, _CONTAINER] = False
    """Mount the engine's own socket.  Off by default: whoever has it is root on the host."""
    env: Annotated[Mapping[str, str], _LOCAL] = field(default_factory=dict)
    """Variables of the agent; they win over all others."""
    backpressure_mode: Annotated[Backpressure | None, _LOCAL] = None
    """What agents do when output is not taken fast enough.  None: the agent's own default, pause."""
    network_policy: Annotated[NetworkPolicy, _LOCAL] = NetworkPolicy()
    """What agents may reach.  Has no effect on plain host processes."""
    rootfs_path: Annotated[FilePath | None, _MICROVM] = None
    """Root file system image of the guest; required."""
    kernel_path: Annotated[FilePath | None, _MICROVM] = None
    """Kernel of the guest.  None: the scaler's."""
    vcpu_count: Annotated[Count | None, _MICROVM] = None
    """Processors where no layer of resources declares cpus.  None: the scaler's."""
    mem_size_mib: Annotated[Count | None, _MICROVM] = None
    """MiB of memory where no layer of resources declares any.  None: the scaler's."""
    overlay_drive_size_mib: Annotated[Count, _MICROVM] = 2048
    """MiB of the drive that takes what the guest writes."""
    snapshot_start: Annotated[bool, _MICROVM] = False
    """Start guests from a snapshot of one that was warmed up, where that can be made safe; else they boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerEntry:
    """One scaler: a maker of agents of one type."""

    name: Annotated[ScalerName, Text("a name", grammar.scaler_name)]
    """What people and jobs call it (`kici:scaler:<name>`); unique whatever its case."""
    type: BackendType
    """What agents are made of.  A reload cannot change it."""
    max_agents: Count
    """Agents at most, on this orchestrator; for event scalers: in the whole cluster."""
    max_concurrent_spawns: Count = 8
    """Agents being started at one time; keeps a burst of jobs from burying the host."""
    label_sets: Annotated[tuple[LabelSet, ...], Items(minimum=1)]
    """The kinds of agents it makes; at least one."""
    host: Annotated[
        Annotated[str, Text("the URL of a container engine", grammar.engine_url, pattern="^(tcp|https?)://")] | None,
        _CONTAINER,
    ] = None
    """A remote engine, such as `tcp://192.168.1.10:2376`.  None: a local one."""
    socket_path: Annotated[FilePath | None, _CONTAINER] = None
    """Socket of the local engine.  None: the usual places are tried."""
    runtime: Annotated[Runtime, _CONTAINER] = Runtime.AUTO
    """Whose sockets are tried."""
    orchestrator_url: (
        Annotated[str, Text("a WebSocket URL such as ws://10.0.0.1:4000/ws", grammar.websocket_url, pattern="^wss?://")]
        | None
    ) = None
    """Where agents connect to.  None: the orchestrator's own setting."""
    extra_hosts: Annotated[
        tuple[Annotated[ExtraHost, Text("<name>:<address or host-gateway>", grammar.extra_host)], ...], _LOCAL
    ] = ()
    """Further names that agents can resolve."""
    network_isolation: Annotated[bool, _CONTAINER] = True
    """Own network and packet filter for agents.  False: the engine's default network, unfiltered."""
    warm_pool: WarmPool = WarmPool()
    """Idle agents kept ready.  Off by default."""
    mandatory_labels: Annotated[tuple[Label, ...], Items(then=canonical)] = ()
    """Labels that a job must name to come here at all; each set has to offer them."""
    platform: Platform | None = None
    """Operating system and processor of the agents.  None: bare-metal, this host's; others, Linux."""
    roles: Annotated[tuple[RoleName, ...], Items(then=_without_all)] | None = None
    """Internal jobs that agents take.  None (or a list with `all`): every kind; an empty list: none."""
    resource_cap: Cap = Cap()
    """Ceiling over the requests of this scaler's agents."""
    machine_pool: Words | None = None
    """A pool of `machinePools` that its agents are billed to.  None: none."""
    enforce_cgroups: Annotated[bool, _BARE_METAL] = False
    """Run agents in transient systemd scopes with their limits.  Linux only; off as it needs a user manager."""
    vmm: Annotated[Vmm, _MICROVM] = Vmm.FIRECRACKER
    """The program that runs the microVMs.  `qemu` needs no jailer, and no KVM with `accel: tcg`."""
    accel: Annotated[Accel, _MICROVM] = Accel.AUTO
    """How `qemu` runs the guest's processor.  `auto`: KVM where it works, else emulation."""
    firecracker_path: Annotated[FilePath | None, _MICROVM] = None
    """The firecracker program, its file name exactly `firecracker`; required with `vmm: firecracker`."""
    jailer_path: Annotated[FilePath | None, _MICROVM] = None
    """The jailer program; required with `vmm: firecracker`."""
    kernel_path: Annotated[FilePath | None, _MICROVM] = None
    """Kernel of the guests; required."""
    chroot_base_dir: Annotated[FilePath, _MICROVM] = "/srv/jailer"
    """Where the directories of running microVMs are made."""
    uid: Annotated[Annotated[int, Whole(minimum=0)] | None, _MICROVM] = None
    """User that the jailer becomes; required with `vmm: firecracker`."""
    gid: Annotated[Annotated[int, Whole(minimum=0)] | None, _MICROVM] = None
    """Group that the jailer becomes; required with `vmm: firecracker`."""
    vcpu_count: Annotated[Count, _MICROVM] = 2
    """Processors of a microVM for which no layer of resources declares cpus."""
    mem_size_mib: Annotated[Count, _MICROVM] = 512
    """MiB of a microVM for which no layer of resources declares memory.  Boots an agent; most jobs need 2048."""
    require_sudo: Annotated[bool, For(("bare-metal", "firecracker"))] = False
    """Prefix host commands with `sudo -n`.  Leave it off for an orchestrator that is privileged itself."""
    provisioning_targets: Annotated[tuple[Words, ...], _EVENT] = ()
    """Workflows or webhooks that make the machines; at least one for an event scaler."""
    claim_ttl_seconds: Annotated[Count, _EVENT] = 300
    """Seconds in which a new machine may redeem its claim code."""
    agent_token_ttl_seconds: Annotated[Count, _EVENT] = 600
    """Seconds in which the token from a claim admits the agent for the first time."""
    reuse: Reuse | None = None
    """Leave to run further jobs in one agent.  None: one job for each agent, the clean default."""

    def vm_size(self, label_set: LabelSet, limits: Amount) -> tuple[int, int]:
        """Processors and MiB of a microVM of this set whose limits resolved to `limits`."""
        vcpus = math.ceil(limits.cpus) or label_set.vcpu_count or self.vcpu_count
        mib = limits.memory_bytes // MIB or label_set.mem_size_mib or self.mem_size_mib
        return vcpus, mib

    @property
    def role_names(self) -> tuple[str, ...] | None:
        """For `kici.domain.labels.role_labels`: None means all roles."""
        return None if self.roles is None else tuple(role.value for role in self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalersConfig:
    """The whole file, with what `scalers.d` adds."""

    version: Annotated[int, Exactly(1), Stated()] = 1
    """Of the format; required, and always 1."""
    global_max_agents: Count = 50
    """Agents at most on this orchestrator, over all its scalers."""
    defaults: Defaults = Defaults()
    """What label sets inherit."""
    global_resource_cap: Cap = Cap()
    """Ceiling over the requests of all agents of this orchestrator."""
    machine_pools: tuple[MachinePool, ...] = ()
    """Ceilings shared with other orchestrator processes of this host."""
    firecracker: FirecrackerNetwork = FirecrackerNetwork()
    """The bridge of this host's microVMs."""
    scalers: tuple[ScalerEntry, ...] = ()
    """The scalers, in the order of the file, then of the files of the directory.

    The key may be left out where a directory supplies some.  An empty list scales nothing.
    """

    def scaler(self, name: str) -> ScalerEntry | None:
        return next((entry for entry in self.scalers if entry.name == name), None)

    def machine_pool(self, name: str) -> MachinePool | None:
        return next((pool for pool in self.machine_pools if pool.name == name), None)
