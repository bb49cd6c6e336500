"""What is remembered of each microVM: `microvms/<id>.json` in the data directory.

A record is written before anything of its machine exists and removed when nothing of it is left, so that whoever
starts here next finds every machine of this installation, at whichever step its making or its end was cut short.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import msgspec

from kici.decide.microvm import Guest, guest
from kici.domain.ids import AgentId, Instant, JobId, RunId, ScalerName, TokenId
from kici.ports.files import Files
from kici.ports.vmm import VmPlace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VmRecord:
    vm_id: AgentId
    scaler: ScalerName
    vmm: str
    folder: str
    """The machine's directory."""
    label_set: tuple[str, ...]
    labels: tuple[str, ...]
    gate: frozenset[str]
    token_id: TokenId | None
    spawned_at: Instant
    url: str = ""
    """Where its agent connects to."""
    address: str | None = None
    """None: it was about to get one."""
    bound_job_id: JobId | None = None
    run_id: RunId | None = None
    is_started: bool = True
    """Its guest was: before, no agent can come of it.  Records of older versions do not say."""

    @property
    def place(self) -> VmPlace:
        return VmPlace(self.vm_id, Path(self.folder))

    @property
    def guest(self) -> Guest | None:
        """None while it has no address: then it has no interface and no rules either."""
        return None if self.address is None else guest(self.vm_id, IPv4Address(self.address))


class VmRecords:
    """All records of one data directory, whichever scaler's."""

    def __init__(self, files: Files, data_dir: Path) -> None:
        self._files = files
        self._folder = data_dir / "microvms"

    def mark(self, vm_id: AgentId) -> str:
        """What processes of a machine carry in their environment, where that is ours to set."""
        return f"{self._folder}/{vm_id}"

    def write(self, record: VmRecord) -> None:
        self._files.make_folder(self._folder)
        self._files.write(self._path(record.vm_id), msgspec.json.encode(record))

    def read(self, vm_id: AgentId) -> VmRecord | None:
        data = self._files.read(self._path(vm_id))
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=VmRecord)
        except msgspec.MsgspecError as error:
            log.warning("record.unreadable", extra={"kici": {"agent_id": vm_id, "error": str(error)}})
            return None

    def names(self) -> list[AgentId]:
        """Machines that have a record, readable or not."""
        found = self._files.names(self._folder)
        return [AgentId(name.removesuffix(".json")) for name in found if name.endswith(".json") and name[0] != "."]

    def of(self, scaler: ScalerName) -> Iterator[VmRecord]:
        for vm_id in self.names():
            record = self.read(vm_id)
            if record is not None and record.scaler == scaler:
                yield record

    def remove(self, vm_id: AgentId) -> None:
        self._files.remove(self._path(vm_id))

    def _path(self, vm_id: AgentId) -> Path:
        return self._folder / f"{vm_id}.json"
