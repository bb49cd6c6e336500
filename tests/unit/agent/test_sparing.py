"""Leaving out modules that a library imports and does not use."""

import subprocess
import sys

from kici.agent.sparing import without

SPARED = ("importlib.metadata", "urllib.request", "email.message", "zipfile", "http.client")


def test_an_absent_module_is_empty_in_the_block_and_real_after_it() -> None:
    with without("colorsys", "json"):
        import colorsys

        assert not hasattr(colorsys, "rgb_to_hsv")
        assert sys.modules["json"].dumps
    assert "colorsys" not in sys.modules


def test_an_agent_starts_without_what_costs_and_serves_nobody() -> None:
    """In a process of its own: here they have long been imported."""
    code = f"import sys, kici.agent.program as p; print(*(name for name in {SPARED} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_what_was_spared_can_be_imported_later() -> None:
    code = (
        "import kici.agent.program, importlib.metadata, urllib.request\n"
        "print(importlib.metadata.version('websockets'), urllib.request.getproxies.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 2
