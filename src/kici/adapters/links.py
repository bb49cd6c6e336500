"""Network interfaces asked for in the kernel's own words (rtnetlink): no program to start for a short question."""

import os
import socket
import struct
from typing import Final

_GET: Final = 18
_REQUEST: Final = 1
_ERROR: Final = 2
_NAME: Final = 3
_MASTER: Final = 10
_HEADER: Final = struct.Struct("=IHHII")
_LINK: Final = struct.Struct("=BxHiII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_ANSWER_BYTES: Final = 65_536
_ANSWER_SECONDS: Final = 5.0


def index_of(interface: str) -> int | None:
    """Number of an interface of this network namespace; None: there is none of that name."""
    try:
        return socket.if_nametoindex(interface)
    except OSError:
        return None


def master_of(interface: str) -> int | None:
    """Number of the bridge that an interface is a port of; None: of none, or there is no such interface.

    Raises `OSError` when the kernel does not answer.
    """
    if index_of(interface) is None:
        return None
    name = interface.encode() + b"\0"
    body = _LINK.pack(0, 0, 0, 0, 0) + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(name), _NAME) + name
    body += bytes(-len(body) % 4)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _GET, _REQUEST, 1, 0) + body)
        answer = kernel.recv(_ANSWER_BYTES)
    return _master(answer)


def _master(answer: bytes) -> int | None:
    length, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if code in (-19, 0):  # ENODEV: it went meanwhile
            return None
        raise OSError(-code, os.strerror(-code))
    at = _HEADER.size + _LINK.size
    while at + _ATTRIBUTE.size <= length:
        size, attribute = _ATTRIBUTE.unpack_from(answer, at)
        if attribute == _MASTER:
            return int(struct.unpack_from("=I", answer, at + _ATTRIBUTE.size)[0])
        at += max(size + (-size % 4), _ATTRIBUTE.size)
    return None
