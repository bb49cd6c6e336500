"""Docker, for the containers of jobs: streams, exit codes, builds.  The rest is `docker_engine`."""

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiohttp

from kici.adapters.docker_engine import CALL_SECONDS, SLOW_CALL_SECONDS, DockerEngine
from kici.domain.container import DOCKER_HUB, RegistryAuth
from kici.domain.errors import Conflict, KiciError, NotFound, Retryable
from kici.ports.engine import EngineDown, EngineRefused, OnProgress
from kici.ports.job_engine import Attached, BuildSpec

CPU_PERIOD_US: Final = 100_000
HUB_KEY: Final = "https://index.docker.io/v1/"
"""How engines call the public registry where they look up credentials."""
_INSTRUCTION: Final = re.compile(r"\A(?:\[\d+/\d+\] )?step (\d+)(?:/\d+)? ?: (.*)", re.IGNORECASE | re.DOTALL)
_FOREVER: Final = aiohttp.ClientTimeout(total=None, sock_read=None, sock_connect=10.0)


class _Stream:
    """Contract: `ports.job_engine.Attached`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def write(self, data: bytes) -> None:
        await self._stream.write_in(data)

    async def read(self) -> tuple[int, bytes] | None:
        message = await self._stream.read_out()
        return None if message is None else (message.stream, message.data)


class DockerJobEngine(DockerEngine):
    """Contract of every call: `ports.job_engine.JobEngine`."""

    @asynccontextmanager
    async def attached(self, container: str) -> AsyncIterator[Attached]:
        stream = self._docker.containers.container(container).attach(stdin=True, stdout=True, stderr=True)
        async with self._call(f"attach to container {container}"):
            await stream._init()  # else it would happen with the first read, after the start
        try:
            with self._translated(f"talk to container {container}"):
                yield _Stream(stream)
        finally:
            await stream.close()

    @asynccontextmanager
    async def exit_code(self, container: str) -> AsyncIterator[Awaitable[int]]:
        what = f"wait for container {container}"

        async def code(answer: aiohttp.ClientResponse) -> int:
            with self._translated(what):
                told = json.loads(await answer.read() or b"{}")
            if "StatusCode" not in told:
                raise self._down("it stopped telling while the container ran")
            return int(told["StatusCode"])

        # The answer begins when the engine has begun to wait: what starts after that cannot be missed.
        asked = self._docker._query(
            f"containers/{container}/wait", "POST", params={"condition": "next-exit"}, timeout=_FOREVER
        )
        with self._translated(what):
            answer = await asked.__aenter__()
        task = asyncio.ensure_future(code(answer))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
            answer.close()

    async def signal(self, container: str, name: str) -> None:
        try:
            async with self._call(f"send {name} to container {container}", seconds=CALL_SECONDS):
                await self._docker.containers.container(container).kill(signal=name)
        except (NotFound, Conflict):
            return
        except Retryable as error:
            if "is not running" not in str(error):
                raise

    async def build(self, spec: BuildSpec, auth: RegistryAuth | None, on_output: OnProgress) -> None:
        asked = self._docker._query(
            "build",
            "POST",
            params=_build_params(spec),
            headers={"Content-Type": "application/x-tar", **_registries(auth)},
            data=io.BytesIO(spec.tar),
            timeout=_FOREVER,
        )
        follower = _Build(on_output)
        try:
            with self._translated("build the image"):
                async with asked as answer:
                    async for line in answer.content:
                        if line.strip():
                            follower.take(json.loads(line))
        except EngineDown:
            raise
        except KiciError as error:
            raise EngineRefused(hide(f"the image cannot be built: {error}", auth)) from None
        if follower.error is not None:
            raise EngineRefused(hide(follower.error, auth))

    async def prune_images(self, labels: Mapping[str, str], *, older_than_hours: int) -> None:
        wanted = [f"{name}={value}" for name, value in labels.items()]
        filters = {"label": wanted, "until": [f"{older_than_hours}h"], "dangling": ["false"]}
        with suppress(Conflict):  # an engine does it for one caller at a time
            async with self._call("remove old images", seconds=SLOW_CALL_SECONDS):
                await self._docker._query_json("images/prune", "POST", params={"filters": json.dumps(filters)})


class _Build:
    """What an engine tells while it builds."""

    def __init__(self, on_output: OnProgress) -> None:
        self._on_output = on_output
        self._at = ""
        self.error: str | None = None

    def take(self, told: Mapping[str, Any]) -> None:
        text = str(told.get("stream") or "")
        found = _INSTRUCTION.match(text.strip())
        if found is not None:
            self._at = f"step {found[1]}, {found[2].strip()}"
        if text.strip():
            self._on_output(text.rstrip("\n"))
        elif "status" in told and "progress" not in told:
            words = (told.get("id"), told["status"])
            self._on_output(" ".join(str(word) for word in words if word))
        if "error" in told or "errorDetail" in told:
            why = str(told.get("error") or told["errorDetail"].get("message"))
            self.error = f"the image cannot be built: {self._at + ': ' if self._at else ''}{why}"


def hide(text: str, auth: RegistryAuth | None) -> str:
    """The same without the password."""
    return text if auth is None or not auth.password else text.replace(auth.password, "***")


def _build_params(spec: BuildSpec) -> dict[str, str]:
    params = {
        "t": spec.tag,
        "dockerfile": spec.dockerfile,
        "rm": "1",
        "forcerm": "1",
        "labels": json.dumps(dict(spec.labels)),
        "buildargs": json.dumps(dict(spec.args)),
    }
    if spec.target is not None:
        params["target"] = spec.target
    if spec.limits.memory_bytes > 0:
        params |= {"memory": str(spec.limits.memory_bytes), "memswap": str(spec.limits.memory_bytes)}
    if spec.limits.cpus > 0:
        quota = max(1000, round(spec.limits.cpus * CPU_PERIOD_US))
        params |= {"cpuperiod": str(CPU_PERIOD_US), "cpuquota": str(quota)}
    return params


def _registries(auth: RegistryAuth | None) -> dict[str, str]:
    if auth is None:
        return {}
    told = {"username": auth.username, "password": auth.password}
    servers = {auth.server, HUB_KEY} if auth.server == DOCKER_HUB else {auth.server}
    known = json.dumps(dict.fromkeys(sorted(servers), told)).encode()
    return {"X-Registry-Config": base64.urlsafe_b64encode(known).decode()}
