"""The protocol as a page for people: written from the message classes, so that it cannot say anything else."""

import ast
import inspect
import typing
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType, UnionType
from typing import Any, Final

import msgspec

from kici.wire import agent_states, coordinator_half, messages

INTRODUCTION: Final = """
An agent opens a WebSocket to `/ws` and speaks first. Frames are JSON text of at most 4 MiB; `type` names the message,
names are camelCase, bytes are base64. Fields at their default may be left out, unknown fields are ignored, a message
of an unknown type is answered by `unsupported` and nothing else happens. A frame that cannot be read is answered by
`error` and ends the connection.

```mermaid
sequenceDiagram
    participant A as agent
    participant C as coordinator
    A->>C: auth.request
    C->>A: auth.success
    A->>C: agent.register (with the jobs it holds)
    C->>A: register.ack (with a verdict on each of them)
    A->>C: config.ack
    C->>A: job.dispatch
    A->>C: job.ack
    Note over C: commits "running"
    C->>A: job.start
    A->>C: job.status running
    loop output
        A->>C: log.chunk (offset)
        C->>A: log.ack (offset)
    end
    A->>C: job.status success
    Note over C: commits the end
    C->>A: job.status.ack
```

An agent that has no credential yet may trade a claim code for one at any time, before authentication above all. After
a broken connection the agent comes back, lists its job, and sends on from the offsets that the verdict names: output
is kept until it is acknowledged, and so is the final status. Nothing of a job runs before `job.start`.
"""


def page() -> str:
    """The text of the page, in Markdown, without a title."""
    parts = [
        INTRODUCTION,
        "\n## Times and limits\n\n| what | value |\n| --- | --- |\n",
        *(f"| {what} | {value} |\n" for what, value in _limits()),
        "\n## From the agent\n",
        *_messages(messages.AgentMessage),
        "\n## From the coordinator\n",
        *_messages(messages.CoordinatorMessage),
        "\n## Parts of messages\n",
        *_parts(),
        "\n## Close codes\n\nAfter a permanent one the agent program ends; after any other it comes back.\n\n",
        "| code | name | permanent |\n| --- | --- | --- |\n",
        *_close_codes(),
    ]
    return "".join(parts)


def _limits() -> Iterator[tuple[str, str]]:
    half = coordinator_half
    yield "authentication", f"{half.AUTH_SECONDS:g} s after the connection, else 4002"
    yield "registration", f"{half.REGISTRATION_SECONDS:g} s after authentication, else 4002"
    yield "heartbeat of the agent", "every 30 s, unless `register.ack` says otherwise"
    yield (
        "silence",
        f"noted after {half.UNHEALTHY_SECONDS:g} s, ends the connection (4004) after {half.DEAD_SECONDS:g} s",
    )
    yield "silence, seen by the agent", f"{agent_states.SILENCE_SECONDS:g} s without a frame, a ping or a pong"
    yield "rate", "100 messages and 500 KiB per second, bursts of 200 and 2 MiB; five seconds above end the connection"
    yield "output", "not limited by rate: paced by acknowledgements, at most 1 MiB of it is on its way"


def _messages(union: UnionType) -> Iterator[str]:
    for kind in typing.get_args(union):
        yield f"\n### {kind.__struct_config__.tag}\n\n{_doc(kind)}{_fields(kind)}"


def _parts() -> Iterator[str]:
    for kind in (messages.JobRef, messages.JobVerdict, messages.Reuse, messages.JobContainer, messages.Credentials):
        yield f"\n### {kind.__name__}\n\n{_doc(kind)}{_fields(kind)}"


def _doc(kind: type) -> str:
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "").replace("\n", " ")
    return f"{text}\n" if text else ""


def _fields(kind: type[msgspec.Struct]) -> str:
    fields = msgspec.structs.fields(kind)
    if not fields:
        return "\nNo fields.\n"
    hints = typing.get_type_hints(kind)
    docs = _field_docs(messages, kind.__name__)
    rows = [
        f"| `{field.encode_name}` | {_type(hints[field.name])} | {_default(field)} | {docs.get(field.name, '')} |\n"
        for field in fields
    ]
    return "".join(["\n| field | type | default | |\n| --- | --- | --- | --- |\n", *rows])


def _type(kind: Any) -> str:
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (UnionType, typing.Union):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "object of strings"
    plain = {str: "string", int: "integer", float: "number", bool: "boolean", bytes: "base64", type(None): "null"}
    return plain.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


def _default(field: Any) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{msgspec.json.encode(field.default_factory()).decode()}`"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def _field_docs(module: ModuleType, name: str) -> dict[str, str]:
    """The docstring below each field of a class."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        ast.unparse(field.target): inspect.cleandoc(str(after.value.value)).replace("\n", " ")
        for field, after in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _close_codes() -> Iterator[str]:
    for name, code in vars(messages.CloseCode).items():
        if isinstance(code, int):
            permanent = "yes" if code in messages.CloseCode.PERMANENT else ""
            yield f"| {code} | {name.lower().replace('_', ' ')} | {permanent} |\n"
