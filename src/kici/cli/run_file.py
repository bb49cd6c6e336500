"""A run file as it was written: its data, and where in the file each part of it stands."""

import re
from typing import Final

from kici.cli.errors import Refused
from kici.config.nodes import Mapping, Node, Scalar, Sequence

_STEP: Final = re.compile(r"\.([A-Za-z0-9_-]+)|\[(\d+)\]|\['([^']*)'\]")


class RunFile:
    def __init__(self, name: str, root: Node) -> None:
        self._name = name
        self._root = root

    def plain(self) -> object:
        """As JSON would hold it."""
        return _plain(self._root)

    def located(self, refusal: Refused) -> str:
        """The coordinator's faults, each with its place in the file."""
        faults = refusal.answer.get("errors", [])
        if not faults:
            return str(refusal.message)
        return "\n".join(f"{self._place(fault['path'])}: {fault['path']}: {fault['detail']}" for fault in faults)

    def _place(self, path: str) -> str:
        """Line and column of the innermost part of the path that exists."""
        node = self._root
        line, column = node.line, node.column
        for key, index, quoted in _STEP.findall(path):
            if isinstance(node, Mapping) and (key or quoted) in node.entries:
                entry = node.entries[key or quoted]
                line, column, node = entry.key.line, entry.key.column, entry.value
            elif isinstance(node, Sequence) and index and int(index) < len(node.items):
                node = node.items[int(index)]
                line, column = node.line, node.column
            else:
                break
        return f"{self._name}:{line}:{column}"


def _plain(node: Node) -> object:
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [_plain(item) for item in node.items]
    return {key: _plain(entry.value) for key, entry in node.entries.items()}
