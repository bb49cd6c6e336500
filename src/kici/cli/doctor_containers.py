"""What `kici doctor` looks at for scalers of containers: the engine, the packet filter, the way back to us."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kici.adapters.disk import free_bytes
from kici.adapters.docker_engine import DockerEngine
from kici.adapters.nft import Nft
from kici.agent.host import find_engine
from kici.apps.containers import NFT_BY_SUDO, find_for
from kici.backends.container.factory import socket_warnings
from kici.backends.container.images import ALWAYS, NEVER
from kici.cli.doctor_checks import Found, Grade, Machine
from kici.config.model import ScalerEntry
from kici.decide.agent_env import agent_environment
from kici.decide.disk import is_short, size
from kici.domain.errors import KiciError
from kici.ports.engine import EngineAddress, EngineKind

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def containers(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    name = f"scaler {entry.name}"
    yield from (Found(Grade.NOTE, name, warning) for warning in socket_warnings(entry))
    try:
        address = find_for(entry, machine.environ)
        yield Found(Grade.OK, name, asyncio.run(_engine(address)))
        yield from asyncio.run(_provisions(address, entry))
    except KiciError as error:
        yield Found(Grade.FAIL, name, str(error))
    if entry.network_isolation:
        yield _isolation(entry, asyncio.run(Nft(NFT_BY_SUDO if entry.require_sudo else ("nft",)).problem()))
    if entry.orchestrator_url is None and machine.settings.host in LOOPBACK:
        why = (
            f"agents in containers cannot reach a coordinator that listens on {machine.settings.host} only; "
            "use --host 0.0.0.0 (agents are authenticated), or give the scaler an orchestratorUrl"
        )
        yield Found(Grade.FAIL, name, why)


def _isolation(entry: ScalerEntry, problem: str | None) -> Found:
    name = f"scaler {entry.name}"
    if entry.host is not None:
        return Found(Grade.FAIL, name, "agents on another machine cannot be isolated; set networkIsolation: false")
    if problem is not None:
        return Found(Grade.FAIL, name, problem)
    return Found(Grade.OK, name, "agents can be isolated by the packet filter")


def job_containers(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    """What process agents of this entry could do for jobs with a container.  They need not."""
    name = f"scaler {entry.name}, containers of jobs"
    windows = sys.platform == "win32"
    found = {
        find_engine(agent_environment(machine.environ, told={}, label_set=label_set.env, windows=windows))
        for label_set in entry.label_sets
    }
    for engine in sorted(found, key=str):
        if engine is None:
            yield Found(Grade.NOTE, name, "such jobs fail here: no engine that this user may use")
            continue
        kind, url = engine
        address = EngineAddress(url=url, kind=EngineKind(kind), is_local=url.startswith("unix://"))
        try:
            yield Found(Grade.OK, name, f"they can be made: {asyncio.run(_engine(address))}")
        except KiciError as error:
            yield Found(Grade.NOTE, name, f"such jobs fail here: {error}")


async def _provisions(address: EngineAddress, entry: ScalerEntry) -> list[Found]:
    """What the engine needs to make agents: space, and images."""
    name = f"scaler {entry.name}"
    engine = DockerEngine(address)
    try:
        found = [] if not address.is_local else [_space(name, await engine.folder())]
        for label_set in entry.label_sets:
            image, policy = label_set.image or "", label_set.image_pull_policy.value
            if policy != ALWAYS and await engine.image(image) is None:
                found.append(
                    Found(Grade.FAIL, name, f"image {image} is not on the engine, and imagePullPolicy is Never")
                    if policy == NEVER
                    else Found(
                        Grade.NOTE, name, f"image {image} is not on the engine; its first agent waits for the pull"
                    )
                )
    finally:
        await engine.close()
    return [each for each in found if each is not None]


def _space(name: str, folder: str | None) -> Found | None:
    if folder is None:
        return None
    free = free_bytes(Path(folder))
    if is_short(free):
        cure = "no agents are made until there is more (`docker system prune` removes what no container uses)"
        return Found(Grade.FAIL, name, f"only {size(free)} are free for the engine in {folder}; {cure}")
    return Found(Grade.OK, name, f"{size(free)} are free for the engine in {folder}")


async def _engine(address: EngineAddress) -> str:
    engine = DockerEngine(address)
    try:
        info = await engine.info()
    finally:
        await engine.close()
    return f"{address.kind.value} {info.version} answers at {address.url}"
