"""The cable between a guest and its interface on the host, with a branch to the metadata service.

As in firecracker, what a guest sends to the service's address never gets to the host, and the service answers while
the interface is down.  The service itself is behind an interface in a network of its own.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address
from typing import Final

from tests.microvm.stand_in.outside import Outside

MAC: Final = bytes.fromhex("0200a9fea9fe")
FRAME_BYTES: Final = 65_550
_IP, _ARP = b"\x08\x00", b"\x08\x06"


class Wire:
    def __init__(self, outside: Outside, tap: str) -> None:
        self._outside = outside
        self._guest, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """`end` is the VMM's."""
        self._guest.setblocking(False)
        self._tap = outside.open_tap(tap)
        self._service: int | None = None
        self._address = b""

    def plug_in(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._guest, self._from_guest)
        loop.add_reader(self._tap, lambda: self._to_guest(self._tap))
        if self._service is not None:
            service = self._service
            loop.add_reader(service, lambda: self._to_guest(service))

    def branch(self, address: str) -> socket.socket:
        """Where the metadata service listens, from the guest's side at that address.  Raises `OSError`."""
        network = self._outside.new_network()
        with self._outside.inside(network):
            self._service = self._outside.open_tap("mmds")
        lines = (
            f"link set mmds address {MAC.hex(':')}",
            f"addr add {address}/32 dev mmds",
            "link set mmds up",
            "route add default dev mmds",
        )
        self._outside.run("ip", "-batch", "-", stdin="".join(f"{line}\n" for line in lines), network=network)
        self._address = IPv4Address(address).packed
        with self._outside.inside(network):
            return socket.create_server((address, 80))

    def _from_guest(self) -> None:
        for frame in _frames(lambda: self._guest.recv(FRAME_BYTES)):
            kind = frame[12:14]
            is_asked = (kind == _IP and frame[30:34] == self._address) or (
                kind == _ARP and frame[38:42] == self._address
            )
            with suppress(OSError):  # an interface that is down takes none
                if self._service is not None and is_asked:
                    os.write(self._service, (MAC if kind == _IP else frame[:6]) + frame[6:])
                else:
                    os.write(self._tap, frame)

    def _to_guest(self, source: int) -> None:
        for frame in _frames(lambda: os.read(source, FRAME_BYTES)):
            with suppress(BlockingIOError, ConnectionError):  # a cable has no memory
                self._guest.send(frame)


def _frames(read: Callable[[], bytes]) -> list[bytes]:
    found: list[bytes] = []
    with suppress(OSError):
        while len(found) < 64:
            found.append(read())
    return found
