"""What a guest does that was warmed up to be copied, and what each copy does to be itself.

All copies share the memory of the one that was stopped, so nothing secret may be in it, and each renews what must
not be the same in two machines before it looks at what else it was told.
"""

import fcntl
import os
import struct
import sys
import time
from contextlib import suppress
from typing import Final

from kici.agent.boot_data import Renewal
from kici.agent.guest_network import become, can_become

DEVICE: Final = "eth0"
PORTS: Final = "/proc/sys/net/ipv4/ip_local_port_range"
"""Copies choose ports of connections alike, by a secret that the kernel draws once: each gets another range, lest the
next guest of an address meets what is left of connections of the one before."""
FIRST_PORT: Final = 32_768
LAST_PORT: Final = 60_999
_RNDADDENTROPY: Final = 0x40085203
_RNDRESEEDCRNG: Final = 0x5207


def renewals() -> list[str]:
    """What this guest can renew: each is tried, with what it has."""
    found = []
    may_address, may_mac = can_become(DEVICE)
    if may_address:
        found.append("address")
    if _works(lambda: time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))):
        found.append("clock")
    if _works(lambda: stir(os.urandom(32))):
        found.append("entropy")
    if may_mac:
        found.append("mac")
    return found


def renew(told: Renewal) -> None:
    """Become a machine of its own.  Raises `OSError` for what the kernel refuses."""
    stir(told.entropy)
    time.clock_settime(time.CLOCK_REALTIME, told.now_ms / 1000)
    become(told.network, told.mac)
    with suppress(OSError), open(PORTS, "w", encoding="ascii") as file:
        file.write(f"{FIRST_PORT + 2 * (os.urandom(1)[0] << 4)} {LAST_PORT}")


def stir(entropy: bytes) -> None:
    """Mix this into what random numbers come from, the kernel's and ours, and have all of them begin anew."""
    with open("/dev/urandom", "wb", buffering=0) as device:
        told = struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy
        fcntl.ioctl(device, _RNDADDENTROPY, told)
        fcntl.ioctl(device, _RNDRESEEDCRNG)
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(len(entropy)), 0.0)


def _works(attempt: object) -> bool:
    assert callable(attempt)
    try:
        attempt()
    except OSError:
        return False
    return True
