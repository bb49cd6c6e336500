"""The API's description, OpenAPI 3.1, made from the table of routes and the types that it names."""

import inspect
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final, get_args

import msgspec

from kici.domain.access import Permission
from kici.web.problems import PROBLEM_TYPE, Problem
from kici.web.routing import JSON, Access, Route

_REF: Final = "#/components/schemas/{name}"
_PATH_PART: Final = re.compile(r"\{(\w+)\}")
_FIELD: Final = re.compile(r'\n    (\w+): [^\n]*\n    """(.*?)"""', re.S)
_HEADERS: Final = {
    "Idempotency-Key": "A name of the caller's choice: a repeated request with the same one answers as the first did.",
    "Last-Event-ID": "The id of the last event that was received: the stream goes on after it.",
}


def describe(routes: Iterable[Route], *, version: str) -> dict[str, object]:
    described = [route for route in routes if not route.is_page]
    components = _Components(described)
    paths: dict[str, dict[str, object]] = {}
    for route in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "KiCI",
            "version": version,
            "description": "Jobs, agents and scalers of a KiCI installation.  Errors are problem documents (RFC 9457).",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": components.definitions,
        },
    }


class _Components:
    """Schemas of all types that routes name."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._types: list[Any] = [Problem]
        self._types += [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
        schemas, self.definitions = msgspec.json.schema_components(self._types, ref_template=_REF)
        for kind in structs_of(self._types):
            _add_docs(self.definitions[kind.__name__], kind)
        self._schemas = dict(zip(map(repr, self._types), schemas, strict=True))

    def of(self, kind: object) -> dict[str, Any]:
        return self._schemas[repr(kind)]


def structs_of(kinds: Iterable[object]) -> list[type[msgspec.Struct]]:
    """Every struct that these types are made of, each once, in order of their names."""
    found: dict[str, type[msgspec.Struct]] = {}
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind.__name__ not in found:
                found[kind.__name__] = kind
                todo += [field.type for field in msgspec.structs.fields(kind)]
        else:
            todo += get_args(kind)
    return [found[name] for name in sorted(found)]


def _add_docs(schema: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    docs = field_docs(kind)
    for field in msgspec.structs.fields(kind):
        if field.name in docs:
            schema["properties"][field.encode_name]["description"] = docs[field.name]


def _operation(route: Route, components: _Components) -> dict[str, object]:
    operation: dict[str, object] = {
        "operationId": route.act.__name__,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_header_parameters(route)],
        "responses": _responses(route, components),
    }
    if isinstance(route.needs, Permission):
        operation["x-permission"] = route.needs.value
        operation["description"] = f"Needs the permission `{route.needs.value}`."
    elif route.needs is Access.PUBLIC:
        operation["security"] = []
    if route.body is not None:
        content = {JSON: {"schema": components.of(route.body)}}
        operation["requestBody"] = {"required": not route.body_is_optional, "content": content}
    return operation


def _path_parameters(route: Route) -> list[dict[str, object]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "maxLength": 200}}
        for name in _PATH_PART.findall(route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, object]]:
    docs = field_docs(route.query)
    found = []
    for field in msgspec.structs.fields(route.query):
        parameter = {
            "name": field.encode_name,
            "in": "query",
            "required": field.required,
            "schema": _inline(field.type),
        }
        if field.name in docs:
            parameter["description"] = docs[field.name]
        found.append(parameter)
    return found


def _inline(kind: Any) -> dict[str, Any]:
    """The schema of a parameter, with enums in place; null cannot be said in a query."""
    schemas, definitions = msgspec.json.schema_components([kind], ref_template=_REF)
    schema = dict(schemas[0])
    if "anyOf" in schema:
        members = [member for member in schema["anyOf"] if member != {"type": "null"}]
        schema = dict(members[0]) if len(members) == 1 else {"anyOf": members}
    if "$ref" in schema:
        schema = dict(definitions[str(schema["$ref"]).rpartition("/")[2]])
    return schema


def field_docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text below each field of a type and of what it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            found.update({name: " ".join(text.split()) for name, text in _FIELD.findall(inspect.getsource(base))})
    return found


def _header_parameters(route: Route) -> list[dict[str, object]]:
    return [
        {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": _HEADERS[name]}
        for name in route.headers
    ]


def _responses(route: Route, components: _Components) -> dict[str, object]:
    problem = {"schema": components.of(Problem)}
    refusals = {*route.refusals, *_usual_refusals(route)}
    responses: dict[str, object] = {
        str(status.value): {"description": status.phrase, "content": {PROBLEM_TYPE: problem}} for status in refusals
    }
    success: dict[str, object] = {"description": route.status.phrase}
    content: dict[str, object] = {media: {"schema": {"type": "string"}} for media in route.media if media != JSON}
    if route.answer is not None:
        content[JSON] = {"schema": components.of(route.answer)}
    if content:
        success["content"] = content
        for status in route.also:
            either = content | {PROBLEM_TYPE: problem} if status >= HTTPStatus.BAD_REQUEST else content
            responses[str(status.value)] = {"description": status.phrase, "content": either}
    responses[str(route.status.value)] = success
    responses["default"] = {"description": "Any other problem", "content": {PROBLEM_TYPE: problem}}
    return dict(sorted(responses.items()))


def _usual_refusals(route: Route) -> list[HTTPStatus]:
    found = [HTTPStatus.BAD_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE]
    if route.needs is not Access.PUBLIC:
        found.append(HTTPStatus.UNAUTHORIZED)
    if isinstance(route.needs, Permission):
        found.append(HTTPStatus.FORBIDDEN)
    if route.body is not None:
        found += [
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
        ]
    return found
