"""A bridge of microVMs by the commands `ip` and `nft`: one process for each step, one transaction for each guest."""

import asyncio
import fcntl
import json
import logging
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kici.adapters.host_commands import CommandFailed, HostCommands
from kici.adapters.links import index_of, master_of
from kici.adapters.nft import Nft
from kici.decide.isolate import FORWARD_MAP, INPUT_MAP, Needs, Policy, agent_of_chain, name_of
from kici.decide.microvm import TAP_PREFIX, Bridge, Guest, tap_of
from kici.decide.microvm_rules import (
    admit_guest,
    base_chains,
    bridge_base,
    dismiss_guest,
    missing_rules,
    remove_bridge,
)
from kici.domain.errors import Conflict, DeterministicRefusal, KiciError, NotFound, Retryable
from kici.ports.host_network import BridgeHealth

log = logging.getLogger(__name__)

_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
ISOLATION_PROBE: Final = "kici-isoprobe"
NETWORK_MANAGER: Final = Path("/etc/NetworkManager/conf.d")
UNMANAGED: Final = "90-kici-unmanaged.conf"
_EXISTS: Final = ("File exists", "already assigned")
_ABSENT: Final = ("Cannot find device",)
_NOT_AS_EXPECTED: Final = ("No such file", "File exists", "Device or resource busy", "does not exist")
_CHAIN: Final = re.compile(r"\tchain (\S+) \{")


