"""Firecracker's interface as its makers describe it: which requests there are, and what their bodies hold."""

from typing import Any

KINDS: dict[str, type] = {"object": dict, "string": str, "integer": int, "boolean": bool, "array": list}


class NotDescribed(Exception):
    """There is no such request, or its body is another."""


def operation_of(description: dict[str, Any], method: str, path: str) -> tuple[str, dict[str, Any]]:
    """The path as described, with the names of its parts, and the operation.  Raises `NotDescribed`."""
    wanted = path.strip("/").split("/")
    for each, methods in description["paths"].items():
        parts = each.strip("/").split("/")
        if len(parts) == len(wanted) and all(p.startswith("{") or p == w for p, w in zip(parts, wanted, strict=True)):
            if method.lower() not in methods:
                break
            found: dict[str, Any] = methods[method.lower()]
            return each, found
    raise NotDescribed(f"{method} {path} is not described")


def body_schema(operation: dict[str, Any]) -> dict[str, Any] | None:
    """Of what the operation takes; None: it takes no body."""
    return next((each["schema"] for each in operation.get("parameters", ()) if each["in"] == "body"), None)


def check(schema: dict[str, Any], value: object, description: dict[str, Any], at: str) -> None:
    """As much of a JSON schema as the description uses.  Raises `NotDescribed` saying where and what."""
    if "$ref" in schema:
        schema = description["definitions"][schema["$ref"].rsplit("/", 1)[1]]
    kind = KINDS.get(schema.get("type", ""))
    if kind is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise NotDescribed(f"{at}: {value!r} is no {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise NotDescribed(f"{at}: {value!r} is none of {schema['enum']}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        raise NotDescribed(f"{at}: {value} is out of range")
    if isinstance(value, list):
        for item in value:
            check(schema.get("items", {}), item, description, f"{at}[]")
    if isinstance(value, dict) and "properties" in schema:
        _check_fields(schema, value, description, at)


def _check_fields(schema: dict[str, Any], value: dict[str, Any], description: dict[str, Any], at: str) -> None:
    missing = set(schema.get("required", ())) - set(value)
    if missing:
        raise NotDescribed(f"{at} lacks {sorted(missing)}")
    unknown = set(value) - set(schema["properties"])
    if unknown:
        raise NotDescribed(f"{at} has {sorted(unknown)}, which is not described")
    for name, inner in value.items():
        if inner is not None or name in schema.get("required", ()):
            check(schema["properties"][name], inner, description, f"{at}.{name}")
