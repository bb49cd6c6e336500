"""What a worker remembers of each agent that it makes, from before the agent exists until nothing of it is left.

A backend finds its computes by their own marks; this says which to look for, what they hold of the host's caps, and
for whom they were made.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import Shape
from kici.domain.spawn import Reservation
from kici.ports.files import Files

_SUFFIX: Final = ".json"


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One agent of this host."""

    agent_id: AgentId
    scaler: ScalerName
    """In this host's own file."""
    backend_type: str
    label_set: tuple[str, ...]
    shape: Shape
    machine_pool: str | None
    owner: InstanceId
    """The coordinator that it was last ordered, or taken over, by."""
    reserved_at: Instant
    runs_job_image: bool = False

    def reservation(self, host: InstanceId) -> Reservation:
        """What it holds of this host's caps; a machine pool knows it by the host, not by the coordinator."""
        return Reservation(
            agent_id=self.agent_id,
            scaler=self.scaler,
            shape=self.shape,
            machine_pool=self.machine_pool,
            owner_instance_id=host,
            reserved_at=self.reserved_at,
        )


class HostRecords:
    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        self._folder = folder
        files.make_folder(folder)

    def write(self, record: HostRecord) -> None:
        """On disk when this returns.  Raises `Retryable`."""
        self._files.write(self._path(record.agent_id), msgspec.json.encode(record))

    def remove(self, agent_id: AgentId) -> None:
        self._files.remove(self._path(agent_id))

    def all(self) -> Iterator[HostRecord]:
        """What is left of the program before.  A file that cannot be read is none of ours."""
        for name in self._files.names(self._folder):
            data = self._files.read(self._folder / name) if name.endswith(_SUFFIX) else None
            if data is None:
                continue
            try:
                yield msgspec.json.decode(data, type=HostRecord)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue

    def _path(self, agent_id: AgentId) -> Path:
        return self._folder / f"{agent_id}{_SUFFIX}"
