"""How one agent's container comes to be: image, runtime, container, start, network, rules, token.

Each step writes what it made into the tracked agent before the next begins, so that whoever undoes a spawn knows
what there may be.  What the engine is asked to make is awaited to its end even when the spawn is called off: only
then is it known what to undo.  The token comes last: when the agent connects, its rules are there.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kici.backends.container.compute import Tracked
from kici.backends.container.house import House
from kici.backends.container.users import user_ids_in
from kici.decide import container_plan as plan
from kici.domain.container import ContainerSpec, RegistryAuth
from kici.domain.errors import Conflict, DeterministicRefusal, JobRefused, KiciError, NotFound, Retryable
from kici.domain.ids import ScalerName
from kici.kit.finish import finish
from kici.ports.backend import JobContainer, SpawnOrder
from kici.ports.engine import EngineDown, EngineKind, EngineRefused, ImageInfo, ImageRefused

log = logging.getLogger(__name__)

STEP_SECONDS_MAX: Final = 150.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MakerSettings:
    scaler: ScalerName
    """Whose agents these are."""
    owner: str
    """The installation that makes them."""
    is_isolated: bool
    """Whether agents live on the isolated network, under rules."""
    extra_hosts: tuple[str, ...] = ()
    """Further names that agents can resolve."""


class Maker:
    def __init__(self, *, house: House, settings: MakerSettings, environment: dict[str, str]) -> None:
        self._house = house
        self._settings = settings
        self._environment = environment

    async def make(self, agent: Tracked, chosen: plan.ContainerSet, order: SpawnOrder, report: Report) -> None:
        """All steps.  Raises `DeterministicRefusal`, `JobRefused`, `Permanent` or `Retryable`; undoes nothing."""
        house, settings = self._house, self._settings
        if settings.is_isolated:
            await self._fence()
        image = await self._image(chosen, order.container, report)
        carries = order.container is None and image.labels.get(plan.CARRIES_AGENT) == "own"
        name = chosen.image if order.container is None else order.container.image
        injected = None if carries else await house.runtimes.ensure(name, report)
        url, extra_hosts = self._reachable(order.orchestrator_url)
        wanted = self._agent_order(agent, order, url)
        around = plan.Surroundings(
            environment=self._environment,
            network=house.fencing.network.name if settings.is_isolated and house.fencing is not None else None,
            extra_hosts=extra_hosts,
            socket=house.engine.address.socket,
            injected=injected,
        )
        spec = plan.plan_container(chosen, wanted, around)
        # Podman's releases differ in what they make of a container without a network.
        is_late = house.engine.address.kind is EngineKind.DOCKER and plan.may_connect_late(wanted, around)

        async def ready() -> None:
            if is_late:
                await self._connect(agent)
            if settings.is_isolated:
                await self._admit(agent, chosen, url)

        agent.is_attempted = True
        try:
            await finish(self._create(agent, spec), seconds=STEP_SECONDS_MAX, what=f"creating container {spec.name}")
            uid, gid = await user_ids_in(house.engine, agent.container, image.user)
            if uid != 0:
                await house.engine.put(agent.container, plan.agent_folder(agent.id, uid=uid, gid=gid))
            if is_late:
                await house.engine.disconnect(agent.container, str(spec.network))
            starting = house.engine.start(agent.container, given=plan.token_input(order.token), ready=ready)
            await finish(starting, seconds=STEP_SECONDS_MAX, what=f"starting container {spec.name}")
        except (EngineRefused, NotFound) as error:
            raise self._refused(order.container, error) from error
        except Conflict as error:
            raise Retryable(f"the container of agent {agent.id} cannot be made now: {error}") from error

    def _reachable(self, url: str) -> tuple[str, tuple[str, ...]]:
        """The coordinator as containers see it, and the names that they know: their loopback is not ours."""
        settings, fencing = self._settings, self._house.fencing
        if fencing is None or not plan.is_loopback(url):
            return url, settings.extra_hosts
        if settings.is_isolated:
            return plan.reached_at(url, str(fencing.network.gateway)), settings.extra_hosts
        return plan.reached_at(url, plan.HOST_NAME), (*settings.extra_hosts, f"{plan.HOST_NAME}:host-gateway")

    async def _fence(self) -> None:
        fencing = self._house.fencing
        if fencing is None:
            raise DeterministicRefusal(
                f"scaler {self._settings.scaler}: agents of an engine on another machine cannot be isolated from here; "
                "set networkIsolation: false, and isolate them there"
            )
        await fencing.ensure()

    async def _image(self, chosen: plan.ContainerSet, container: JobContainer | None, report: Report) -> ImageInfo:
        images = self._house.images
        if container is None:
            try:
                return await images.ensure(chosen.image, policy=chosen.pull_policy, auth=None, on_progress=report)
            except EngineDown:
                raise
            except (ImageRefused, Retryable) as error:
                raise DeterministicRefusal(f"scaler {self._settings.scaler}: {error}") from error
        auth = None
        if container.password is not None:
            auth = RegistryAuth(
                username=container.username or "", password=container.password, server=container.registry or ""
            )
        try:
            return await images.ensure(container.image, policy="IfNotPresent", auth=auth, on_progress=report)
        except EngineDown:
            raise
        except (ImageRefused, Retryable) as error:  # tried several times already: its people had better know
            raise JobRefused(str(error)) from error

    def _agent_order(self, agent: Tracked, order: SpawnOrder, url: str) -> plan.AgentOrder:
        return plan.AgentOrder(
            agent_id=agent.id,
            scaler=self._settings.scaler,
            owner=self._settings.owner,
            label_set=order.label_set,
            labels=order.labels,
            url=url,
            spawned_at=agent.spawned_at,
            limits=order.limits,
            job_image=None if order.container is None else order.container.image,
            job_id=order.bound_job_id,
            run_id=order.run_id,
            has_token=order.token is not None,
        )

    async def _create(self, agent: Tracked, spec: ContainerSpec) -> None:
        agent.container = await self._house.engine.create(spec)

    def _refused(self, container: JobContainer | None, error: KiciError) -> KiciError:
        """The engine will not: because of the job's image, or of what the operator configured."""
        if plan.RUNTIME_PLACE in str(error):
            self._house.runtimes.forget()
            return Retryable(f"the runtime volume is not what it was, and is looked at anew: {error}")
        if container is not None:
            return JobRefused(f"no agent can be started in image {container.image}: {error}")
        return DeterministicRefusal(f"scaler {self._settings.scaler}: {error}")

    async def _connect(self, agent: Tracked) -> None:
        """Its network, while it loads its modules: the slowest step of an engine after the start itself."""
        engine, fencing = self._house.engine, self._house.fencing
        assert fencing is not None, "isolation was checked before"
        try:
            await engine.connect(agent.container, fencing.network.name)
        except (EngineRefused, Retryable):
            found = await engine.inspect(agent.container)
            if found is not None and found.is_running and fencing.network.name not in found.addresses:
                raise
            # It ended, as whoever watches it tells better; or an engine has given it its network by itself.

    async def _admit(self, agent: Tracked, chosen: plan.ContainerSet, url: str) -> None:
        fencing = self._house.fencing
        assert fencing is not None, "isolation was checked before"
        found = await self._house.engine.inspect(agent.container)
        address = None if found is None else found.addresses.get(fencing.network.name)
        if address is None:
            if found is None or not found.is_running:
                return  # it has ended already: whoever watches it tells how
            raise Retryable(f"container {agent.ref} has no address on {fencing.network.name}")
        names = {host: ip for host, _, ip in (each.partition(":") for each in self._settings.extra_hosts)}
        agent.address = address  # first: rules that may have come to be are found by it
        port = None if found is None or found.pid is None else self._house.port_of(found.pid)
        if port is None:  # a neighbour could send with its address; what it may reach is as it should be
            log.warning("fence.unbound", extra={"kici": {"agent_id": agent.id, "address": address}})
        await fencing.admit(agent.id, address, chosen.policy, url, names, port=port)
