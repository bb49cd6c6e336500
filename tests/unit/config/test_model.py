"""The model agrees with itself: annotations with kinds, fields with docstrings, defaults with their own rules."""

import dataclasses
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from kici.config import model
from kici.config.docstrings import field_docs
from kici.config.kinds import Choice, Exactly, Flag, Number, Text, Whole
from kici.config.nodes import Scalar
from kici.config.shapes import Table, blank, table_of

CLASSES = [
    each
    for each in vars(model).values()
    if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == model.__name__
]
SAMPLES = {
    "a label": "Linux",
    "a path": "/x",
    "a pool name": "box",
    "text": "x",
    "a name": "x",
    "an image reference": "x:1",
    "a network interface name": "br0",
    "an nftables table name": "kici",
    "an IPv4 address": "10.0.0.1",
    "an IPv4 network such as 10.0.0.0/24": "10.0.0.0/24",
    "a netmask such as 255.255.255.0": "255.255.255.0",
    "the URL of a container engine": "tcp://h:1",
    "a WebSocket URL such as ws://10.0.0.1:4000/ws": "ws://h/ws",
    "<name>:<address or host-gateway>": "a:10.0.0.1",
    "a port, an address, or <address, network or *>:<port or *>": "5000",
    "a bind mount <source>:<target>[:<options>]": "/a:/b",
}


def sample(kind: Any) -> Any:
    """What a kind makes of a good value."""
    match kind:
        case Flag():
            return kind.read(Scalar(1, 1, True, "true"))
        case Whole():
            return kind.read(Scalar(1, 1, max(kind.minimum, 1), "1"))
        case Number():
            return kind.read(Scalar(1, 1, 1, "1"))
        case Choice():
            return kind.read(Scalar(1, 1, kind.members[0].value, ""))
        case Exactly():
            return kind.read(Scalar(1, 1, kind.number, ""))
        case _:
            assert isinstance(kind, Text)
            text = "4g" if kind.words.startswith("memory") else SAMPLES[kind.words]
            return kind.read(Scalar(1, 1, text, text))


def annotated(hint: Any) -> "list[tuple[type, Any]]":
    """Pairs of a type and the kind that claims to make it, anywhere inside an annotation."""
    if get_origin(hint) is Annotated:
        kinds = [mark for mark in hint.__metadata__ if isinstance(mark, (Flag, Whole, Number, Choice, Exactly, Text))]
        inner = get_args(hint)[0]
        return [(inner, kind) for kind in kinds] + annotated(inner)
    return [pair for part in get_args(hint) for pair in annotated(part)]


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_a_kind_makes_what_the_annotation_says(each: type) -> None:
    for name, hint in get_type_hints(each, include_extras=True).items():
        for kind_type, kind in annotated(hint):
            runtime = getattr(kind_type, "__supertype__", kind_type)
            assert type(sample(kind)) is runtime, name


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_every_field_is_documented(each: type) -> None:
    assert set(field_docs(each)) == {field.name for field in dataclasses.fields(each)}


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_defaults_obey_the_rules_of_their_fields(each: type) -> None:
    for rule in table_of(each).keys.values():
        if rule.default is None or not isinstance(rule.shape, (Whole, Number, Choice, Flag)):
            continue
        value = rule.default.value if isinstance(rule.default, StrEnum) else rule.default
        assert rule.shape.read(Scalar(1, 1, value, str(value))) == rule.default, rule.name


@pytest.mark.parametrize("each", CLASSES, ids=lambda each: each.__name__)
def test_a_blank_stands_in_for_what_could_not_be_read(each: type) -> None:
    table = table_of(each)
    assert isinstance(table, Table)
    assert isinstance(blank(table), each)


def test_keys_are_the_documented_names() -> None:
    assert set(table_of(model.ScalersConfig).keys) == {
        *("version", "globalMaxAgents", "defaults", "globalResourceCap", "machinePools", "firecracker", "scalers"),
    }
    assert {"maxCpu", "maxMemory"} == set(table_of(model.Cap).keys)
    assert {
        *("name", "type", "maxAgents", "maxConcurrentSpawns", "labelSets", "host", "socketPath", "runtime"),
        *("orchestratorUrl", "extraHosts", "networkIsolation", "warmPool", "mandatoryLabels", "platform", "roles"),
        *("resourceCap", "machinePool", "enforceCgroups", "firecrackerPath", "jailerPath", "kernelPath", "uid", "gid"),
        *("chrootBaseDir", "vcpuCount", "memSizeMib", "requireSudo", "provisioningTargets", "claimTtlSeconds"),
        *("agentTokenTtlSeconds", "reuse", "vmm", "accel"),
    } == set(table_of(model.ScalerEntry).keys)
    assert {
        *("labels", "image", "imagePullPolicy", "binaryPath", "resources", "volumes", "containerSocket", "env"),
        *("backpressureMode", "networkPolicy", "rootfsPath", "kernelPath", "vcpuCount", "memSizeMib"),
        *("overlayDriveSizeMib", "snapshotStart"),
    } == set(table_of(model.LabelSet).keys)
    assert {"enabled", "size", "idleTimeoutSeconds"} == set(table_of(model.WarmPool).keys)
    assert {"allowlist", "denyAll", "hostAccess"} == set(table_of(model.NetworkPolicy).keys)
    assert set(table_of(model.FirecrackerNetwork).keys) == {
        *("cidr", "bridgeName", "gateway", "netmask", "table", "autoProvisionHost"),
    }
