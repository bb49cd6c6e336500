"""Every request that we send to firecracker is one that its published description knows."""

from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from tests.microvm.api_description import NotDescribed, body_schema, check, operation_of
from tests.microvm.stand_in_lab import api_description

from kici.decide.microvm import Bridge, Machine, guest
from kici.decide.microvm_boot import EMPTY, BootOrder, boot_args, metadata
from kici.decide.microvm_firecracker import ApiCall, boot_calls, load_call, resume_calls, snapshot_calls
from kici.domain.resources import NOTHING

BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.0.0.0/24"),
    gateway=IPv4Address("10.0.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)
VM = "scaler-firecracker-1a2b3c4d"


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    return api_description()


def all_calls() -> list[ApiCall]:
    one = guest(VM, IPv4Address("10.0.0.7"))
    order = BootOrder(agent_id=VM, labels=("vm",), url="ws://10.0.0.1:4000/ws", token="kat_1", env={"A": "b"})
    calls: list[ApiCall] = []
    for has_initrd in (False, True):
        calls += boot_calls(
            Machine(vcpus=2, mem_mib=128, overlay_mib=8, limits=NOTHING),
            one,
            args=boot_args(one, BRIDGE),
            has_initrd=has_initrd,
            metadata=metadata(order, BRIDGE),
        )
    return [
        *calls,
        *snapshot_calls(),
        load_call(one),
        *resume_calls(metadata(order, BRIDGE)),
        ApiCall(method="GET", path="/version", body=None),
        ApiCall(method="GET", path="/", body=None),
        ApiCall(method="PUT", path="/mmds", body=EMPTY),
        ApiCall(method="PUT", path="/actions", body={"action_type": "SendCtrlAltDel"}),
    ]


@pytest.mark.parametrize("call", all_calls(), ids=lambda call: f"{call.method} {call.path}")
def test_a_request_is_as_described(call: ApiCall, description: dict[str, Any]) -> None:
    _, operation = operation_of(description, call.method, call.path)
    schema = body_schema(operation)
    assert (schema is not None) is (call.body is not None)
    if schema is not None:
        check(schema, call.body, description, call.path)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/nothing", {}),
        ("DELETE", "/vm", None),
        ("PUT", "/machine-config", {"vcpu_count": 1}),
        ("PUT", "/machine-config", {"vcpu_count": 64, "mem_size_mib": 128}),
        ("PUT", "/machine-config", {"vcpu_count": True, "mem_size_mib": 128}),
        ("PUT", "/actions", {"action_type": "Fly"}),
        ("PUT", "/boot-source", {"kernel_image_path": "/k", "colour": "red"}),
        ("PUT", "/mmds/config", {"network_interfaces": [1]}),
    ],
)
def test_a_request_that_is_not_as_described_is_seen(
    method: str, path: str, body: object, description: dict[str, Any]
) -> None:
    with pytest.raises(NotDescribed):
        check(body_schema(operation_of(description, method, path)[1]) or {}, body, description, path)


def test_the_guest_starts_last_and_finds_its_boot_data() -> None:
    paths = [call.path for call in all_calls()]
    first = paths[: paths.index("/actions") + 1]
    assert first[-1] == "/actions"
    assert first.index("/network-interfaces/eth0") < first.index("/mmds/config") < first.index("/mmds")


def test_no_credential_is_shown_by_what_is_logged() -> None:
    assert "kat_1" not in repr(all_calls())
