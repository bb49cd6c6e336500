"""The JSON Schema (2020-12) of `scalers.yaml`, for editors and other tools.

It knows structure, types and what each type of scaler requires.  It is never stricter than the loader, which also
knows the rules between values and the small grammars inside texts.
"""

from collections.abc import Mapping
from typing import Any, Final

from kici.config.docstrings import key_docs
from kici.config.kinds import Schema
from kici.config.model import BackendType, ScalersConfig, Vmm
from kici.config.shapes import ListOf, MapOf, Resources, Shape, Table, table_of

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def scalers_schema() -> Schema:
    """The schema of a main file.  A file whose scalers all come from the directory lacks what it requires."""
    definitions: dict[str, Schema] = {}
    top = _table(table_of(ScalersConfig), definitions)
    top["required"] = ["version", "scalers"]
    entry = definitions["ScalerEntry"]
    entry["allOf"] = [*_by_type(), *_by_vmm()]
    return {"$schema": DIALECT, "title": "KiCI scalers", **top, "$defs": dict(sorted(definitions.items()))}


def _table(table: Table, definitions: dict[str, Schema]) -> Schema:
    docs = key_docs(table)
    properties: dict[str, Schema] = {}
    for rule in table.keys.values():
        described = {"description": docs[rule.name]} if rule.name in docs else {}
        default = {"default": rule.default} if isinstance(rule.default, (bool, int, float, str)) else {}
        properties[rule.name] = {**_schema(rule.shape, definitions), **default, **described}
    free: dict[str, Any] = {} if table.free_prefix is None else {"patternProperties": {f"^{table.free_prefix}": True}}
    return {
        "type": "object",
        "properties": properties,
        **free,
        "additionalProperties": False,
        "required": [rule.name for rule in table.keys.values() if rule.required],
    }


def _schema(shape: Shape, definitions: dict[str, Schema]) -> Schema:
    match shape:
        case Table():
            return _reference(shape, definitions)
        case ListOf():
            least = {"minItems": shape.items.minimum} if shape.items.minimum else {}
            return {"type": "array", "items": _schema(shape.item, definitions), **least}
        case MapOf():
            return {"type": "object", "additionalProperties": shape.value.schema()}
        case Resources():
            return {"anyOf": [_reference(shape.nested, definitions), _reference(shape.flat, definitions)]}
        case _:
            return shape.schema()


def _reference(table: Table, definitions: dict[str, Schema]) -> Schema:
    name = table.build.__name__
    if name not in definitions:
        definitions[name] = {}  # reserves the name while its own references are made
        definitions[name] = _table(table, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _by_type() -> list[Schema]:
    """What each type of scaler requires, of itself and of its label sets."""
    each: Mapping[BackendType, Schema] = {
        BackendType.CONTAINER: _sets({"required": ["image"]}),
        BackendType.BARE_METAL: _sets({"anyOf": [{"required": ["image"]}, {"required": ["binaryPath"]}]}),
        BackendType.FIRECRACKER: {"required": ["kernelPath"], **_sets({"required": ["rootfsPath"]})},
        BackendType.EVENT: {
            "required": ["provisioningTargets"],
            "properties": {"provisioningTargets": {"minItems": 1}},
        },
    }
    return [_when({"type": kind.value}, then) for kind, then in each.items()]


def _by_vmm() -> list[Schema]:
    jailed: Schema = {"required": ["firecrackerPath", "jailerPath", "uid", "gid"]}
    stated = _when({"type": BackendType.FIRECRACKER.value, "vmm": Vmm.FIRECRACKER.value}, jailed)
    silent: Schema = {
        "if": {"allOf": [_is({"type": BackendType.FIRECRACKER.value}), {"not": {"required": ["vmm"]}}]},
        "then": jailed,
    }
    return [stated, silent]


def _sets(rule: Schema) -> Schema:
    return {"properties": {"labelSets": {"items": rule}}}


def _is(values: Mapping[str, str]) -> Schema:
    return {"properties": {key: {"const": value} for key, value in values.items()}, "required": list(values)}


def _when(values: Mapping[str, str], then: Schema) -> Schema:
    return {"if": _is(values), "then": then}
