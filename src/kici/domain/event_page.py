"""The reference page of events: names, payloads and their schema, as the vocabulary has them."""

import json
from collections.abc import Iterator
from typing import Any

from kici.domain.event import SECRET_FIELDS, VOCABULARY, event_schemas


def events_page(generated: str) -> str:
    """`generated`: the line that says that nobody should edit it."""
    schemas = event_schemas()
    return "".join(
        [
            "# Scale events\n\n",
            generated,
            "\nWhat event scalers send and provisioning workflows and webhooks answer: see [events](../events.md).  "
            "A consumer ignores fields that it does not know.  `kici-admin events schema` prints the schema.\n",
            *(part for name in VOCABULARY for part in _event(name, schemas)),
            "\n## JSON Schema\n\n```json\n",
            json.dumps(schemas, indent=2),
            "\n```\n",
        ]
    )


def _event(name: str, schemas: dict[str, Any]) -> Iterator[str]:
    schema = schemas["$defs"][VOCABULARY[name].__name__]
    secret = SECRET_FIELDS.get(name, ())
    yield f"\n## `{name}`\n\n{schema['description']}\n\n| field | type | |\n| --- | --- | --- |\n"
    for field, about in schema["properties"].items():
        notes = [
            note
            for note, holds in (("secret", field in secret), ("may be absent", field not in schema["required"]))
            if holds
        ]
        yield f"| `{field}` | {_type(about)} | {', '.join(notes)} |\n"


def _type(about: dict[str, Any]) -> str:
    if "$ref" in about:
        return "`" + str(about["$ref"]).rsplit("/", 1)[-1] + "`"
    if "anyOf" in about:
        return " or ".join(_type(each) for each in about["anyOf"] if each.get("type") != "null")
    if about.get("type") == "array":
        return f"array of {_type(about['items'])}"
    return str(about.get("type", "any"))
