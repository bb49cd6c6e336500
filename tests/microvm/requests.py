"""Requests to firecracker's interface, in and out of order, right and wrong: what the stand-in is compared by.

Each script is sent to a fresh VMM.  `{folder}` stands for a folder that holds `kernel` (a guest that can be started),
`garbage` (a file that is no kernel), `drive`, an empty `log` and `metrics`, and an interface `{tap}` of the host.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kici.adapters.unix_sockets import connect

ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: Any = None
    """A string is sent as it is, None as nothing; anything else as JSON."""
    after_seconds: float = 0.0


@dataclass(frozen=True)
class Script:
    name: str
    requests: Sequence[Request]
    starts: bool = False
    """A guest runs in it."""
    then: Sequence[Request] = ()
    """To another VMM, once the first has ended, in the same folder."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any = field(compare=False)

    @property
    def shape(self) -> tuple[int, object]:
        """What has to be the same: the status, whether there is a fault, and the names in anything else."""
        if isinstance(self.body, dict):
            return self.status, sorted(self.body)
        return self.status, type(self.body).__name__


def get(path: str) -> Request:
    return Request("GET", path)


def put(path: str, body: Any = None) -> Request:
    return Request("PUT", path, body)


def patch(path: str, body: Any = None) -> Request:
    return Request("PATCH", path, body)


MACHINE = put("/machine-config", {"vcpu_count": 1, "mem_size_mib": 128, "smt": False})
ARGS = "console=ttyS0 reboot=k ip=10.200.0.2::10.200.0.1:255.255.255.0::eth0:off"
"""A Linux that finds no root stops there, without `panic=`."""
STAYS = {"kici-env": {"TG_BOOT": "silent"}}
"""What the tiny guest has to read, or it ends."""
SOURCE = put("/boot-source", {"kernel_image_path": "{folder}/kernel", "boot_args": ARGS})
ROOT_DRIVE = put(
    "/drives/rootfs",
    {"drive_id": "rootfs", "path_on_host": "{folder}/drive", "is_root_device": True, "is_read_only": True},
)
OTHER_DRIVE = put(
    "/drives/more",
    {"drive_id": "more", "path_on_host": "{folder}/drive", "is_root_device": False, "is_read_only": False},
)
INTERFACE = put(
    "/network-interfaces/eth0", {"iface_id": "eth0", "guest_mac": "06:00:AC:00:00:07", "host_dev_name": "{tap}"}
)
METADATA = put("/mmds/config", {"network_interfaces": ["eth0"], "version": "V2", "ipv4_address": "169.254.169.254"})
DATA = put("/mmds", {"latest": {"meta-data": {"a": "1", **STAYS}}})
START = put("/actions", {"action_type": "InstanceStart"})
BOOT = (MACHINE, SOURCE, ROOT_DRIVE, OTHER_DRIVE, INTERFACE, METADATA, DATA, START)
SAVE = put("/snapshot/create", {"snapshot_path": "{folder}/state", "mem_file_path": "{folder}/memory"})
LOAD = {
    "snapshot_path": "{folder}/state",
    "mem_backend": {"backend_type": "File", "backend_path": "{folder}/memory"},
}
PAUSE, RESUME = patch("/vm", {"state": "Paused"}), patch("/vm", {"state": "Resumed"})
PAUSE_SETTLED = replace(PAUSE, after_seconds=1.0)
"""When the tiny guest has read what it has to: cut short in that, it would end as soon as it goes on."""


def wrong(path: str, *bodies: Any) -> tuple[Request, ...]:
    return tuple(put(path, body) for body in bodies)


