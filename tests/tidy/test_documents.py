"""Documents: links lead somewhere, generated pages are what the code generates, nothing names a developer's machine."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kici.agent.environment import OURS

ROOT = Path(__file__).parents[2]
SKIPPED = {".git", ".hypothesis", ".state", ".venv", "bench-results", "build", "dist", "node_modules"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Spelled in parts, so that this file does not find itself.
MACHINE = re.compile("/work/" + "(main|shared)|\\." + "library/|/root/\\." + "pyenv")


def files(pattern: str) -> list[Path]:
    """Files of the project, without what tools leave behind."""
    found = []
    for folder, names, children in os.walk(ROOT):
        names[:] = [name for name in names if name not in SKIPPED and not name.endswith(("cache", "cache__", "-info"))]
        found += [Path(folder, child) for child in children if Path(folder, child).match(pattern)]
    return sorted(found)


def anchors(page: str) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists():
            yield f"{page.relative_to(ROOT)}: {target} leads nowhere"
        elif anchor and anchor not in anchors(there.read_text()):
            yield f"{page.relative_to(ROOT)}: {target} names no heading there"


def test_links_lead_somewhere() -> None:
    faults = [fault for page in files("*.md") for fault in dead_links(page)]
    assert not faults, "\n".join(["", *faults])


def test_a_dead_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One Head-ing\n[a](#one-head-ing) [b](gone.md) [c](#two) [d](https://example.org)\n")
    assert [fault.split()[1] for fault in dead_links(page)] == ["gone.md", "#two"]


def test_nothing_names_a_developers_machine() -> None:
    faults = []
    for path in files("*"):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if MACHINE.search(text):
            faults.append(str(path.relative_to(ROOT)))
    assert faults == []


def test_generated_pages_are_what_the_code_generates() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "docs.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_the_agent_names_its_variables_and_no_others() -> None:
    rows = re.findall(r"^\| `(KICI_[A-Z_]+)`", (ROOT / "docs" / "reference" / "agent.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(OURS)


def test_every_decision_record_is_listed() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    records = [path.name for path in files("docs/adr/[0-9]*.md")]
    assert records
    assert [name for name in records if f"({name})" not in index] == []
