"""The stand-in for firecracker as files that a scaler can be told of, and where its description comes from."""

import atexit
import json
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CASES = Path(os.environ.get("KICI_CASES") or ROOT.parent / "shared/cases")


@cache
def api_description() -> dict[str, Any]:
    """Firecracker's interface as its makers publish it.  Skips where the cases are not at hand."""
    path = CASES / "firecracker-api.yaml"
    if not path.exists():
        pytest.skip(f"there is no {path}; set KICI_CASES")
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@cache
def stand_in_programs() -> Path:
    """A folder with `firecracker` and `jailer`."""
    folder = Path(tempfile.mkdtemp(prefix="kici-stand-in-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    description = folder / "description.json"
    description.write_text(json.dumps(api_description()))
    for name in ("firecracker", "jailer"):
        command = f"{sys.executable} -m tests.microvm.stand_in {description} {name}"
        (folder / name).write_text(f'#!/bin/sh\nexec env PYTHONPATH={ROOT}:{ROOT}/src {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder
