"""Docker, or whoever speaks its language, over its HTTP interface.

The only module that knows aiodocker: its exceptions and its dictionaries end here.  It is imported when the first
container scaler is made, so that nobody else pays for it.
"""

import asyncio
import io
import json
import re
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import PurePosixPath
from typing import IO, Any, Final

import aiodocker
import aiohttp
from aiodocker.exceptions import DockerError

from kici.domain.container import ContainerFile, ContainerSpec, NetworkSpec, RegistryAuth, registry_of, with_tag
from kici.domain.errors import Conflict, KiciError, NotFound, Retryable
from kici.ports.engine import (
    ContainerInfo,
    EngineAddress,
    EngineDown,
    EngineEvent,
    EngineInfo,
    EngineRefused,
    ImageInfo,
    ImageRefused,
    OnProgress,
    Ready,
)

CALL_SECONDS: Final = 30.0
SLOW_CALL_SECONDS: Final = 120.0
PULL_SILENCE_SECONDS: Final = 120.0
"""A pull that says nothing for so long has failed."""
OPENING_SECONDS: Final = 10.0
EVENTS_BACK_SECONDS: Final = 1.0
BRIDGE: Final = "com.docker.network.bridge.name"
BETWEEN_MEMBERS: Final = "com.docker.network.bridge.enable_icc"
MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_NO_ANSWER: Final = 900
"""Status from which on aiodocker means that there was none."""
_aio: Final[Any] = aiodocker
_DENIED: Final = re.compile(
    r"unauthorized|authentication required|no basic auth|denied|forbidden|incorrect username|40[13]\b", re.IGNORECASE
)
_ABSENT: Final = re.compile(
    r"manifest unknown|not found|does not exist|no matching manifest|invalid reference|repository name", re.IGNORECASE
)


