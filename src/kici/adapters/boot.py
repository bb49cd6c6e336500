"""Which run of this host's kernel this is: the same for every process, another after each start of the machine."""

import re
import subprocess
from pathlib import Path

from kici.adapters.proc import PROC
from kici.adapters.proc import boot_id as linux_boot_id
from kici.decide.ledger import BOOT_TIME


def this_boot(proc: Path = PROC) -> str:
    """The kernel's own name for it; where it has none, the moment at which the machine was started."""
    try:
        return linux_boot_id(proc)
    except OSError:
        return f"{BOOT_TIME}{_boot_time_seconds(proc)}"


def _boot_time_seconds(proc: Path) -> int:
    try:
        text = (proc / "stat").read_text()
        found = re.search(r"^btime (\d+)$", text, re.MULTILINE)
    except OSError:
        argv = ["/usr/sbin/sysctl", "-n", "kern.boottime"]
        text = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=5).stdout
        found = re.search(r"\bsec = (\d+)", text)
    assert found is not None, f"no boot time in {text!r}"
    return int(found[1])
