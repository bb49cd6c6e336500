"""Hosts that are network namespaces on one switch, without a way out; any two of them can be cut off from each other.

Needs root, `ip`, `nft` and `nsenter`.  Programs keep their files and their process ids: only the network is apart.
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from itertools import count
from types import TracebackType
from typing import Final, Self

SUBNET: Final = "10.77.0"
NETWORK: Final = f"{SUBNET}.0/24"
_numbers = count(1)


class NetworkLab:
    """Entering makes the hosts, leaving removes them; programs in them must have ended by then."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._prefix = f"kici-{os.getpid()}-{next(_numbers)}"
        self._hosts = {host: number for number, host in enumerate(hosts, 1)}
        self._cuts: frozenset[frozenset[str]] = frozenset()

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: str) -> str:
        return f"{SUBNET}.{self._hosts[host]}"

    def within(self, host: str) -> tuple[str, ...]:
        """A command that runs another one on the host, in its own process."""
        return ("nsenter", f"--net=/run/netns/{self._name(host)}")

    def cut(self, *links: tuple[str, str]) -> None:
        """Exactly these pairs of hosts cannot reach each other from now on: nothing passes, nobody is told."""
        self._cuts = frozenset(frozenset(link) for link in links)
        rules = [
            f"iifname {self._port(one)} oifname {self._port(other)} drop"
            for link in sorted(map(sorted, self._cuts))
            for one, other in (link, link[::-1])
        ]
        lines = [
            "add table bridge cuts",
            "delete table bridge cuts",
            "table bridge cuts {",
            "chain passing {",
            "type filter hook forward priority 0;",
            *rules,
            "}",
            "}",
        ]
        _run((*self.within("switch"), "nft", "-f", "-"), given="\n".join([*lines, ""]))

    def _make(self) -> None:
        for host in ("switch", *self._hosts):
            _run(("ip", "netns", "add", self._name(host)))
            _run((*self.within(host), "ip", "link", "set", "lo", "up"))
        switch = self.within("switch")
        _run((*switch, "ip", "link", "add", "bridge", "type", "bridge"))
        _run((*switch, "ip", "link", "set", "bridge", "up"))
        for host in self._hosts:
            port = self._port(host)
            peer = ("peer", "name", "eth0", "netns", self._name(host))
            _run((*switch, "ip", "link", "add", port, "type", "veth", *peer))
            _run((*switch, "ip", "link", "set", port, "master", "bridge", "up"))
            _run((*self.within(host), "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0"))
            _run((*self.within(host), "ip", "link", "set", "eth0", "up"))

    def _remove(self) -> None:
        for host in ("switch", *self._hosts):
            subprocess.run(("ip", "netns", "delete", self._name(host)), capture_output=True, check=False)

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _port(self, host: str) -> str:
        return f"p-{host}"


def _run(command: Sequence[str], *, given: str = "") -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        command, input=given, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
