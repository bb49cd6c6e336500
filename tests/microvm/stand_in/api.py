"""Firecracker's interface without firecracker: each request is checked against its published description and against
what may be asked when, and what it changes is remembered.  The guest itself is a port.

Compared with the real program by `test_stand_in.py`.  Stricter than that in places: an array is never taken for an
object, and no path may go on after its end.  Requests about devices that our guests do not have are refused.
"""

import copy
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Final, Protocol

from tests.microvm.api_description import NotDescribed, body_schema, check, operation_of

VERSION: Final = "1.12.1"
METHODS: Final = ("GET", "PUT", "PATCH")
LINK_LOCAL: Final = IPv4Network("169.254.0.0/16")
_MAC: Final = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}\Z")
_BEFORE: Final = "The requested operation is not supported before starting the microVM."
_AFTER: Final = "The requested operation is not supported after starting the microVM."


class Refused(Exception):
    """What the answer's `fault_message` says."""


@dataclass
class Config:
    """What the guest is to be, as it was told."""

    machine: dict[str, Any] = field(
        default_factory=lambda: {
            "vcpu_count": 1,
            "mem_size_mib": 128,
            "smt": False,
            "track_dirty_pages": False,
            "huge_pages": "None",
        }
    )
    source: dict[str, Any] = field(default_factory=dict)
    drives: dict[str, dict[str, Any]] = field(default_factory=dict)
    interfaces: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] | None = None
    """Settings of the metadata service; None: guests cannot reach it."""


