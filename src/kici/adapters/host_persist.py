"""Making the bridge of microVMs again at every start of a host with systemd: a script, and a unit that runs it."""

import shlex
from pathlib import Path
from typing import Final

from kici.decide.microvm import Bridge
from kici.domain.errors import DeterministicRefusal

SCRIPTS: Final = Path("usr/local/lib/kici-firecracker")
UNITS: Final = Path("etc/systemd/system")
_UNIT: Final = """\
[Unit]
Description=Network bridge {bridge} of KiCI microVMs
After=network-online.target nftables.service
Wants=network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={script}

[Install]
WantedBy=multi-user.target
"""


def persist(bridge: Bridge, *, program: str, egress: str | None, root: Path = Path("/")) -> list[Path]:
    """Write script and unit, and enable the unit; what was written.  Raises `DeterministicRefusal`."""
    script = root / SCRIPTS / f"provision-{bridge.name}.sh"
    unit = root / UNITS / f"kici-fc-net-{bridge.name}.service"
    wanted = root / UNITS / "multi-user.target.wants" / unit.name
    words = [program, "firecracker", "provision", "--bridge", bridge.name, "--cidr", bridge.gateway_cidr]
    words += ["--table", bridge.table, *(() if egress is None else ("--host-iface", egress))]
    try:
        for folder in (script.parent, wanted.parent):
            folder.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
        script.chmod(0o755)
        unit.write_text(_UNIT.format(bridge=bridge.name, script=f"/{SCRIPTS}/{script.name}"))
        wanted.unlink(missing_ok=True)
        wanted.symlink_to(f"/{UNITS}/{unit.name}")
    except OSError as error:
        raise DeterministicRefusal(f"cannot write {error.filename}: {error.strerror}; --persist needs root") from error
    return [script, unit]


def forget(bridge: Bridge, *, root: Path = Path("/")) -> None:
    """Take script and unit away again."""
    unit = f"kici-fc-net-{bridge.name}.service"
    for path in (SCRIPTS / f"provision-{bridge.name}.sh", UNITS / "multi-user.target.wants" / unit, UNITS / unit):
        (root / path).unlink(missing_ok=True)
