"""One job in a container of its own, from its image to the removal of everything that was made for it.

The container's first process is ours and waits: it is told over its input what to run, once the container is where it
may be.  That input is held by this process, so the container ends when this process does, however that happens; the
engine removes it then.  A record, there before the container is, is left for whoever comes later.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from kici.backends.container.images import IF_NOT_PRESENT, Images
from kici.backends.container.job_image import JobImages
from kici.backends.container.job_network import JobNetwork
from kici.backends.container.job_runtime import JobRuntime
from kici.backends.container.users import user_ids_in
from kici.decide import job_container as plan
from kici.decide.container_plan import RUNTIME_PLACE
from kici.domain.container import ContainerFile, ContainerSpec, RegistryAuth
from kici.domain.errors import Bug, Conflict, NotFound, Permanent, Retryable
from kici.domain.resources import Amount
from kici.kit.finish import finish
from kici.ports.engine import EngineRefused, ImageInfo
from kici.ports.job_engine import Attached, JobEngine, JobRecords

STEP_SECONDS_MAX: Final = 150.0
UNDO_SECONDS_MAX: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWish:
    """A job in a container."""

    name: str
    """Of the container."""
    agent_id: str
    job_id: str
    run_id: str
    image: str | None
    """None: it is built."""
    recipe: plan.Recipe | None
    auth: RegistryAuth | None
    declared: Amount
    sandbox: plan.Sandbox
    cpu_count: int
    """Of the host."""
    command: bytes = field(repr=False)
    """What the container's first process is told, secrets included."""

    @property
    def limits(self) -> Amount:
        return plan.limits_of(self.declared, self.sandbox.default_limits, cpu_count=self.cpu_count)


class Output(Protocol):
    async def write(self, stream: int, data: bytes) -> None:
        """1 or 2.  Returns when it was taken."""
        ...

    def tell(self, text: str) -> None:
        """A line of ours about what is being done, among the job's error output."""
        ...


@dataclass(slots=True, kw_only=True)
class JobRun:
    """On one engine.  `run` once."""

    engine: JobEngine
    images: Images
    job_images: JobImages
    runtime: JobRuntime
    network: JobNetwork
    records: JobRecords
    output: Output
    _name: str | None = None
    """Of the container, once there is a process in it that can be asked to end."""

    async def run(self, wish: JobWish) -> int:
        """The exit code.  Raises a `KiciError` that says why the job did not run; nothing is left either way."""
        image, info = await self._image(wish)
        await self.network.ensure()
        for name in (wish.name, f"{wish.name}-2"):
            injected = await self.runtime.ensure(image, self.output.tell)
            spec = plan.plan_job_container(self._order(wish, name, image), injected)
            try:
                with self.records.held(name, self.engine.address.url):
                    async with self._made(spec, wish.sandbox.user or info.user):
                        return await self._carry(name, wish.command)
            except (EngineRefused, NotFound) as error:
                if RUNTIME_PLACE not in str(error) or name != wish.name:
                    raise Permanent(f"the job cannot be run in image {image}: {error}") from error
                self.runtime.forget()
            except Conflict as error:
                raise Retryable(f"the container of the job cannot be made: {error}") from error
        raise Bug("the second try returns or raises")

    def _order(self, wish: JobWish, name: str, image: str) -> plan.JobOrder:
        return plan.JobOrder(
            name=name,
            image=image,
            agent_id=wish.agent_id,
            job_id=wish.job_id,
            run_id=wish.run_id,
            limits=wish.limits,
            network=self.network.name,
            sandbox=wish.sandbox,
        )

    async def ask(self) -> bool:
        """Ask the job to end.  False: there is none yet, and the run is best cancelled."""
        if self._name is None:
            return False
        await self.engine.signal(self._name, "SIGTERM")
        return True

    async def _image(self, wish: JobWish) -> tuple[str, ImageInfo]:
        if wish.recipe is not None:
            name = await self.job_images.build(wish.recipe, wish.auth, wish.limits, self.output.tell)
            built = await self.engine.image(name)
            if built is None:
                raise Retryable(f"image {name} was built and is not on the engine: somebody removed it")
            return name, built
        assert wish.image is not None, "a job's container has an image or is built"
        info = await self.images.ensure(
            wish.image, policy=IF_NOT_PRESENT, auth=wish.auth, on_progress=_milestones(self.output.tell)
        )
        return wish.image, info

    @asynccontextmanager
    async def _made(self, spec: ContainerSpec, user: str) -> AsyncIterator[None]:
        """The container, gone when the block ends; by force, if the block was left early."""
        try:
            await finish(self.engine.create(spec), seconds=STEP_SECONDS_MAX, what=f"creating container {spec.name}")
            if spec.scratch:
                await self._give(spec.name, user)
            yield
        finally:
            await finish(self._undo(spec.name), seconds=UNDO_SECONDS_MAX, what=f"removing container {spec.name}")

    async def _give(self, container: str, user: str) -> None:
        """Make the work directory the user's own."""
        uid, gid = await user_ids_in(self.engine, container, user)
        if (uid, gid) != (0, 0):
            mine = ContainerFile(path=plan.WORKSPACE.removeprefix("/"), mode=0o755, uid=uid, gid=gid)
            await self.engine.put(container, (mine,))

    async def _undo(self, name: str) -> None:
        _ = await self.engine.remove(name)
        await self.network.dismiss(name)
        self.records.forget(name)

    async def _carry(self, name: str, command: bytes) -> int:
        engine = self.engine
        async with engine.attached(name) as streams, engine.exit_code(name) as code:
            await finish(engine.start(name), seconds=STEP_SECONDS_MAX, what=f"starting container {name}")
            await self.network.admit(name)
            await streams.write(command)
            self._name = name
            await self._relay(streams)
            return await code

    async def _relay(self, streams: Attached) -> None:
        while (message := await streams.read()) is not None:
            await self.output.write(*message)


def _milestones(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Without the bars that an engine draws for each layer, and without repetition."""
    told: set[str] = set()

    def heard(text: str) -> None:
        if text not in told and not text.endswith(("B", "]", "Waiting", "Verifying Checksum")):
            told.add(text)
            tell(text)

    return heard


async def clear(records: JobRecords, engine: JobEngine) -> int:
    """Remove what processes that died have left on this engine.  How many containers there were."""
    count = 0
    with records.stale() as left:
        for name, where in left:
            if where == engine.address.url:
                count += await engine.remove(name)
                records.forget(name)
    return count
