"""A machine is made by steps, each of which can be taken back.

A step says whether it is needed, which others it waits for, does its part, and looks whether that worked; taking it
back needs nothing but the machine's record, so the same list of steps ends a machine that this process made and one
that it only found.  Steps that do not wait for each other run side by side; they are taken back one by one.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kici.backends.firecracker.machine import Machine
from kici.domain.errors import KiciError, Retryable
from kici.domain.ids import AgentId

log = logging.getLogger(__name__)

OnStep = Callable[[AgentId, str, str], None]
"""Told of each step of each machine: its name, and `do`, `done`, `undo` or `undone`."""


class Step(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def after(self) -> Sequence[str]:
        """Steps that have to be done before, by name; those that are not wanted count as done."""
        ...

    @property
    def outlives(self) -> bool:
        """What it made has to stay as long as the machine's process may live."""
        ...

    def is_wanted(self, machine: Machine) -> bool: ...

    async def do(self, machine: Machine) -> None: ...

    async def verify(self, machine: Machine) -> None:
        """Raise when what was done does not hold."""
        ...

    async def undo(self, machine: Machine) -> None:
        """Take away what `do` made, whole or in part; nothing there is fine.  Raises what kept it from that."""
        ...


def _silent(vm_id: AgentId, step: str, phase: str) -> None:
    log.debug("vm.step", extra={"kici": {"agent_id": vm_id, "step": step, "phase": phase}})


class Plan:
    """The steps of every machine, in order.  The first one writes its record."""

    def __init__(self, steps: Sequence[Step], on_step: OnStep | None = None) -> None:
        self._steps: Final = tuple(steps)
        self._told = on_step or _silent

    async def run(self, machine: Machine) -> None:
        """Make a machine.  Raises what a step raised; what was begun is `machine.begun`.

        A step that fails calls off those that run beside it, and nothing is left running when this returns.
        """
        done = {step.name: asyncio.Event() for step in self._steps}
        first: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for step in self._steps:
                    waits_for = [done[name] for name in step.after]
                    group.create_task(self._take(step, machine, waits_for, done[step.name]), name=step.name)
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        if first is not None:
            raise first  # others were called off because of it, or failed in its wake

    async def _take(
        self, step: Step, machine: Machine, waits_for: Sequence[asyncio.Event], done: asyncio.Event
    ) -> None:
        for event in waits_for:
            await event.wait()
        if step.is_wanted(machine):
            self._told(machine.id, step.name, "do")
            machine.begun.append(step.name)
            await step.do(machine)
            await step.verify(machine)
            self._told(machine.id, step.name, "done")
        done.set()

    async def undo(self, machine: Machine) -> None:
        """Take back what was begun, last first.  Raises `Retryable` with everything that resisted.

        While the process lives, what it stands on stays; while anything resists, the record stays.
        """
        faults: list[str] = []
        for step in reversed(self._steps):
            if step.name not in machine.begun or (faults and (step.outlives or step is self._steps[0])):
                continue
            self._told(machine.id, step.name, "undo")
            try:
                await step.undo(machine)
            except KiciError as error:
                faults.append(str(error))
            else:
                machine.begun.remove(step.name)
                self._told(machine.id, step.name, "undone")
        if faults:
            raise Retryable(f"microVM {machine.id} could not be taken down: {'; '.join(faults)}")

    def all_begun(self) -> list[str]:
        """For a machine that was found: any step may have been."""
        return [step.name for step in self._steps]
