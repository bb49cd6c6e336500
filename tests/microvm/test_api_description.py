"""Every request that we send to firecracker is one that its published description knows."""

import os
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml

from kici.decide.microvm import Bridge, Machine, guest
from kici.decide.microvm_boot import EMPTY, BootOrder, boot_args, metadata
from kici.decide.microvm_firecracker import ApiCall, boot_calls
from kici.domain.resources import NOTHING

CASES = Path(os.environ.get("KICI_CASES") or Path(__file__).parents[3] / "shared/cases")
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
    path = CASES / "firecracker-api.yaml"
    if not path.exists():
        pytest.skip(f"there is no {path}; set KICI_CASES")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


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
        ApiCall(method="GET", path="/", body=None),
        ApiCall(method="PUT", path="/mmds", body=EMPTY),
        ApiCall(method="PUT", path="/actions", body={"action_type": "SendCtrlAltDel"}),
    ]


def operation_of(description: dict[str, Any], call: ApiCall) -> dict[str, Any]:
    wanted = call.path.strip("/").split("/")
    for path, methods in description["paths"].items():
        parts = path.strip("/").split("/")
        if len(parts) == len(wanted) and all(p.startswith("{") or p == w for p, w in zip(parts, wanted, strict=True)):
            found: dict[str, Any] = methods[call.method.lower()]
            return found
    raise AssertionError(f"{call.method} {call.path} is not described")


def check(schema: dict[str, Any], value: object, description: dict[str, Any], at: str) -> None:
    """As much of a JSON schema as the description uses."""
    if "$ref" in schema:
        schema = description["definitions"][schema["$ref"].rsplit("/", 1)[1]]
    kinds: dict[str, Any] = {"object": dict, "string": str, "integer": int, "boolean": bool, "array": list}
    kind = kinds.get(schema.get("type", ""))
    if kind is not None:
        assert isinstance(value, kind), f"{at}: {value!r} is no {schema['type']}"
        assert not (kind is int and isinstance(value, bool)), at
    if "enum" in schema:
        assert value in schema["enum"], f"{at}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int) and "minimum" in schema:
        assert schema["minimum"] <= value <= schema.get("maximum", value), at
    if isinstance(value, list):
        for item in value:
            check(schema.get("items", {}), item, description, f"{at}[]")
    if isinstance(value, dict) and "properties" in schema:
        missing = set(schema.get("required", ())) - set(value)
        assert not missing, f"{at} lacks {missing}"
        unknown = set(value) - set(schema["properties"])
        assert not unknown, f"{at} has {unknown}, which is not described"
        for name, inner in value.items():
            check(schema["properties"][name], inner, description, f"{at}.{name}")


@pytest.mark.parametrize("call", all_calls(), ids=lambda call: f"{call.method} {call.path}")
def test_a_request_is_as_described(call: ApiCall, description: dict[str, Any]) -> None:
    operation = operation_of(description, call)
    bodies = [each for each in operation.get("parameters", ()) if each["in"] == "body"]
    assert bool(bodies) is (call.body is not None)
    for parameter in bodies:
        check(parameter["schema"], call.body, description, call.path)


def test_the_guest_starts_last_and_finds_its_boot_data() -> None:
    paths = [call.path for call in all_calls()]
    first = paths[: paths.index("/actions") + 1]
    assert first[-1] == "/actions"
    assert first.index("/network-interfaces/eth0") < first.index("/mmds/config") < first.index("/mmds")


def test_no_credential_is_shown_by_what_is_logged() -> None:
    assert "kat_1" not in repr(all_calls())
