"""Where container engines listen, unless somebody says otherwise."""

from collections.abc import Mapping
from typing import Final

DOCKER: Final = "docker"
PODMAN: Final = "podman"
DOCKER_SOCKET: Final = "/var/run/docker.sock"
PODMAN_SOCKET: Final = "/run/podman/podman.sock"


def usual_sockets(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Kind and path, in the order in which they are tried."""
    sockets = [(DOCKER, DOCKER_SOCKET), (PODMAN, PODMAN_SOCKET)]
    folder = environ.get("XDG_RUNTIME_DIR")
    if folder:
        sockets.append((PODMAN, f"{folder}/podman/podman.sock"))
    return sockets


def named_engine(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Kind and address of the engine that the usual variables name; None: none of them is set to one of ours."""
    for variable in ("DOCKER_HOST", "CONTAINER_HOST"):
        url = environ.get(variable, "")
        if url.startswith(("unix://", "tcp://")):
            return (PODMAN if "podman" in url else DOCKER), url
    return None
