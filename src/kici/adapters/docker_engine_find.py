"""Where the container engine of a scaler is: named in the configuration, or the first of the usual sockets."""

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from kici.domain.engine_sockets import usual_sockets
from kici.domain.errors import DeterministicRefusal
from kici.ports.engine import EngineAddress, EngineKind


def is_usable(path: str) -> bool:
    """Whether there is a socket that this process may read and write."""
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode) and os.access(path, os.R_OK | os.W_OK)
    except OSError:
        return False


def find_engine(
    *,
    runtime: str,
    socket_path: str | None,
    host: str | None,
    environ: Mapping[str, str],
    usable: Callable[[str], bool] = is_usable,
) -> EngineAddress:
    """`runtime`: `auto`, `docker` or `podman`.  Raises `DeterministicRefusal` with everything that was tried."""
    if host is not None:
        kind = EngineKind.PODMAN if runtime == EngineKind.PODMAN else EngineKind.DOCKER
        return EngineAddress(url=host, kind=kind, is_local=False)
    if socket_path is not None:
        kind = EngineKind.PODMAN if "podman" in socket_path else EngineKind.DOCKER
        if not usable(socket_path):
            raise DeterministicRefusal(
                f"no container engine answers at socketPath {socket_path}: it is no socket that we may use; "
                "start the engine, or mend the path or its rights"
            )
        return EngineAddress(url=f"unix://{socket_path}", kind=kind, is_local=True)
    tried = []
    for name, path in usual_sockets(environ):
        if runtime not in ("auto", name):
            continue
        if usable(path):
            return EngineAddress(url=f"unix://{path}", kind=EngineKind(name), is_local=True)
        tried.append(path)
    raise DeterministicRefusal(
        f"no container engine found: {' and '.join(tried) or 'nothing'} tried; install Docker or Podman, "
        "let this user use its socket, or set socketPath or host on the scaler"
    )


def has_engine(environ: Mapping[str, str], usable: Callable[[str], bool] = is_usable) -> bool:
    """Whether an engine listens at one of the usual sockets."""
    return any(usable(path) for _, path in usual_sockets(environ))
