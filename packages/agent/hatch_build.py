"""Picks the agent's modules out of the common source tree (or out of the copy in a source distribution)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = [
    "__init__.py",
    "py.typed",
    "agent",
    "apps/__init__.py",
    "apps/agent.py",
    "domain/__init__.py",
    "domain/engine_sockets.py",
    "domain/errors.py",
    "domain/labels.py",
    "domain/platform.py",
    "kit/__init__.py",
    "kit/backoff.py",
    "kit/supervise.py",
    "kit/version.py",
    "wire/__init__.py",
    "wire/agent_effects.py",
    "wire/agent_half.py",
    "wire/agent_settings.py",
    "wire/agent_states.py",
    "wire/codec.py",
    "wire/container_order.py",
    "wire/held_job.py",
    "wire/leaving.py",
    "wire/messages.py",
    "wire/outbox.py",
    "wire/route.py",
    "wire/timers.py",
]
"""What `kici.agent.program` imports, and not a module more: a test compares."""


class AgentModules(BuildHookInterface[Any]):
    """Adds `PARTS` as the package `kici`; in a source distribution below `src`, as in the tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        here = Path(self.root)
        source = next(path for path in (here / "src" / "kici", here.parents[1] / "src" / "kici") if path.is_dir())
        target = "src/kici" if self.target_name == "sdist" else "kici"
        for part in PARTS:
            build_data["force_include"][str(source / part)] = f"{target}/{part}"
