"""Which engine a scaler uses."""

from collections.abc import Callable

import pytest

from kici.adapters.docker_engine_find import find_engine
from kici.domain.engine_sockets import DOCKER_SOCKET, PODMAN_SOCKET
from kici.domain.errors import DeterministicRefusal
from kici.ports.engine import EngineAddress, EngineKind


def find(*there: str, runtime: str = "auto", socket_path: str | None = None, host: str | None = None) -> EngineAddress:
    usable: Callable[[str], bool] = there.__contains__
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    return find_engine(runtime=runtime, socket_path=socket_path, host=host, environ=environ, usable=usable)


@pytest.mark.spec("scaler 27.4.1")
def test_a_hint_chooses_between_two() -> None:
    assert find(DOCKER_SOCKET, PODMAN_SOCKET).kind is EngineKind.DOCKER
    assert find(DOCKER_SOCKET, PODMAN_SOCKET, runtime="podman").socket == PODMAN_SOCKET


@pytest.mark.spec("scaler 27.4.2")
def test_what_cannot_be_used_is_passed_over() -> None:
    assert find("/run/user/7/podman/podman.sock").kind is EngineKind.PODMAN


def test_a_named_socket_and_a_remote_engine() -> None:
    assert find("/x/podman.sock", socket_path="/x/podman.sock").kind is EngineKind.PODMAN
    remote = find(host="tcp://10.0.0.1:2376")
    assert (remote.is_local, remote.socket) == (False, None)


@pytest.mark.parametrize("socket_path", [None, "/nowhere"])
def test_nothing_found_names_what_was_tried(socket_path: str | None) -> None:
    with pytest.raises(DeterministicRefusal) as caught:
        find(socket_path=socket_path)
    assert (socket_path or DOCKER_SOCKET) in str(caught.value)
