"""A simulated provider behind a webhook: it makes a machine for each scale-up and removes it at the scale-down.

It is slow, loses requests, answers an error after the deed, does things twice, makes machines that never boot and
two for one order, and takes machines away.  An order that has left is carried out whatever becomes of its sender.
A machine is switched off when its agent exits, as the reference provisioners do.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kici.domain.errors import KiciError, NoCapacity, Permanent, Retryable
from kici.domain.event import SCALE_DOWN, SCALE_UP, ScaleUp, read_scale_down, read_scale_up
from kici.domain.ids import AgentId, JobId
from kici.domain.resources import Amount
from kici.ports.backend import SpawnOrder
from kici.ports.webhook import WebhookCall
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import AgentPlace, SimAgent
from kici.testing.sim.cloud_rules import CloudRules
from kici.testing.sim.ledger import SELF_LABELS
from kici.testing.sim.life import Life
from kici.testing.sim.plan import Plan
from kici.wire.agent_settings import AgentSettings
from kici.wire.messages import AgentRegister

QUICK_SECONDS: Final = (0.01, 0.5)
SLOW_SECONDS: Final = (5.0, 25.0)
"""Sometimes longer than the sender waits."""
NOTHING: Final = Amount(cpus=0.0, memory_bytes=0)


@dataclass(slots=True, eq=False)
class CloudMachine:
    """What the provider made under one tag; two computers, sometimes."""

    up: ScaleUp
    agents: list[SimAgent] = field(default_factory=list)
    yet_to_boot: int = 1


class SimCloud:
    def __init__(self, plan: Plan, entropy: SeededEntropy, place: AgentPlace, rules: CloudRules) -> None:
        self._plan = plan
        self._entropy = entropy
        self._place = place
        self._rules = rules
        self.machines: dict[AgentId, CloudMachine] = {}
        """Those that exist."""
        self.cut_off: set[str] = set()
        """Coordinators that cannot reach it."""
        self._made: set[AgentId] = set()
        self.is_kind = False
        """Faults have stopped."""

    def happens(self, kind: str) -> bool:
        return self._entropy.chance(self._plan.odds.get(kind, 0.0)) and not self.is_kind

    def seconds(self) -> float:
        """How long the next call takes."""
        return self._entropy.uniform(*(SLOW_SECONDS if self.happens("cloud-slow") else QUICK_SECONDS))

    def agents(self) -> list[SimAgent]:
        return [agent for machine in self.machines.values() for agent in machine.agents if agent.is_alive]

    def error(self) -> KiciError:
        """Something that a provider may say."""
        return self._entropy.choice([Retryable("busy"), NoCapacity("none left"), Permanent("no such size")])

    # ------------------------------------------------------------------ orders

    def receives(self, call: WebhookCall) -> None:
        """An order is here."""
        self._does(call)
        if self.happens("cloud-duplicates"):
            asyncio.get_running_loop().call_later(self._entropy.uniform(0, 5), self._does, call)

    def _does(self, call: WebhookCall) -> None:
        if call.name == SCALE_UP:
            up = read_scale_up(call.payload)
            if up.agent_id not in self.machines:
                self._makes(up)
        elif call.name == SCALE_DOWN:
            self._removes(AgentId(read_scale_down(call.payload).agent_id), str(call.payload.get("reason")))

    def _makes(self, up: ScaleUp) -> None:
        agent_id = AgentId(up.agent_id)
        machine = self.machines[agent_id] = CloudMachine(up)
        is_known = self._rules.machine_made(agent_id, _order(up))
        is_first = agent_id not in self._made
        self._made.add(agent_id)
        # One that is made again after it had gone is only found by itself, or by an inventory.
        if is_known and is_first and self.happens("cloud-never-boots"):
            self._place.trace.count("cloud machine never boots")
            return  # nobody but us knows of it: it is removed because its row is there
        machine.yet_to_boot = 2 if self.happens("cloud-boots-twice") else 1
        loop = asyncio.get_running_loop()
        for number in range(machine.yet_to_boot):
            seconds = self._entropy.uniform(*((5, 50) if self.happens("slow-boot") else (0.2, 5)))
            loop.call_later(seconds, self._boots, machine, number)
        if self.happens("cloud-kills"):
            loop.call_later(self._entropy.uniform(0, 90), self.takes_away, agent_id)

    def _removes(self, agent_id: AgentId, reason: str) -> None:
        machine = self.machines.pop(agent_id, None)
        if machine is None:
            return
        self._rules.torn_down(agent_id, reason)
        for agent in list(machine.agents):
            agent.crash("its machine was removed")

    def takes_away(self, agent_id: AgentId) -> None:
        """The provider needs the machine back, or its power is gone."""
        machine = self.machines.pop(agent_id, None)
        if machine is None:
            return
        self._place.trace.count("cloud machine taken away")
        self._rules.machine_gone(agent_id, "was taken away by its provider")
        silently = self._entropy.chance(0.5)
        for agent in list(machine.agents):
            agent.crash("its machine was taken away", silently=silently)

    # ------------------------------------------------------------------ machines

    def _boots(self, machine: CloudMachine, number: int) -> None:
        agent_id = AgentId(machine.up.agent_id)
        if self.machines.get(agent_id) is not machine:
            return
        machine.yet_to_boot -= 1
        truth = self._rules.truth_of(agent_id, _order(machine.up))
        settings = AgentSettings(
            url=machine.up.orchestrator_url,
            register=AgentRegister(agent_id=agent_id, labels=[*machine.up.labels, *SELF_LABELS], scaler_managed=True),
            claim_code=machine.up.claim_code,
            self_labels=SELF_LABELS,
        )
        agent = SimAgent(
            truth,
            settings,
            self._place,
            on_exit=lambda how: self._ended(machine, agent, how),
            wire_id=AgentId(f"{agent_id}:{number}"),
        )
        machine.agents.append(agent)
        agent.start()

    def _ended(self, machine: CloudMachine, agent: SimAgent, how: str) -> None:
        """Its agent exited: the computer is switched off."""
        machine.agents.remove(agent)
        agent_id = AgentId(machine.up.agent_id)
        if not machine.agents and not machine.yet_to_boot and self.machines.get(agent_id) is machine:
            del self.machines[agent_id]
            self._rules.machine_gone(agent_id, how)


class CloudView:
    """Implements `WebhookSender` for one run of a coordinator."""

    def __init__(self, cloud: SimCloud, life: Life, *, site: str) -> None:
        self._cloud = cloud
        self._life = life
        self._site = site

    async def send(self, call: WebhookCall) -> None:
        cloud, life = self._cloud, self._life
        await life.unfrozen()
        if self._site in cloud.cut_off or cloud.happens("cloud-loses"):
            await life.sleep(call.timeout_seconds)
            raise Retryable(f"no answer within {call.timeout_seconds:g} s")
        seconds = cloud.seconds()
        if cloud.happens("cloud-refuses"):
            await life.sleep(min(seconds, call.timeout_seconds))
            raise cloud.error()
        asyncio.get_running_loop().call_later(seconds / 2, cloud.receives, call)
        await life.sleep(min(seconds, call.timeout_seconds))
        if seconds > call.timeout_seconds:
            raise Retryable(f"no answer within {call.timeout_seconds:g} s")
        if cloud.happens("cloud-lies"):
            raise cloud.error()

    async def close(self) -> None:
        pass


def registration(url: str, ref: str, secret: str) -> Mapping[str, Any]:
    """What an operator applies so that the provider hears of scale events."""
    return {"ref": ref, "on": [SCALE_UP, SCALE_DOWN], "webhook": {"url": url, "secret": secret}}


def _order(up: ScaleUp) -> SpawnOrder:
    return SpawnOrder(
        agent_id=AgentId(up.agent_id),
        label_set=tuple(up.labels),
        labels=tuple(up.labels),
        gate=frozenset(up.mandatory_labels),
        token=None,
        orchestrator_url=up.orchestrator_url,
        limits=NOTHING,
        requests=NOTHING,
        bound_job_id=None if up.job_id is None else JobId(up.job_id),
    )