class _Docker(aiodocker.Docker):
    """Closes what was not read to its end: aiodocker leaves that to the collector, and the engine goes on sending."""

    @asynccontextmanager
    async def _query(self, *args: Any, **kwargs: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        async with super()._query(*args, **kwargs) as response:
            try:
                yield response
            finally:
                response.close()


class DockerEngine:
    """Contract of every call: `ports.engine.Engine`."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        limits = aiohttp.ClientTimeout(total=None, sock_connect=OPENING_SECONDS)
        # Every agent holds a connection for its output: the usual limit of a hundred would be met.
        self._connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0)
            if address.socket is None
            else aiohttp.UnixConnector(address.socket, limit=0, keepalive_timeout=5)
        )
        url = address.url if address.socket is None else "unix://localhost"
        # Half of aiodocker is untyped: what it answers becomes ours in each method.
        self._docker: Any = _Docker(url=url, connector=self._connector, timeout=limits)

    @property
    def address(self) -> EngineAddress:
        return self._address

    async def info(self) -> EngineInfo:
        try:
            async with self._call("ask the engine for its version"):
                told = await self._docker.version()
        except NotFound as error:
            raise self._stranger() from error
        if "ApiVersion" not in told:
            raise self._stranger()
        return EngineInfo(
            version=f"{told.get('Version', '?')} (API {told.get('ApiVersion', '?')})",
            machine=_machine(told.get("Arch", "")),
            system=told.get("Os", ""),
        )

    async def folder(self) -> str | None:
        async with self._call("ask the engine where it keeps its things"):
            told = await self._docker.system.info()
        return told.get("DockerRootDir") or None

    async def image(self, name: str) -> ImageInfo | None:
        try:
            async with self._call(f"look for image {name}"):
                told = await self._docker.images.inspect(with_tag(name))
        except NotFound:
            return None
        config = told.get("Config") or {}
        return ImageInfo(
            id=told["Id"],
            user=config.get("User") or "",
            machine=_machine(told.get("Architecture", "")),
            labels=config.get("Labels") or {},
            env=tuple(config.get("Env") or ()),
        )

    async def pull(self, image: str, auth: RegistryAuth | None, on_progress: OnProgress) -> None:
        name = with_tag(image)
        credentials = None
        if auth is not None:
            credentials = {"username": auth.username, "password": auth.password, "serveraddress": auth.server}
            name = _with_registry(name)
        try:
            with self._translated(f"pull {image}"):
                stream = self._docker.images.pull(name, auth=credentials, stream=True)
                async with asyncio.timeout(None) as silence:
                    async for told in stream:
                        silence.reschedule(asyncio.get_running_loop().time() + PULL_SILENCE_SECONDS)
                        on_progress(_progress(told))
        except EngineDown:
            raise
        except KiciError as error:
            raise _pull_error(image, str(error), auth) from None  # the cause may quote what was sent

    async def create(self, spec: ContainerSpec) -> str:
        async with self._call(f"create container {spec.name}", seconds=SLOW_CALL_SECONDS):
            container = await self._docker.containers.create(create_request(spec), name=spec.name)
        return str(container.id)

    async def put(self, container: str, files: Sequence[ContainerFile]) -> None:
        await self.put_archive(container, "/", archive(files))

    async def put_archive(self, container: str, folder: str, tar: bytes | IO[bytes]) -> None:
        async with self._call(f"put files into container {container}", seconds=SLOW_CALL_SECONDS):
            await self._docker.containers.container(container).put_archive(folder, tar)

    async def read(self, container: str, path: str, *, bytes_max: int) -> bytes | None:
        try:
            async with self._call(f"read {path} of container {container}"):
                tar = await self._docker.containers.container(container).get_archive(path)
        except NotFound:
            return None
        for member in tar.getmembers():
            held = tar.extractfile(member) if member.isfile() else None
            if held is not None:
                return bytes(held.read(bytes_max))
        return None

    async def start(self, container: str, *, given: bytes = b"", ready: Ready | None = None) -> None:
        found = self._docker.containers.container(container)
        async with AsyncExitStack() as held:
            async with self._call(f"start container {container}", seconds=SLOW_CALL_SECONDS):
                # Attached before it runs: its input ends when we are gone, and nobody waits for it in vain.
                attached = await held.enter_async_context(found.attach(stdin=True)) if given else None
                await found.start()
            if ready is not None:
                await ready()
            if attached is not None:
                async with self._call(f"give container {container} its input"):
                    # As aiodocker says that nobody is at the other end: it has ended, which is seen elsewhere.
                    with suppress(AssertionError, ConnectionError):
                        await attached.write_in(given)

    async def inspect(self, container: str) -> ContainerInfo | None:
        assert container, "an empty name would mean all containers"
        try:
            async with self._call(f"inspect container {container}"):
                told = await self._docker.containers.container(container).show()
        except NotFound:
            return None
        state = told["State"]
        has_run = state["Status"] not in ("created", "running", "paused", "restarting")
        return ContainerInfo(
            id=told["Id"],
            name=told["Name"].removeprefix("/"),
            labels=told["Config"].get("Labels") or {},
            is_running=bool(state["Running"]),
            is_paused=bool(state.get("Paused")),
            addresses=_addresses(told.get("NetworkSettings") or {}),
            pid=state.get("Pid") or None,
            exit_code=state.get("ExitCode") if has_run else None,
            oom_killed=bool(state.get("OOMKilled")),
            error=state.get("Error") or "",
        )

    async def containers(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        async with self._call("list containers"):
            found = await self._docker.containers.list(all="true", filters=_filters(labels))
        return [_listed(one._container) for one in found]  # what the listing said; there is no other way to it

    async def stop(self, container: str, grace_seconds: int) -> None:
        assert container, "an empty name would mean all containers"
        try:
            async with self._call(f"stop container {container}", seconds=grace_seconds + CALL_SECONDS):
                await self._docker.containers.container(container).stop(t=grace_seconds)
        except NotFound:
            return

    async def remove(self, container: str) -> bool:
        assert container, "an empty name would mean all containers"
        try:
            async with self._call(f"remove container {container}", seconds=SLOW_CALL_SECONDS):
                await self._docker.containers.container(container).delete(force=True, v=True)
        except NotFound:
            return False
        except Conflict:  # somebody else is removing it right now
            return True
        return True

    async def logs(self, container: str, *, lines: int) -> list[str]:
        async with self._call(f"read the output of container {container}"):
            told = await self._docker.containers.container(container).log(stdout=True, stderr=True, tail=lines)
        return _lines(told)

    async def follow(self, container: str, *, lines: int) -> AsyncIterator[str]:
        with self._translated(f"follow the output of container {container}"):
            stream = self._docker.containers.container(container).log(stdout=True, stderr=True, follow=True, tail=lines)
            rest = ""
            async for part in stream:
                whole, newline, rest = (rest + part).rpartition("\n")
                for line in whole.split("\n") if newline else ():
                    yield line
            if rest:
                yield rest

    async def network(self, name: str) -> str | None:
        async with self._call(f"look for network {name}"):
            found = await self._docker.networks.list(filters={"name": [name]})
        for told in found:
            if told["Name"] == name:  # the filter also lets longer names through
                return (told.get("Options") or {}).get(BRIDGE) or f"br-{told['Id'][:12]}"
        return None

    async def connect(self, container: str, network: str) -> None:
        async with self._call(f"connect container {container} to network {network}", seconds=SLOW_CALL_SECONDS):
            await _aio.networks.DockerNetwork(self._docker, network).connect({"Container": container})

    async def disconnect(self, container: str, network: str) -> None:
        async with self._call(f"disconnect container {container} from network {network}"):
            await _aio.networks.DockerNetwork(self._docker, network).disconnect({"Container": container})

    async def create_network(self, spec: NetworkSpec) -> None:
        config = {
            "Name": spec.name,
            "CheckDuplicate": True,
            "Driver": "bridge",
            "IPAM": {"Config": [{"Subnet": spec.subnet, "Gateway": spec.gateway}] if spec.subnet else []},
            "Options": {BRIDGE: spec.bridge, **({BETWEEN_MEMBERS: "false"} if spec.keeps_members_apart else {})},
            "Labels": dict(spec.labels),
        }
        async with self._call(f"create network {spec.name}"):
            _ = await self._docker.networks.create(config)

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        async with self._call(f"create volume {name}"):
            _ = await self._docker.volumes.create({"Name": name, "Labels": dict(labels)})

    async def remove_volume(self, name: str) -> bool:
        try:
            async with self._call(f"remove volume {name}"):
                await _aio.volumes.DockerVolume(self._docker, name).delete()
        except (NotFound, Conflict):
            return False
        return True

    async def volumes(self, labels: Mapping[str, str]) -> list[str]:
        async with self._call("list volumes"):
            told = await self._docker.volumes.list(filters={"label": _pairs(labels)})
        return [one["Name"] for one in told.get("Volumes") or ()]

    async def events(self, labels: Mapping[str, str]) -> AsyncIterator[EngineEvent | None]:
        # The engine repeats what happened since then, so nothing is missed while the connection is made.
        params = {
            "filters": json.dumps({"type": ["container"], "label": _pairs(labels)}),
            "since": f"{time.time() - EVENTS_BACK_SECONDS:.3f}",
        }
        events = _aio.events.DockerEvents(self._docker)
        subscription = events.subscribe(create_task=False)
        running = asyncio.ensure_future(events.run(**params))
        try:
            with self._translated("follow events"):
                yield None
                while (told := await subscription.get()) is not None:
                    actor = told.get("Actor") or {}
                    yield EngineEvent(
                        action=told.get("Action", ""),
                        container_id=actor.get("ID", ""),
                        labels=actor.get("Attributes") or {},
                    )
                await running
        finally:
            running.cancel()
            await asyncio.wait({running})
            if not running.cancelled():
                _ = running.exception()

    async def close(self) -> None:
        await self._docker.close()
        await self._connector.close()

    @asynccontextmanager
    async def _call(self, what: str, *, seconds: float = CALL_SECONDS) -> AsyncIterator[None]:
        """One request with a deadline, its failures in our words."""
        with self._translated(what):
            async with asyncio.timeout(seconds):
                yield

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except DockerError as error:
            if error.status >= _NO_ANSWER:
                raise self._down(error.message) from error
            raise _translate(what, error) from error
        except (json.JSONDecodeError, KeyError) as error:  # such an answer comes from no engine
            raise self._stranger() from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._down(str(error) or "nothing came in time") from error

    def _stranger(self) -> EngineDown:
        return EngineDown(f"what answers at {self._address.url} is no container engine; check the address")

    def _down(self, why: str) -> EngineDown:
        return EngineDown(f"the container engine at {self._address.url} does not answer ({why}); is it running?")


def create_request(spec: ContainerSpec) -> dict[str, Any]:
    """The body that asks Docker for such a container."""
    request: dict[str, Any] = {
        "Image": with_tag(spec.image),
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": dict(spec.labels),
        "HostConfig": _host_config(spec),
        "Tty": False,
        "Volumes": {path: {} for path in spec.scratch},
    }
    if spec.entrypoint is not None:
        request |= {"Entrypoint": list(spec.entrypoint), "Cmd": [], "Healthcheck": {"Test": ["NONE"]}}
    if spec.working_dir is not None:
        request["WorkingDir"] = spec.working_dir
    if spec.user is not None:
        request["User"] = spec.user
    if spec.reads_input:
        request |= {"OpenStdin": True, "StdinOnce": True}
    return request


def _host_config(spec: ContainerSpec) -> dict[str, Any]:
    limits = spec.limits
    host: dict[str, Any] = {
        "Binds": list(spec.binds),
        "ExtraHosts": list(spec.extra_hosts),
        "AutoRemove": spec.removes_itself,
        "PidsLimit": spec.pids_max,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": str(spec.log_bytes_max), "max-file": "1"}},
        "ReadonlyRootfs": spec.is_root_read_only,
    }
    if spec.log_bytes_max == 0:
        host["LogConfig"] = {"Type": "none"}
    if spec.is_hardened:
        host |= {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"]}
    if spec.tmpfs:
        host["Tmpfs"] = dict.fromkeys(spec.tmpfs, "rw,exec,nosuid,nodev,mode=1777")
    if limits.memory_bytes > 0:
        host |= {"Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes}
    if limits.cpus > 0:
        host["NanoCpus"] = round(limits.cpus * 1e9)
    if spec.network is not None:
        host["NetworkMode"] = spec.network
    return host


def archive(files: Sequence[ContainerFile]) -> bytes:
    """A tar archive of these files, in their order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            member = tarfile.TarInfo(str(PurePosixPath(file.path)))
            member.mode, member.uid, member.gid = file.mode, file.uid, file.gid
            if file.content is None:
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(file.content)
                tar.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()


def _translate(what: str, error: DockerError) -> KiciError:
    text = f"cannot {what}: {error.message or f'HTTP {error.status} was answered, without a reason'}"
    match error.status:
        case 404:
            return NotFound(text)
        case 409 if "OCI" in error.message:  # as Podman says that a container cannot be prepared for its start
            return EngineRefused(text)
        case 409:
            return Conflict(text)
        case 400 | 403:
            return EngineRefused(text)
        case _:
            return Retryable(text)


def _pull_error(image: str, text: str, auth: RegistryAuth | None) -> KiciError:
    if auth is not None and auth.password:
        text = text.replace(auth.password, "***")
    registry = registry_of(image)
    # Docker Hub says the same for both, on purpose; elsewhere the words differ.
    if _DENIED.search(text):
        how = (
            f"without a log-in; give the job's container `credentials` if registry {registry} needs them"
            if auth is None
            else f"as {auth.username}; check the credentials for registry {auth.server}"
        )
        return ImageRefused(f"image {image} may not be pulled {how} ({text})")
    if _ABSENT.search(text):
        return ImageRefused(f"image {image} is not in registry {registry}; check its name and tag ({text})")
    return Retryable(f"image {image} could not be pulled: {text}")


def _with_registry(image: str) -> str:
    """The whole name: credentials go with one that names its registry."""
    if image.startswith(f"{registry_of(image)}/"):
        return image
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def _progress(told: Mapping[str, Any]) -> str:
    words = (told.get("id"), told.get("status"), told.get("progress"))
    return " ".join(str(word) for word in words if word)


def _machine(name: str) -> str:
    return MACHINES.get(name, name)


def _pairs(labels: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in labels.items()]


def _filters(labels: Mapping[str, str]) -> str:
    return json.dumps({"label": _pairs(labels)})


def _listed(told: Mapping[str, Any]) -> ContainerInfo:
    return ContainerInfo(
        id=told["Id"],
        name=(told.get("Names") or [""])[0].removeprefix("/"),
        labels=told.get("Labels") or {},
        is_running=told.get("State") in ("running", "paused", "restarting"),
        is_paused=told.get("State") == "paused",
        addresses=_addresses(told.get("NetworkSettings") or {}),
    )


def _addresses(settings: Mapping[str, Any]) -> dict[str, str]:
    networks: Mapping[str, Any] = settings.get("Networks") or {}
    return {name: one["IPAddress"] for name, one in networks.items() if one and one.get("IPAddress")}


def _lines(parts: Sequence[str]) -> list[str]:
    return "".join(parts).splitlines()
