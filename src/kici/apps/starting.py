"""What programs that serve have in common: logs, a place to listen, the scalers files, the host's ledger."""

import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from kici.adapters.boot import this_boot
from kici.adapters.ledger_files import choose_folder, usual_places
from kici.adapters.machine_ledger import FileLedger
from kici.config.environment import CoordinatorSettings, LogFormat
from kici.config.load import load_scalers
from kici.config.model import BackendType, ScalersConfig
from kici.domain.errors import Misconfigured
from kici.domain.ids import InstanceId
from kici.observe import logging_setup
from kici.ports.clock import Clock

log = logging.getLogger(__name__)


def start_logging(settings: CoordinatorSettings) -> None:
    logging_setup.set_up_logging(
        log_format=logging_setup.LogFormat.JSON if _is_json(settings) else logging_setup.LogFormat.PLAIN,
        level=logging.getLevelNamesMapping()[settings.log_level.upper()],
    )


def _is_json(settings: CoordinatorSettings) -> bool:
    if settings.log_format is LogFormat.AUTO:
        return not sys.stderr.isatty()
    return settings.log_format is LogFormat.JSON


def read_scalers(settings: CoordinatorSettings) -> ScalersConfig | tuple[str, ...]:
    """The scalers files: a valid configuration, or every problem with its place."""
    loaded = load_scalers(settings.scaler_config_path, settings.scaler_config_dir)
    return loaded.config or tuple(str(problem) for problem in loaded.problems)


async def room_for_microvms(settings: CoordinatorSettings, data_dir: Path, clock: Clock) -> None:
    """Raises `Retryable` when machines are to be made here and their disk is full, whatever was cleared away."""
    config = read_scalers(settings)
    if isinstance(config, ScalersConfig) and any(entry.type is BackendType.FIRECRACKER for entry in config.scalers):
        from kici.apps.microvm_room import guard

        verdict = await guard(config, data_dir=data_dir, clock=clock)
        if verdict is not None and verdict.reaped:
            fields = {"reaped": verdict.reaped, "free_bytes": verdict.free_bytes_after}
            log.warning("vm.disk_cleared", extra={"kici": fields})


def host_ledger(settings: CoordinatorSettings, environ: Mapping[str, str], instance_id: InstanceId) -> FileLedger:
    """Touches nothing before there is a machine pool."""
    places = usual_places(environ, Path.home())
    return FileLedger(
        instance_id=instance_id,
        boot=this_boot(),
        folder=lambda: choose_folder(settings.machine_ledger_dir, places),
    )


def listener_at(host: str, port: int) -> socket.socket:
    """Bound, not yet listening: the port is known, and nobody is let in before recovery is over."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    if os.name != "nt":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Misconfigured(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host"
        ) from error
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """Where programs on this machine reach it."""
    port = listener.getsockname()[1]
    if host in ("0.0.0.0", ""):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
