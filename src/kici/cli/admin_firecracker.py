"""Operators: hosts of microVMs.  These commands work on this machine, without a coordinator."""

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Interface
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kici.cli.connection import environment
from kici.cli.errors import CliError
from kici.cli.jobs import as_json
from kici.cli.output import print_json, print_table
from kici.domain.errors import KiciError

if TYPE_CHECKING:
    from kici.adapters.host_network import IpHostNetwork
    from kici.decide.microvm import Bridge

_FILE = click.Path(dir_okay=False, exists=True, path_type=Path)
_DIR = click.Path(file_okay=False, exists=True, path_type=Path)


def _cidr(_: click.Context, __: click.Parameter, value: str) -> IPv4Interface:
    try:
        interface = IPv4Interface(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}; the address of the bridge is expected, such as 10.0.0.1/24") from None
    if interface.network.prefixlen > 30 or interface.ip == interface.network.network_address:
        raise click.BadParameter(f"{value} is no address of a host in a network that has room for guests")
    return interface


def on_bridge(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which bridge is meant."""
    for option in (
        click.option("--sudo", is_flag=True, help="Run what needs root by `sudo -n`."),
        click.option("--host-iface", metavar="IF", help="The only interface to the world (default: any)."),
        click.option(
            "--table", default="kici", show_default=True, metavar="T", help="What nftables tables begin with."
        ),
        click.option("--cidr", default="10.0.0.1/24", show_default=True, callback=_cidr, help="Address of the bridge."),
        click.option("--bridge", default="kici-br0", show_default=True, metavar="BR", help="The bridge."),
    ):
        command = option(command)
    return command


@click.group()
def firecracker() -> None:
    """Prepare and check this host for microVMs."""


@firecracker.command()
@on_bridge
@click.option("--persist", is_flag=True, help="Do it again at every start of this host (systemd).")
def provision(
    bridge: str, cidr: IPv4Interface, table: str, host_iface: str | None, *, sudo: bool, persist: bool
) -> None:
    """Make the bridge and its packet filter rules, or mend them.  microVMs that run keep theirs."""
    made = _bridge(bridge, cidr, table)

    async def work(network: "IpHostNetwork") -> None:
        await network.provision()
        await network.probe_isolation()

    _run("provision", lambda: _on(made, host_iface, work, sudo=sudo))
    if persist:
        from kici.adapters.host_persist import persist as write

        program = shutil.which("kici-admin") or f"{Path(sys.executable).parent}/kici-admin"
        try:
            for path in write(made, program=program, egress=host_iface):
                click.echo(f"wrote {path}", err=True)
        except KiciError as error:
            raise CliError(f"firecracker provision failed: {error}") from error
    click.echo(f"Firecracker bridge {bridge} provisioned{' + persisted' if persist else ''}.")


@firecracker.command()
@on_bridge
@click.pass_context
def verify(
    ctx: click.Context, bridge: str, cidr: IPv4Interface, table: str, host_iface: str | None, *, sudo: bool
) -> None:
    """Say whether the bridge is as it should be.  Exits with 1 when it is not."""
    made = _bridge(bridge, cidr, table)

    async def work(network: "IpHostNetwork") -> str:
        health = await network.health()
        return "" if health.is_healthy else str(health)

    faults = _run("verify", lambda: _on(made, host_iface, work, sudo=sudo))
    if faults:
        click.echo(f"UNHEALTHY: {bridge}: {faults}")
        ctx.exit(1)
    click.echo(f"OK: {bridge} healthy ({cidr}, table {made.fence.table})")


@firecracker.command()
@on_bridge
def teardown(bridge: str, cidr: IPv4Interface, table: str, host_iface: str | None, *, sudo: bool) -> None:
    """Take the bridge and its rules away.  microVMs that still run are cut off."""
    made = _bridge(bridge, cidr, table)

    async def work(network: "IpHostNetwork") -> None:
        await network.teardown()

    _run("teardown", lambda: _on(made, host_iface, work, sudo=sudo))
    from kici.adapters.host_persist import forget

    try:
        forget(made)
    except OSError as error:
        raise CliError(f"cannot remove {error.filename}: {error.strerror}") from error
    click.echo(f"Firecracker bridge {bridge} torn down.")


@firecracker.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--size", type=click.IntRange(min=16), metavar="MIB", help="Size of the image (default: what is needed).")
def rootfs(source: Path, target: Path, size: int | None) -> None:
    """Make a root file system with the agent in it, TARGET, from SOURCE.

    SOURCE is a folder with a distribution (as debootstrap makes it), a tar archive of one, or an image as
    `docker save` or an OCI layout archive holds it.  It needs a shell, and nothing else of ours.
    """
    from kici.adapters.rootfs_builder import build_rootfs

    try:
        made = build_rootfs(source, target, size_mib=size, say=lambda text: click.echo(text, err=True))
    except KiciError as error:
        raise CliError(f"firecracker rootfs failed: {error}") from error
    click.echo(f"Root file system {target} made ({made} MiB).")


@firecracker.command()
@click.option("--scalers", type=_FILE, metavar="FILE", help="Scalers that are to run here.")
@click.option("--scalers-dir", type=_DIR, metavar="DIR", help="Directory of further scaler files.")
@as_json
@click.pass_context
def doctor(ctx: click.Context, scalers: Path | None, scalers_dir: Path | None, *, as_json: bool) -> None:
    """Say whether this host can run the microVM scalers of a file.  Exits with 1 when it cannot."""
    from kici.cli.doctor_checks import Grade, this_machine
    from kici.cli.doctor_checks import scalers as check
    from kici.config.environment import SettingsRefused, read_settings

    environ = environment()
    try:
        settings = read_settings(environ, scaler_config_path=scalers, scaler_config_dir=scalers_dir)
    except SettingsRefused as error:
        raise CliError(str(error)) from error
    found = list(check(this_machine(environ, settings), only="firecracker"))
    if as_json:
        print_json([{"status": each.grade.value, "check": each.check, "message": each.text} for each in found])
    else:
        rows = [(each.grade.value, each.check, each.text) for each in found]
        print_table(("", "CHECK", "FOUND"), rows, empty="There is no scaler of microVMs in these files.")
    ctx.exit(1 if any(each.grade is Grade.FAIL for each in found) else 0)


def _bridge(name: str, cidr: IPv4Interface, table: str) -> "Bridge":
    from kici.decide.microvm import Bridge

    return Bridge(name=name, cidr=cidr.network, gateway=cidr.ip, netmask=cidr.netmask, table=table)


async def _on(
    bridge: "Bridge",
    egress: str | None,
    work: Callable[["IpHostNetwork"], Awaitable[Any]],
    *,
    sudo: bool,
) -> Any:
    from kici.adapters.host_commands import HostCommands
    from kici.adapters.host_network import IpHostNetwork

    return await work(IpHostNetwork(bridge, HostCommands(sudo=sudo), egress=egress))


def _run(what: str, work: Callable[[], Any]) -> Any:
    try:
        return asyncio.run(work())
    except KiciError as error:
        raise CliError(f"firecracker {what} failed: {error}") from error
