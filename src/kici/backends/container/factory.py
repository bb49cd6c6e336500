"""From a configuration entry to a backend."""

from kici.backends.container.backend import ContainerBackend, ContainerSettings
from kici.backends.container.house import ContainerTools, Houses
from kici.config.model import BackendType, LabelSet, ScalerEntry
from kici.decide.container_plan import ContainerSet
from kici.decide.isolate import Policy
from kici.domain.errors import Misconfigured
from kici.ports.backend import OnExit
from kici.ports.engine import FindEngine


def makes_containers(entry: ScalerEntry) -> bool:
    """Whether the agents of this entry are containers.

    Those of a bare-metal entry are where its sets name an image and no program.  Raises `Misconfigured` for an entry
    with both kinds: its agents would share a cap and nothing else.
    """
    if entry.type is not BackendType.BARE_METAL:
        return entry.type is BackendType.CONTAINER
    kinds = {label_set.binary_path is None and label_set.image is not None for label_set in entry.label_sets}
    if len(kinds) > 1:
        raise Misconfigured(
            f"scaler {entry.name}: some of its label sets are containers (image without binaryPath) and some are "
            "processes; make two scalers of it"
        )
    return kinds == {True}


def settings_of(entry: ScalerEntry, owner: str) -> ContainerSettings:
    return ContainerSettings(
        scaler=entry.name,
        type=entry.type.value,
        owner=owner,
        max_agents=entry.max_agents,
        sets=tuple(container_set(label_set) for label_set in entry.label_sets),
        is_isolated=entry.network_isolation,
        extra_hosts=tuple(map(str, entry.extra_hosts)),
        is_local=entry.host is None,
    )


def container_set(label_set: LabelSet) -> ContainerSet:
    assert label_set.image is not None, "the configuration's rules demand an image"
    mode, policy = label_set.backpressure_mode, label_set.network_policy
    return ContainerSet(
        labels=label_set.labels,
        image=label_set.image,
        pull_policy=label_set.image_pull_policy.value,
        env=label_set.env,
        backpressure_mode=None if mode is None else mode.value,
        volumes=label_set.volumes,
        container_socket=label_set.container_socket,
        policy=Policy(allowlist=policy.allowlist, deny_all=policy.deny_all, host_access=policy.host_access),
    )


def make_backend(
    entry: ScalerEntry, *, owner: str, find_engine: FindEngine, houses: Houses, tools: ContainerTools, on_exit: OnExit
) -> ContainerBackend:
    settings = settings_of(entry, owner)
    return ContainerBackend(settings=settings, find_engine=find_engine, houses=houses, tools=tools, on_exit=on_exit)


def socket_warnings(entry: ScalerEntry) -> list[str]:
    """What an operator should know of sets that hand the engine to their jobs: a sentence each."""
    return [
        f"scaler {entry.name}, label set [{', '.join(label_set.labels)}]: containerSocket gives its jobs the container "
        "engine, and whoever has that is root on this host"
        for label_set in entry.label_sets
        if label_set.container_socket
    ]