class IpHostNetwork:
    """Contract: `ports.host_network.HostNetwork`.

    `egress`: the only interface to the world; None: any.  `network_manager`: where to tell it to leave our
    interfaces alone.
    """

    def __init__(
        self,
        bridge: Bridge,
        commands: HostCommands,
        *,
        egress: str | None = None,
        network_manager: Path = NETWORK_MANAGER,
    ) -> None:
        self._bridge = bridge
        self._commands = commands
        self._packets = Nft((*commands.prefix("nft"), "nft"))
        self._egress = egress
        self._network_manager = network_manager
        self._one_at_a_time = asyncio.Lock()
        """Transactions that meet in the kernel are tried again by `nft`, which costs more than waiting."""

    @property
    def bridge(self) -> Bridge:
        return self._bridge

    # ------------------------------------------------------------------ the bridge

    async def health(self) -> BridgeHealth:
        faults = [*await self._link_faults(), *await self._port_faults(), *await self._rule_faults()]
        return BridgeHealth(faults=tuple(faults))

    async def provision(self) -> None:
        bridge = self._bridge
        self._tell_network_manager()
        await self._tolerant(_EXISTS, "ip", "link", "add", "name", bridge.name, "type", "bridge")
        await self._tolerant(_EXISTS, "ip", "addr", "add", bridge.gateway_cidr, "dev", bridge.name)
        await self._run("ip", "link", "set", bridge.name, "up")
        await self._run("sysctl", "-w", "net.ipv4.ip_forward=1")
        await self._apply(bridge_base(bridge, egress=self._egress))
        await self._beside_docker(wanted=True)

    async def teardown(self) -> None:
        """Take bridge and rules away.  Guests that still run are cut off."""
        await self._apply(remove_bridge(self._bridge))
        await self._beside_docker(wanted=False)
        await self._tolerant(_ABSENT, "ip", "link", "del", self._bridge.name)

    async def probe_isolation(self) -> None:
        await self._tolerant(_ABSENT, "ip", "link", "del", ISOLATION_PROBE)
        try:
            await self._run("ip", "tuntap", "add", ISOLATION_PROBE, "mode", "tap")
        except KiciError as error:
            log.warning("network.isolation_not_probed", extra={"kici": {"error": str(error)}})
            return
        try:
            await self._run("ip", "link", "set", ISOLATION_PROBE, "master", self._bridge.name)
            await self._run("ip", "link", "set", ISOLATION_PROBE, "type", "bridge_slave", "isolated", "on")
        except CommandFailed as error:
            raise DeterministicRefusal(
                "this kernel cannot keep the ports of a bridge apart, so microVMs would reach each other below "
                f"every packet filter rule; they must not run here ({error})"
            ) from error
        finally:
            with suppress(KiciError):
                await self._run("ip", "link", "del", ISOLATION_PROBE)

    async def _link_faults(self) -> list[str]:
        bridge = self._bridge
        try:
            found = _listed(await self._run("ip", "-j", "addr", "show", "dev", bridge.name))
        except KiciError as error:
            text = str(error)
            return [f"bridge {bridge.name} is missing" if "does not exist" in text else text]
        faults = []
        if not any("UP" in link.get("flags", ()) for link in found):
            faults.append(f"bridge {bridge.name} is down")
        addresses = {
            f"{one.get('local')}/{one.get('prefixlen')}" for link in found for one in link.get("addr_info", ())
        }
        if bridge.gateway_cidr not in addresses:
            faults.append(f"bridge {bridge.name} has not the address {bridge.gateway_cidr}")
        return faults

    async def _port_faults(self) -> list[str]:
        try:
            ports = await self._ports()
        except KiciError as error:
            return [] if "does not exist" in str(error) else [str(error)]
        open_ports = [name for name, is_isolated in ports.items() if name.startswith(TAP_PREFIX) and not is_isolated]
        return [f"interface {name} is not isolated from its neighbours" for name in open_ports]

    async def _rule_faults(self) -> list[str]:
        wanted = base_chains(bridge_base(self._bridge, egress=self._egress))
        listed: dict[tuple[str, str, str], list[str]] = {}
        for family, table in sorted({key[:2] for key in wanted}):
            try:
                text = await self._run("nft", "-s", "list", "table", family, table)
            except CommandFailed as error:
                missing = "No such file" in error.output
                return [f"table {family} {table} is missing" if missing else str(error)]
            except KiciError as error:
                return [str(error)]
            listed |= {(family, table, chain): rules for chain, rules in _chains(text).items()}
        return missing_rules(wanted, listed)

    def _tell_network_manager(self) -> None:
        """A drop-in that adds to the list: files override each other by key."""
        if not self._network_manager.is_dir():
            return
        patterns = [f"interface-name:{TAP_PREFIX}*", f"interface-name:{self._bridge.name}"]
        text = "[keyfile]\n" + "".join(f"unmanaged-devices+={pattern}\n" for pattern in patterns)
        path = self._network_manager / UNMANAGED
        try:
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        except OSError as error:
            raise Retryable(
                f"cannot write {path}: {error.strerror}; run `kici-admin firecracker provision` as root"
            ) from error

    async def _beside_docker(self, *, wanted: bool) -> None:
        """A Docker engine drops what it does not know; its own hook for others lets our guests pass."""
        for side in ("-s", "-d"):
            rule = ("DOCKER-USER", side, str(self._bridge.subnet), "-j", "ACCEPT")
            with suppress(KiciError):
                await self._run("iptables", "-D", *rule)
            if wanted:
                with suppress(KiciError):
                    await self._run("iptables", "-I", *rule)

    # ------------------------------------------------------------------ guests

    async def make_tap(self, guest: Guest, *, owner: int | None) -> None:
        user = "" if owner is None else f" user {owner}"
        # Isolation is a command of its own: some kernels refuse it together with the master.
        lines = (
            f"tuntap add dev {guest.tap} mode tap{user}",
            f"link set {guest.tap} master {self._bridge.name}",
            f"link set {guest.tap} type bridge_slave isolated on",
        )
        try:
            await self._run("ip", "-batch", "-", stdin="".join(f"{line}\n" for line in lines))
        except CommandFailed as error:
            if "busy" in error.output.lower() or "File exists" in error.output:
                raise Conflict(f"there is an interface {guest.tap} already: {error}") from error
            raise

    async def admit(self, guest: Guest, *, policy: Policy, needs: Needs) -> None:
        script = admit_guest(self._bridge, guest, policy=policy, needs=needs)
        try:
            await self._apply(script)
        except Conflict:
            before = await self._owners(guest) - {name_of(guest.vm_id)}
            if not before:
                raise
            for owner in sorted(before):  # its maker was killed; nobody else gives this address away
                await self.dismiss(replace(guest, vm_id=owner, tap=tap_of(owner)))
            await self._apply(script)

    async def link_up(self, guest: Guest) -> None:
        if self._commands.sudo:
            await self._run("ip", "link", "set", guest.tap, "up")
        else:
            _set_up(guest.tap)  # one program less to start for each machine

    async def dismiss(self, guest: Guest) -> None:
        script = dismiss_guest(self._bridge, guest)
        try:
            await self._apply(script)
        except Conflict:
            owners = await self._owners(guest)
            for line in script.splitlines():
                is_anothers = "_forward {" in line or "_input {" in line
                if is_anothers and name_of(guest.vm_id) not in owners:
                    continue  # the address has another guest by now
                with suppress(Conflict):
                    await self._apply(f"{line}\n")

    async def remove_tap(self, name: str) -> bool:
        if not self._may_be_ours(name):
            return False
        try:
            await self._run("ip", "link", "del", name)
        except CommandFailed as error:
            if "Cannot find device" in error.output:
                return False
            raise
        return True

    async def taps(self) -> Sequence[str]:
        try:
            return sorted(await self._ports())
        except NotFound:
            return []

    async def admitted(self) -> dict[str, str]:
        elements = await self._packets.elements(self._bridge.fence.table, FORWARD_MAP)
        return {address: agent_of_chain(chain) for address, chain in elements.items()}

    def _may_be_ours(self, interface: str) -> bool:
        """Whether it is there, and on no bridge but ours: other coordinators of this host name theirs the same way."""
        try:
            master = master_of(interface)
            return index_of(interface) is not None and master in (None, index_of(self._bridge.name))
        except OSError as error:
            raise Retryable(f"cannot look at interface {interface}: {error.strerror or error}") from error

    async def _owners(self, guest: Guest) -> frozenset[str]:
        """Whose rules a guest's address has, as in names of chains."""
        table, address = self._bridge.fence.table, str(guest.address)
        found = [(await self._packets.elements(table, name)).get(address) for name in (FORWARD_MAP, INPUT_MAP)]
        return frozenset(agent_of_chain(chain) for chain in found if chain is not None)

    async def _ports(self) -> dict[str, bool]:
        """Interfaces on the bridge, and whether each is isolated.  Raises `NotFound` without the bridge."""
        try:
            text = await self._run("ip", "-j", "-d", "link", "show", "master", self._bridge.name)
        except CommandFailed as error:
            if "does not exist" in error.output:
                raise NotFound(f"bridge {self._bridge.name} does not exist") from error
            raise
        return {link["ifname"]: _is_isolated(link) for link in _listed(text)}

    # ------------------------------------------------------------------ commands

    async def _apply(self, script: str) -> None:
        """One transaction.  Raises `Conflict` when it does not fit what is there."""
        try:
            async with self._one_at_a_time:
                await self._run("nft", "-f", "-", stdin=script)
        except CommandFailed as error:
            if any(word in error.output for word in _NOT_AS_EXPECTED):
                raise Conflict(f"the packet filter is not as expected: {error}") from error
            raise

    async def _run(self, *argv: str, stdin: str = "") -> str:
        return await self._commands.run(*argv, stdin=stdin)

    async def _tolerant(self, harmless: Sequence[str], *argv: str) -> None:
        """Run a command whose work may be done already, which it says in one of these words."""
        try:
            await self._run(*argv)
        except CommandFailed as error:
            if not any(words in error.output for words in harmless):
                raise


def _set_up(interface: str) -> None:
    """What `ip link set … up` does."""
    name = interface.encode()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            found = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", name, 0))
            (flags,) = struct.unpack_from("H", found, 16)
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | _IFF_UP))
    except OSError as error:
        raise Retryable(f"cannot set interface {interface} up: {error.strerror}") from error


def _listed(text: str) -> list[dict[str, Any]]:
    found = json.loads(text or "[]")
    return [each for each in found if each]


def _is_isolated(link: dict[str, Any]) -> bool:
    data = link.get("linkinfo", {}).get("info_slave_data", {})
    return data.get("isolated") in (True, "on")


def _chains(listing: str) -> dict[str, list[str]]:
    """Rules of each chain, from what `nft` lists."""
    found: dict[str, list[str]] = {}
    rules: list[str] | None = None
    for line in listing.splitlines():
        match = _CHAIN.match(line)
        if match is not None:
            rules = found[match[1]] = []
        elif line == "\t}":
            rules = None
        elif rules is not None and not line.strip().startswith("type "):
            rules.append(line.strip())
    return found
