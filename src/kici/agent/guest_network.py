"""The network interface of a guest, by the kernel's oldest calls: nothing else has to be there for them."""

import errno
import fcntl
import socket
import struct
from contextlib import suppress
from typing import Final

from kici.agent import boot_data
from kici.agent.boot_data import Network

_SIOCADDRT: Final = 0x890B
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCGIFADDR: Final = 0x8915
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_IFF_UP: Final = 1
_RTF_UP_GATEWAY: Final = 3
_SIOCSIFHWADDR: Final = 0x8924
_SIOCGIFHWADDR: Final = 0x8927
_ARPHRD_ETHER: Final = 1
_ANYWHERE: Final = struct.pack("HH4s8x", socket.AF_INET, 0, bytes(4))


def network_up() -> None:
    """Whatever of it the kernel has not done by itself."""
    with open("/proc/cmdline", encoding="utf-8", errors="replace") as file:
        network = boot_data.parse_network(file.read())
    with _control() as control:
        _link_up(control, "lo")
        if network is not None and _address_of(control, network.device) != network.address:
            _configure(control, network)


def become(network: Network, mac: str) -> None:
    """Have another address, hardware address and way out than before.  Raises `OSError`."""
    with _control() as control:
        set_mac(control, network.device, mac)
        _configure(control, network)


def can_become(device: str) -> tuple[bool, bool]:
    """Whether this kernel lets us change the address of an interface, and its hardware address."""
    with _control() as control:
        try:
            address = _address_of(control, device)
            if address is not None:
                fcntl.ioctl(control, _SIOCSIFADDR, _request(device, address))
            may_address = True
        except OSError:
            may_address = False
        try:
            set_mac(control, device, _mac_of(control, device))
            may_mac = True
        except OSError:
            may_mac = False
    return may_address, may_mac


def set_mac(control: socket.socket, device: str, mac: str) -> None:
    octets = bytes.fromhex(mac.replace(":", ""))
    fcntl.ioctl(control, _SIOCSIFHWADDR, struct.pack("16sH6s16x", device.encode(), _ARPHRD_ETHER, octets))


def _mac_of(control: socket.socket, device: str) -> str:
    found = fcntl.ioctl(control, _SIOCGIFHWADDR, struct.pack("16s24x", device.encode()))
    return bytes(found[18:24]).hex()


def _configure(control: socket.socket, network: Network) -> None:
    fcntl.ioctl(control, _SIOCSIFADDR, _request(network.device, network.address))
    fcntl.ioctl(control, _SIOCSIFNETMASK, _request(network.device, network.netmask))
    _link_up(control, network.device)
    if network.gateway:
        gateway = _sockaddr(network.gateway)
        route = struct.pack("L16s16s16sH", 0, _ANYWHERE, gateway, _ANYWHERE, _RTF_UP_GATEWAY)
        with suppress(FileExistsError):
            fcntl.ioctl(control, _SIOCADDRT, route.ljust(120, b"\0"))


def _link_up(control: socket.socket, device: str) -> None:
    found = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", device.encode(), 0))
    (flags,) = struct.unpack_from("H", found, 16)
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags | _IFF_UP))


def _address_of(control: socket.socket, device: str) -> str | None:
    try:
        found = fcntl.ioctl(control, _SIOCGIFADDR, struct.pack("16s24x", device.encode()))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return socket.inet_ntoa(found[20:24])


def _control() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _request(device: str, address: str) -> bytes:
    return struct.pack("16s16s8x", device.encode(), _sockaddr(address))


def _sockaddr(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