SCRIPTS = (
    Script("questions", (get("/"), get("/version"), get("/machine-config"), get("/vm/config"), get("/mmds"))),
    Script(
        "no such thing",
        (
            get("/nothing"),
            put("/"),
            Request("POST", "/actions", {}),
            Request("DELETE", "/vm"),
            get("/actions"),
            put("/vm", {}),
        ),
    ),
    Script("paths", (put("/drives", {}), put("/drives/a/b", {}), put("/network-interfaces", {}))),
    Script(
        "no body",
        (
            put("/machine-config"),
            put("/boot-source"),
            put("/drives/rootfs"),
            put("/actions"),
            put("/mmds"),
            patch("/vm"),
        ),
    ),
    Script(
        "no JSON",
        tuple(
            put(path, "{broken") for path in ("/machine-config", "/boot-source", "/actions", "/mmds", "/mmds/config")
        ),
    ),
    Script("other JSON", tuple(put(path, "[1, 2]") for path in ("/boot-source", "/actions", "/mmds/config"))),
    Script("a body where there is none", (Request("GET", "/", {"a": 1}), Request("GET", "/machine-config", {"a": 1}))),
    Script(
        "machines",
        (
            *wrong(
                "/machine-config",
                {"vcpu_count": 2, "mem_size_mib": 256},
                {"vcpu_count": 0, "mem_size_mib": 128},
                {"vcpu_count": 33, "mem_size_mib": 128},
                {"vcpu_count": "two", "mem_size_mib": 128},
                {"vcpu_count": 1, "mem_size_mib": 0},
                {"vcpu_count": 1, "mem_size_mib": -1},
                {"vcpu_count": 1},
                {"mem_size_mib": 128},
                {"vcpu_count": 3, "mem_size_mib": 128, "smt": True},
                {"vcpu_count": 1, "mem_size_mib": 128, "smt": "no"},
                {"vcpu_count": 1, "mem_size_mib": 128, "colour": "red"},
                {"vcpu_count": 1, "mem_size_mib": 128, "huge_pages": "3M"},
                {"vcpu_count": 1.5, "mem_size_mib": 128},
            ),
            get("/machine-config"),
        ),
    ),
    Script(
        "changes of a machine",
        (
            patch("/machine-config", {"vcpu_count": 4}),
            patch("/machine-config", {"mem_size_mib": 512}),
            get("/machine-config"),
            patch("/machine-config", {}),
            patch("/machine-config", {"vcpu_count": 0}),
            patch("/machine-config", {"colour": "red"}),
            get("/machine-config"),
        ),
    ),
    Script(
        "kernels",
        (
            SOURCE,
            SOURCE,
            put("/boot-source", {"kernel_image_path": "{folder}/nowhere"}),
            put("/boot-source", {"boot_args": "quiet"}),
            put("/boot-source", {"kernel_image_path": 7}),
            put("/boot-source", {"kernel_image_path": "{folder}/kernel", "initrd_path": "{folder}/nowhere"}),
            put("/boot-source", {"kernel_image_path": "{folder}/kernel", "initrd_path": "{folder}/drive"}),
            put("/boot-source", {"kernel_image_path": "{folder}/kernel", "boot_args": None}),
            put("/boot-source", {"kernel_image_path": "{folder}/kernel", "colour": "red"}),
        ),
    ),
    Script(
        "drives",
        (
            ROOT_DRIVE,
            ROOT_DRIVE,
            OTHER_DRIVE,
            put("/drives/other", {"drive_id": "more", "path_on_host": "{folder}/drive", "is_root_device": False}),
            put(
                "/drives/x",
                {"drive_id": "x", "path_on_host": "{folder}/nowhere", "is_root_device": False, "is_read_only": True},
            ),
            put(
                "/drives/x",
                {"drive_id": "x", "path_on_host": "{folder}/drive", "is_root_device": True, "is_read_only": True},
            ),
            put("/drives/x", {"drive_id": "x", "is_root_device": False, "is_read_only": True}),
            put("/drives/x", {"drive_id": "x", "path_on_host": "{folder}/drive", "is_read_only": True}),
            put("/drives/x", {"path_on_host": "{folder}/drive", "is_root_device": False, "is_read_only": True}),
            put(
                "/drives/x",
                {"drive_id": "x", "path_on_host": "{folder}/drive", "is_root_device": "no", "is_read_only": True},
            ),
            put(
                "/drives/x",
                {
                    "drive_id": "x",
                    "path_on_host": "{folder}/drive",
                    "is_root_device": False,
                    "is_read_only": True,
                    "cache_type": "Fast",
                },
            ),
            put(
                "/drives/x",
                {
                    "drive_id": "x",
                    "path_on_host": "{folder}/drive",
                    "is_root_device": False,
                    "is_read_only": True,
                    "colour": 1,
                },
            ),
            patch("/drives/rootfs", {"drive_id": "rootfs", "path_on_host": "{folder}/drive"}),
        ),
    ),
    Script(
        "interfaces",
        (
            INTERFACE,
            INTERFACE,
            put("/network-interfaces/eth1", {"iface_id": "eth0", "host_dev_name": "{tap}"}),
            put("/network-interfaces/eth1", {"iface_id": "eth1"}),
            put("/network-interfaces/eth1", {"host_dev_name": "other0"}),
            put("/network-interfaces/eth1", {"iface_id": "eth1", "host_dev_name": "other0", "guest_mac": "nonsense"}),
            put("/network-interfaces/eth1", {"iface_id": "eth1", "host_dev_name": "other0", "colour": 1}),
            put(
                "/network-interfaces/eth1",
                {"iface_id": "eth1", "host_dev_name": "other0", "guest_mac": "06:00:AC:00:00:07"},
            ),
            patch("/network-interfaces/eth0", {"iface_id": "eth0"}),
        ),
    ),
    Script("metadata without an interface", (METADATA, DATA, get("/mmds"))),
    Script("metadata before its settings", (INTERFACE, DATA, get("/mmds"), METADATA, get("/mmds"))),
    Script(
        "metadata",
        (
            INTERFACE,
            METADATA,
            DATA,
            get("/mmds"),
            put("/mmds", {"latest": {"meta-data": {}}}),
            get("/mmds"),
            patch("/mmds", {"latest": {"meta-data": {"b": "2"}}}),
            get("/mmds"),
            put("/mmds/config", {"network_interfaces": []}),
            put("/mmds/config", {"network_interfaces": ["eth7"]}),
            put("/mmds/config", {"version": "V2"}),
            put("/mmds/config", {"network_interfaces": ["eth0"], "version": "V3"}),
            put("/mmds/config", {"network_interfaces": ["eth0"], "ipv4_address": "10.0.0.1"}),
            put("/mmds/config", {"network_interfaces": ["eth0"], "ipv4_address": "rubbish"}),
            put("/mmds/config", {"network_interfaces": ["eth0"], "colour": 1}),
        ),
    ),
    Script("a change of metadata that are not there", (patch("/mmds", {"a": 1}),)),
    Script(
        "logs",
        (
            put("/logger", {"log_path": "{folder}/log", "level": "Warning"}),
            put("/logger", {"log_path": "{folder}/log"}),
            put("/logger", {"level": "Loud"}),
            put("/logger", {"log_path": "{folder}/no/log"}),
            put("/logger", {"colour": 1}),
            put("/metrics", {"metrics_path": "{folder}/metrics"}),
            put("/metrics", {"metrics_path": "{folder}/metrics"}),
            put("/metrics", {}),
        ),
    ),
    Script(
        "too early",
        (
            PAUSE,
            RESUME,
            put("/actions", {"action_type": "SendCtrlAltDel"}),
            put("/actions", {"action_type": "FlushMetrics"}),
        ),
    ),
    Script(
        "no such action",
        wrong(
            "/actions", {"action_type": "Fly"}, {}, {"action_type": 1}, {"action_type": "InstanceStart", "colour": 1}
        ),
    ),
    Script("a start without a kernel", (MACHINE, ROOT_DRIVE, START, get("/"))),
    Script("a kernel that is none", (put("/boot-source", {"kernel_image_path": "{folder}/garbage"}), START)),
    Script(
        "states", (patch("/vm", {}), patch("/vm", {"state": "Gone"}), patch("/vm", {"state": "Paused", "colour": 1}))
    ),
    Script(
        "snapshots too early",
        (
            put("/snapshot/create", {"snapshot_path": "{folder}/state", "mem_file_path": "{folder}/memory"}),
            put("/snapshot/create", {"snapshot_path": "{folder}/state"}),
            put(
                "/snapshot/create",
                {"snapshot_path": "{folder}/state", "mem_file_path": "{folder}/memory", "snapshot_type": "Half"},
            ),
            put(
                "/snapshot/create", {"snapshot_path": "{folder}/state", "mem_file_path": "{folder}/memory", "colour": 1}
            ),
        ),
    ),
    Script(
        "a snapshot for a machine that is set up",
        (MACHINE, put("/snapshot/load", {"snapshot_path": "{folder}/garbage", "mem_file_path": "{folder}/garbage"})),
    ),
    Script(
        "snapshots that are not described",
        wrong(
            "/snapshot/load",
            {},
            {"snapshot_path": "{folder}/garbage"},
            {"snapshot_path": "{folder}/garbage", "mem_file_path": "{folder}/garbage", "colour": 1},
            {
                "snapshot_path": "{folder}/garbage",
                "mem_file_path": "{folder}/garbage",
                "mem_backend": {"backend_type": "File", "backend_path": "{folder}/garbage"},
            },
            {
                "snapshot_path": "{folder}/garbage",
                "mem_backend": {"backend_type": "Tape", "backend_path": "{folder}/garbage"},
            },
        ),
    ),
    Script(
        "a snapshot that is not there",
        wrong(
            "/snapshot/load",
            {
                "snapshot_path": "{folder}/nowhere",
                "mem_backend": {"backend_type": "File", "backend_path": "{folder}/nowhere"},
            },
        ),
    ),
    Script(
        "a snapshot that is none",
        wrong(
            "/snapshot/load",
            {
                "snapshot_path": "{folder}/garbage",
                "mem_backend": {"backend_type": "File", "backend_path": "{folder}/garbage"},
            },
        ),
    ),
    Script(
        "a guest that runs",
        (
            *BOOT,
            get("/"),
            START,
            MACHINE,
            SOURCE,
            OTHER_DRIVE,
            INTERFACE,
            METADATA,
            put("/logger", {"level": "Error"}),
            patch("/machine-config", {"vcpu_count": 1}),
            put("/snapshot/create", {"snapshot_path": "{folder}/state", "mem_file_path": "{folder}/memory"}),
            put(
                "/snapshot/load",
                {
                    "snapshot_path": "{folder}/garbage",
                    "mem_backend": {"backend_type": "File", "backend_path": "{folder}/garbage"},
                },
            ),
            put("/mmds", {"latest": {"meta-data": STAYS}}),
            get("/mmds"),
            get("/machine-config"),
            get("/vm/config"),
            RESUME,
            PAUSE,
            PAUSE,
            get("/"),
            RESUME,
            get("/"),
            put("/actions", {"action_type": "SendCtrlAltDel"}),
        ),
        starts=True,
    ),
    Script(
        "a snapshot of a guest",
        (
            *BOOT,
            PAUSE,
            put("/snapshot/create", {"snapshot_path": "{folder}/state", "mem_file_path": "{folder}/memory"}),
            put("/snapshot/create", {"snapshot_path": "{folder}/no/state", "mem_file_path": "{folder}/memory"}),
            get("/"),
            RESUME,
        ),
        starts=True,
        then=(put("/snapshot/load", {**LOAD, "network_overrides": [{"iface_id": "eth7", "host_dev_name": "{tap}"}]}),),
    ),
    Script(
        "a guest from a snapshot",
        (*BOOT, PAUSE_SETTLED, SAVE),
        starts=True,
        then=(
            put("/snapshot/load", {**LOAD, "network_overrides": [{"iface_id": "eth0", "host_dev_name": "{tap}"}]}),
            get("/"),
            get("/mmds"),
            get("/machine-config"),
            put("/snapshot/load", LOAD),
            MACHINE,
            START,
            put("/mmds", {"latest": {"meta-data": STAYS}}),
            get("/mmds"),
            RESUME,
            get("/"),
        ),
    ),
    Script(
        "a guest from a snapshot that goes on at once",
        (*BOOT, PAUSE_SETTLED, SAVE),
        starts=True,
        then=(put("/snapshot/load", {**LOAD, "resume_vm": True}), get("/"), PAUSE),
    ),
)


async def play(socket: Path, requests: Sequence[Request], words: dict[str, str]) -> list[Answer]:
    """Send them one after another, each on a connection of its own as a careful client may."""
    answers = []
    for request in requests:
        await asyncio.sleep(request.after_seconds)
        async with asyncio.timeout(ANSWER_SECONDS):
            answers.append(await send(socket, request, words))
    return answers


async def send(socket: Path, request: Request, words: dict[str, str]) -> Answer:
    text = request.body if isinstance(request.body, str) else json.dumps(request.body)
    for name, value in words.items():
        text = text.replace(f"{{{name}}}", value)
    body = b"" if request.body is None else text.encode()
    head = f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n" if body else "\r\n"
    reader, writer = await connect(socket)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        told = await reader.readexactly(int(fields.get("content-length", "0")))
        return Answer(int(lines[0].split()[1]), json.loads(told, strict=False) if told else None)
    finally:
        writer.close()