class Guest(Protocol):
    """The machine itself.  Every call may raise `Refused`."""

    async def start(self, config: Config, data: Callable[[], object]) -> None:
        """`data`: what the metadata service answers, now."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def press_ctrl_alt_del(self) -> None: ...

    async def save(self, memory: Path) -> None: ...

    async def load(self, config: Config, memory: Path, data: Callable[[], object]) -> None:
        """A machine that is paused where it was saved."""
        ...


Handler = Callable[["Vmm", str, dict[str, Any]], Awaitable[object] | object]


class Vmm:
    def __init__(self, description: dict[str, Any], vm_id: str, guest: Guest) -> None:
        self._description = description
        self._vm_id = vm_id
        self._guest = guest
        self.config = Config()
        self.state = "Not started"
        self.data: Any = None
        self._is_touched = False
        """Something was told that a snapshot would bring with it."""
        self._metrics: str | None = None

    async def answer(self, method: str, path: str, data: bytes) -> tuple[int, object]:
        """Status and body; None: it is empty."""
        if method not in METHODS:
            return 400, {"error": f"Invalid HTTP Method: {method}"}
        try:
            told = await self._told(method, path, data)
        except (Refused, NotDescribed, OSError) as error:
            return 400, {"fault_message": str(error)}
        return (204, None) if told is None else (200, told)

    async def _told(self, method: str, path: str, data: bytes) -> object:
        template, operation = operation_of(self._description, method, path)
        body = self._body(method, path, data, body_schema(operation))
        try:
            handler, when = HANDLERS[method, template]
        except KeyError:
            raise Refused(f"the stand-in does not serve {method} {template}") from None
        if "{" in template:
            self._same_id(path, body)
        if when == "before" and self.state != "Not started":
            raise Refused(_AFTER)
        if when == "after" and self.state == "Not started":
            raise Refused(_BEFORE)
        told = handler(self, path, body)
        return await told if isinstance(told, Awaitable) else told

    def _body(self, method: str, path: str, data: bytes, schema: dict[str, Any] | None) -> dict[str, Any]:
        if schema is None:
            if data:
                raise Refused(f"{method} request cannot have a body.")
            return {}
        if not data:
            raise Refused(f"Empty {method} request.")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise Refused(f"An error occurred when deserializing the json body of a request: {error}.") from error
        if method == "PATCH" and path == "/machine-config":
            schema = {key: value for key, value in self._definition(schema).items() if key != "required"}
        check(schema, body, self._description, path)
        if not isinstance(body, dict):
            raise Refused(f"{path}: an object was expected.")
        return body

    def _definition(self, schema: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._description["definitions"][schema["$ref"].rsplit("/", 1)[1]]
        return found

    @staticmethod
    def _same_id(path: str, body: Mapping[str, Any]) -> None:
        named = body.get("drive_id", body.get("iface_id"))
        if named != path.rsplit("/", 1)[1]:
            raise Refused("The id from the path does not match the id from the body!")

    # ------------------------------------------------------------------ questions

    def about(self, _path: str, _body: dict[str, Any]) -> object:
        return {"id": self._vm_id, "state": self.state, "vmm_version": VERSION, "app_name": "Firecracker"}

    def version(self, _path: str, _body: dict[str, Any]) -> object:
        return {"firecracker_version": VERSION}

    def machine(self, _path: str, _body: dict[str, Any]) -> object:
        return self.config.machine

    def whole(self, _path: str, _body: dict[str, Any]) -> object:
        config = self.config
        nothing = dict.fromkeys(("balloon", "cpu-config", "entropy", "logger", "metrics", "vsock"))
        return nothing | {
            "boot-source": config.source,
            "drives": list(config.drives.values()),
            "machine-config": config.machine,
            "mmds-config": config.metadata,
            "network-interfaces": list(config.interfaces.values()),
        }

    # ------------------------------------------------------------------ before the start

    def set_machine(self, _path: str, body: dict[str, Any]) -> None:
        if not body:
            raise Refused("Empty PATCH request.")
        wanted = self.config.machine | {key: value for key, value in body.items() if value is not None}
        if wanted["smt"] and wanted["vcpu_count"] > 1 and wanted["vcpu_count"] % 2:
            raise Refused("Machine config error: The number of vCPUs must be 1 or even with SMT.")
        if wanted["mem_size_mib"] <= 0:
            raise Refused("Machine config error: The memory size (MiB) is 0 or less.")
        self.config.machine = wanted
        self._is_touched = True

    def set_source(self, _path: str, body: dict[str, Any]) -> None:
        for name in ("kernel_image_path", "initrd_path"):
            if body.get(name) is not None:
                _readable(body[name], f"Boot source error: {name}")
        self.config.source = body
        self._is_touched = True

    def set_drive(self, _path: str, body: dict[str, Any]) -> None:
        if body.get("path_on_host") is None:
            raise Refused("Drive config error: Invalid block config.")
        _readable(body["path_on_host"], "Drive config error: backing file")
        name = body["drive_id"]
        others = [drive for other, drive in self.config.drives.items() if other != name]
        if body["is_root_device"] and any(drive["is_root_device"] for drive in others):
            raise Refused("Drive config error: A root block device already exists!")
        self.config.drives[name] = body
        self._is_touched = True

    def set_interface(self, _path: str, body: dict[str, Any]) -> None:
        mac, name = body.get("guest_mac"), body["iface_id"]
        if mac is not None and _MAC.match(mac) is None:
            raise Refused("The provided MAC address is invalid.")
        others = {each.get("guest_mac") for other, each in self.config.interfaces.items() if other != name}
        if mac is not None and mac in others:
            raise Refused(f"Network config error: The MAC address is already in use: {mac}")
        self.config.interfaces[name] = body
        self._is_touched = True

    def set_metadata(self, _path: str, body: dict[str, Any]) -> None:
        names = body["network_interfaces"]
        if not names or not set(names) <= set(self.config.interfaces):
            raise Refused("MMDS config error: interfaces that there are have to be named.")
        try:
            address = IPv4Address(body.get("ipv4_address") or "169.254.169.254")
        except AddressValueError as error:
            raise Refused(f"invalid IPv4 address syntax: {error}") from error
        if address not in LINK_LOCAL:
            raise Refused("MMDS config error: The MMDS IPv4 address is not link local.")
        self.config.metadata = {"version": "V1", **body, "ipv4_address": str(address)}

    def log_to(self, _path: str, body: dict[str, Any]) -> None:
        _writable(body.get("log_path"), "Logger error")

    def measure_to(self, _path: str, body: dict[str, Any]) -> None:
        if self._metrics is not None:
            raise Refused("Metrics error: Reinitialization of metrics not allowed.")
        _writable(body["metrics_path"], "Metrics error")
        self._metrics = body["metrics_path"]

    # ------------------------------------------------------------------ metadata

    def shown_data(self, _path: str, _body: dict[str, Any]) -> object:
        return {} if self.data is None else self.data

    def set_data(self, _path: str, body: dict[str, Any]) -> None:
        self.data = body

    def merge_data(self, _path: str, body: dict[str, Any]) -> None:
        if self.data is None:
            raise Refused("MMDS error: The MMDS data store is not initialized.")
        self.data = merged(self.data, body)

    # ------------------------------------------------------------------ the guest

    async def act(self, _path: str, body: dict[str, Any]) -> None:
        if body["action_type"] == "InstanceStart":
            if self.state != "Not started":
                raise Refused(_AFTER)
            if not self.config.source:
                raise Refused("Start microvm error: Cannot start microvm without kernel configuration.")
            await self._guest.start(copy.deepcopy(self.config), lambda: self.data)
            self.state = "Running"
            return
        if self.state == "Not started":
            raise Refused(_BEFORE)
        if body["action_type"] == "SendCtrlAltDel":
            await self._guest.press_ctrl_alt_del()

    async def set_state(self, _path: str, body: dict[str, Any]) -> None:
        if body["state"] == "Paused":
            await self._guest.pause()
            self.state = "Paused"
        else:
            await self._guest.resume()
            self.state = "Running"

    async def save(self, _path: str, body: dict[str, Any]) -> None:
        if self.state != "Paused":
            raise Refused("Create snapshot error: Operation not allowed: save/restore unavailable while running")
        self._keep(Path(body["snapshot_path"]), Path(body["mem_file_path"]))
        await self._guest.save(Path(body["mem_file_path"]))

    async def load(self, _path: str, body: dict[str, Any]) -> None:
        backend = body.get("mem_backend")
        if (backend is None) is (body.get("mem_file_path") is None):
            raise Refused("either `mem_backend` or `mem_file_path` exclusively is required.")
        if self._is_touched:
            raise Refused("Load snapshot error: not allowed after configuring boot-specific resources.")
        config = self._kept(Path(body["snapshot_path"]))
        for each in body.get("network_overrides") or ():
            if each["iface_id"] not in config.interfaces:
                raise Refused(f"Load snapshot error: unknown interface {each['iface_id']}")
            config.interfaces[each["iface_id"]]["host_dev_name"] = each["host_dev_name"]
        memory = body["mem_file_path"] if backend is None else backend["backend_path"]
        await self._guest.load(config, Path(memory), lambda: self.data)
        self.config, self.state = config, "Paused"
        if body.get("resume_vm"):
            await self._guest.resume()
            self.state = "Running"

    def _keep(self, state: Path, memory: Path) -> None:
        try:
            state.write_text(json.dumps(vars(self.config)))
            memory.touch()
        except OSError as error:
            raise Refused(f"Create snapshot error: {error.strerror}") from error

    @staticmethod
    def _kept(state: Path) -> Config:
        try:
            return Config(**json.loads(state.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise Refused(f"Load snapshot error: Failed to restore from snapshot: {error!r}") from error


HANDLERS: Final[dict[tuple[str, str], tuple[Handler, str]]] = {
    ("GET", "/"): (Vmm.about, "ever"),
    ("GET", "/version"): (Vmm.version, "ever"),
    ("GET", "/machine-config"): (Vmm.machine, "ever"),
    ("GET", "/vm/config"): (Vmm.whole, "ever"),
    ("PUT", "/machine-config"): (Vmm.set_machine, "before"),
    ("PATCH", "/machine-config"): (Vmm.set_machine, "before"),
    ("PUT", "/boot-source"): (Vmm.set_source, "before"),
    ("PUT", "/drives/{drive_id}"): (Vmm.set_drive, "before"),
    ("PUT", "/network-interfaces/{iface_id}"): (Vmm.set_interface, "before"),
    ("PUT", "/mmds/config"): (Vmm.set_metadata, "before"),
    ("PUT", "/logger"): (Vmm.log_to, "before"),
    ("PUT", "/metrics"): (Vmm.measure_to, "before"),
    ("GET", "/mmds"): (Vmm.shown_data, "ever"),
    ("PUT", "/mmds"): (Vmm.set_data, "ever"),
    ("PATCH", "/mmds"): (Vmm.merge_data, "ever"),
    ("PUT", "/actions"): (Vmm.act, "ever"),
    ("PATCH", "/vm"): (Vmm.set_state, "after"),
    ("PUT", "/snapshot/create"): (Vmm.save, "after"),
    ("PUT", "/snapshot/load"): (Vmm.load, "before"),
}


def merged(old: Any, new: Any) -> Any:
    """A document with changes as a JSON merge patch has them: nothing takes away."""
    if not isinstance(new, dict):
        return new
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def _readable(path: str, what: str) -> None:
    if not os.access(path, os.R_OK) or not os.path.isfile(path):
        raise Refused(f"{what} cannot be opened: No such file or directory (os error 2) {path}")


def _writable(path: str | None, what: str) -> None:
    if path is not None and not os.access(path, os.W_OK):
        raise Refused(f"{what}: Failed to open target file: No such file or directory (os error 2)")
