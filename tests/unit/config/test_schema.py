"""The JSON Schema says what the loader says, as far as a schema can."""

import json
from typing import Any

import jsonschema_rs
import pytest
import yaml

from kici.config.schema import scalers_schema
from kici.testing.scalers_files import MICROVM, MICROVM_SET, load, scaler, text

EVENT = "name: e\ntype: event\nmaxAgents: 1"


def fits(document: str) -> bool:
    return jsonschema_rs.is_valid(scalers_schema(), yaml.safe_load(document))


def test_it_is_a_schema_of_its_dialect() -> None:
    schema = scalers_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert jsonschema_rs.meta.is_valid(schema)
    assert json.loads(json.dumps(schema)) == schema


def test_every_key_is_described_and_no_object_is_open() -> None:
    def objects(node: Any) -> "list[dict[str, Any]]":
        if isinstance(node, dict):
            return ([node] if "properties" in node and node.get("type") == "object" else []) + [
                inner for value in node.values() for inner in objects(value)
            ]
        return [inner for value in node for inner in objects(value)] if isinstance(node, list) else []

    found = objects(scalers_schema())
    assert len(found) >= 10
    assert all(each["additionalProperties"] is False for each in found)
    described = [each for each in found if any("description" in key for key in each["properties"].values())]
    assert all("description" in key for each in described for key in each["properties"].values())


@pytest.mark.parametrize(
    "document",
    [
        text("scalers: []\nx-own: {a: 1}\n"),
        scaler(),
        scaler(MICROVM, MICROVM_SET),
        scaler("name: v\ntype: firecracker\nmaxAgents: 1\nvmm: qemu\nkernelPath: /k", MICROVM_SET),
        scaler(EVENT, "- labels: [a]", more="provisioningTargets: [t]"),
        scaler(sets="- {labels: [a], image: x, resources: {requests: {cpus: 0.5}, limits: {memory: 2Gi}}}"),
        scaler(sets="- {labels: [a], image: x, resources: {cpus: 2}, networkPolicy: {hostAccess: [5000, '*:1']}}"),
    ],
)
def test_what_the_loader_takes_fits(document: str) -> None:
    assert load(document).config is not None
    assert fits(document)


@pytest.mark.parametrize(
    "document",
    [
        "scalers: []\n",
        "version: 1\n",
        text("scalers: []\nnope: 1\n"),
        text("scalers: {}\n"),
        scaler("name: a\ntype: nonsense\nmaxAgents: 1"),
        scaler("name: a\ntype: bare-metal\nmaxAgents: 0"),
        scaler("name: a\ntype: bare-metal"),
        scaler(sets="- labels: [a]"),
        scaler(sets="- {labels: [], binaryPath: a}"),
        scaler(sets="- {labels: ['KICI:a'], binaryPath: a}"),
        scaler(sets="- {labels: ['a,b'], binaryPath: a}"),
        scaler(sets="- {labels: [a], binaryPath: a, resources: {cpus: 1, limits: {}}}"),
        scaler(sets="- {labels: [a], binaryPath: a, resources: {memory: 4gb}}"),
        scaler(sets="- {labels: [a], binaryPath: a, env: {A: 1}}"),
        scaler(more="orchestratorUrl: http://x"),
        scaler(more="platform: {os: linux}"),
        scaler("name: c\ntype: container\nmaxAgents: 1", "- labels: [a]"),
        scaler("name: v\ntype: firecracker\nmaxAgents: 1\nkernelPath: /k", MICROVM_SET),
        scaler("name: v\ntype: firecracker\nmaxAgents: 1\nvmm: firecracker\nkernelPath: /k", MICROVM_SET),
        scaler("name: v\ntype: firecracker\nmaxAgents: 1\nvmm: qemu", MICROVM_SET),
        scaler(MICROVM, "- labels: [vm]"),
        scaler(EVENT, "- labels: [a]"),
        scaler(EVENT, "- labels: [a]", more="provisioningTargets: []"),
    ],
)
def test_what_the_loader_refuses_for_its_structure_does_not_fit(document: str) -> None:
    assert load(document).config is None
    assert not fits(document)
