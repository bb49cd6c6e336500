"""Scalers files for tests: short ones from a template, and what is said about them."""

from textwrap import dedent, indent

from kici.config.load import Loaded, load_text
from kici.config.model import LabelSet, ScalerEntry, ScalersConfig

BARE_METAL = """\
name: host
type: bare-metal
maxAgents: 2
"""
SET = """\
- labels: [linux]
  binaryPath: kici-agent
"""
MICROVM = """\
name: vms
type: firecracker
maxAgents: 2
firecrackerPath: /opt/firecracker
jailerPath: /opt/jailer
kernelPath: /opt/vmlinux
uid: 100
gid: 100
"""
MICROVM_SET = """\
- labels: [vm]
  rootfsPath: /opt/rootfs
  memSizeMib: 4096
"""


def text(body: str) -> str:
    return "version: 1\n" + dedent(body)


def scaler(head: str = BARE_METAL, sets: str = SET, *, more: str = "", top: str = "") -> str:
    """A file with one scaler: its keys, its label sets, and more of both."""
    parts = [dedent(head), dedent(more), "labelSets:", indent(dedent(sets), "  ")]
    entry = "\n".join(part.rstrip("\n") for part in parts if part)
    first, *rest = entry.splitlines()
    head_of_file = "version: 1\n" + (dedent(top).rstrip("\n") + "\n" if top else "")
    return head_of_file + f"scalers:\n  - {first}\n" + "".join(f"    {line}\n" for line in rest)


def load(document: str) -> Loaded:
    return load_text(document.encode(), "scalers.yaml")


def config(document: str) -> ScalersConfig:
    loaded = load(document)
    assert loaded.config is not None, "\n".join(map(str, loaded.problems))
    return loaded.config


def entry(document: str) -> ScalerEntry:
    return config(document).scalers[0]


def label_set(document: str) -> LabelSet:
    return entry(document).label_sets[0]


def problems(document: str) -> list[str]:
    """What is wrong, as printed, without the file's name."""
    loaded = load(document)
    assert (loaded.config is None) == bool(loaded.problems)
    return [str(problem).removeprefix("scalers.yaml:") for problem in loaded.problems]


def problem(document: str) -> str:
    found = problems(document)
    assert len(found) == 1, found
    return found[0]


def warnings(document: str) -> list[str]:
    loaded = load(document)
    assert loaded.config is not None, "\n".join(map(str, loaded.problems))
    return [f"{notice.path}: {notice.text}" for notice in loaded.warnings]
