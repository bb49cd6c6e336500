"""What the source says below each field: the texts of the reference page and of the schema."""

import ast
import inspect
import re
import sys
from functools import cache
from itertools import pairwise
from typing import Any

from kici.config.shapes import Table


@cache
def field_docs(model: Any) -> dict[str, str]:
    """The docstring below each field of a class (or of none), on one line, by field."""
    docs: dict[str, str] = {}
    for field, after in pairwise(_class(model).body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


def key_docs(table: Table) -> dict[str, str]:
    """What to tell people about the keys of a mapping, by key.  A key that is left out is None in the source."""
    docs = field_docs(table.build)
    return {rule.name: for_readers(docs[rule.attribute]) for rule in table.keys.values() if rule.attribute in docs}


def for_readers(text: str) -> str:
    return re.sub(r"\bFalse: ", "`false`: ", re.sub(r"\bNone\b", "Absent", text))


def _class(model: Any) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__]))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model.__name__)
