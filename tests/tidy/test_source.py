"""The source itself: rules of CONTRIBUTING that neither ruff nor the type checkers can see.

Each rule is a function from a parsed module to its faults; the examples at the end show that it finds what it is for.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "kici"
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60

SQL = re.compile(
    r"\s*(SELECT\s.+\sFROM\s|INSERT\s+(OR\s+\w+\s+)?INTO\s|UPDATE\s+\w+\s+SET\s|DELETE\s+FROM\s|WITH\s+\w+\s+AS\s*\("
    r"|(CREATE|ALTER|DROP)\s+(UNIQUE\s+)?(TABLE|INDEX|TRIGGER|VIEW)\s)",
    re.IGNORECASE | re.DOTALL,
)
LOOPS_OF_THE_AGENT = {"agent/container_step.py", "agent/program.py", "agent/step.py"}
SUPPRESSION = re.compile(r"#\s*(noqa: [A-Z0-9, ]+|type: ignore\[[\w, -]+\]|pyright: ignore\[\w+\])(.*)")


@dataclass(frozen=True)
class Module:
    name: str
    """Path below `src/kici`, with slashes."""
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        return self.name.split("/")[0]


Rule = Callable[[Module], Iterator[str]]


def modules() -> list[Module]:
    return [Module(path.relative_to(SRC).as_posix(), path.read_text()) for path in sorted(SRC.rglob("*.py"))]


def is_small(module: Module) -> Iterator[str]:
    lines = module.text.count("\n")
    if lines > MODULE_LINES_MAX:
        yield f"{lines} lines; {MODULE_LINES_MAX} is the limit: split it by idea"


def has_short_functions(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {lines} lines; {FUNCTION_LINES_MAX} is the limit"


def is_empty_package(module: Module) -> Iterator[str]:
    if module.name.endswith("__init__.py") and module.text.strip():
        yield "1: a package's __init__.py stays empty; import the module itself"


def has_docstring(module: Module) -> Iterator[str]:
    if not module.name.endswith("__init__.py") and ast.get_docstring(module.tree) is None:
        yield "1: no module docstring; say which idea lives here and what does not"


def keeps_sql_in_files(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.match(node.value):
            yield f"{node.lineno}: SQL in Python; name it in stores/<dialect>/queries"


def leaves_the_loop_alone(module: Module) -> Iterator[str]:
    if module.package in {"adapters", "kit", "testing"} or module.name in LOOPS_OF_THE_AGENT:
        return  # the agent is a program of its own: its loop is its clock
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Attribute) and node.attr in {"time", "create_task", "call_later", "call_at"}):
            continue
        owner = ast.unparse(node.value)
        if owner.endswith(("loop", "loop()")):
            yield f"{node.lineno}: {owner}.{node.attr}; ask the Clock port, or kit.supervise"


def gives_reasons(module: Module) -> Iterator[str]:
    lines = module.text.splitlines()
    for number, line in enumerate(lines, 1):
        found = SUPPRESSION.search(line)
        above = lines[number - 2].strip() if number > 1 else ""
        if found and not found[2].strip(" #-:") and not above.startswith("#"):
            yield f"{number}: {found[1]} without a reason; say why beside or above it"


def documents_settings(module: Module) -> Iterator[str]:
    """Every field of a class named `…Settings` says unit, default and reason below itself."""
    if module.package == "testing":
        return
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.ClassDef) and node.name.endswith("Settings")):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not _is_string(after):
                yield f"{field.lineno}: {node.name}.{ast.unparse(field.target)} has no docstring below it"


def _is_string(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


RULES: list[Rule] = [
    is_small,
    has_short_functions,
    is_empty_package,
    has_docstring,
    keeps_sql_in_files,
    leaves_the_loop_alone,
    gives_reasons,
    documents_settings,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module(rule: Rule) -> None:
    faults = [f"src/kici/{module.name}:{fault}" for module in modules() for fault in rule(module)]
    assert not faults, "\n".join(["", *faults])


LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (is_small, "a.py", "x = 1\n" * (MODULE_LINES_MAX + 1)),
        (has_short_functions, "a.py", LONG),
        (has_short_functions, "a.py", "class A:\n" + "".join(f"    {line}\n" for line in LONG.splitlines())),
        (is_empty_package, "a/__init__.py", "from kici.a.b import c\n"),
        (has_docstring, "a.py", "import os\n"),
        (keeps_sql_in_files, "a.py", "q = 'select a from b where c'\n"),
        (keeps_sql_in_files, "a.py", "q = f'''\n  UPDATE job SET x = {x}'''\n"),
        (keeps_sql_in_files, "a.py", "db.execute('INSERT OR IGNORE INTO t VALUES (1)')\n"),
        (leaves_the_loop_alone, "services/a.py", "asyncio.get_running_loop().time()\n"),
        (leaves_the_loop_alone, "services/a.py", "self._loop.create_task(x())\n"),
        (gives_reasons, "a.py", "x = y  # type: ignore[arg-type]\n"),
        (gives_reasons, "a.py", "x = y  # noqa: S603\n"),
        (documents_settings, "a.py", "class ASettings:\n    a_seconds: int = 3\n    b: int = 4\n    'why'\n"),
    ],
)
def test_rule_finds(rule: Rule, name: str, text: str) -> None:
    assert list(rule(Module(name, text)))


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (has_short_functions, "a.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
        (keeps_sql_in_files, "a.py", "x = 'Update the settings first'\n"),
        (leaves_the_loop_alone, "kit/a.py", "asyncio.get_running_loop().time()\n"),
        (leaves_the_loop_alone, "services/a.py", "self._group.create_task(x())\nspan.time\n"),
        (gives_reasons, "a.py", "x = y  # noqa: S603 the argument vector is ours\n"),
        (gives_reasons, "a.py", "# asyncpg has no stubs for this\nx = y  # type: ignore[arg-type]\n"),
        (documents_settings, "a.py", "class ASettings:\n    '''Doc.'''\n    a_seconds: int = 3\n    'why'\n"),
    ],
)
def test_rule_leaves_alone(rule: Rule, name: str, text: str) -> None:
    assert not list(rule(Module(name, text)))
