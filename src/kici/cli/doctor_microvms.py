"""What `kici doctor` looks at for scalers of microVMs: tools, images, the VMM, the bridge."""

import asyncio
import sys
from collections.abc import Iterator

from kici.adapters.host_commands import HostCommands
from kici.adapters.host_network import IpHostNetwork
from kici.adapters.this_host import this_processes
from kici.apps.microvms import make_vmm
from kici.backends.firecracker.factory import bridge_of, readiness_problems
from kici.cli.doctor_checks import Found, Grade, Machine
from kici.config.load import load_scalers
from kici.config.model import FirecrackerNetwork, ScalerEntry
from kici.ports.host_network import BridgeHealth


def microvms(machine: Machine, entry: ScalerEntry) -> Iterator[Found]:
    name = f"scaler {entry.name}"
    settings = machine.settings
    loaded = load_scalers(settings.scaler_config_path, settings.scaler_config_dir)
    network = FirecrackerNetwork() if loaded.config is None else loaded.config.firecracker
    url = settings.orchestrator_url or f"ws://{settings.host}:{settings.port}/ws"
    problems = readiness_problems(entry, url=url, system=sys.platform)
    health = BridgeHealth()
    if sys.platform == "linux":
        vmm_problems, health = asyncio.run(_ask(machine, entry, network))
        problems += [f"{name}: {problem}" for problem in vmm_problems]
    yield from (Found(Grade.FAIL, name, problem) for problem in problems)
    bridge = f"bridge {network.bridge_name}"
    if health.is_healthy:
        yield Found(Grade.OK, bridge, f"healthy ({bridge_of(network).gateway_cidr})")
    elif network.auto_provision_host:
        yield Found(Grade.NOTE, bridge, f"is made or mended at start: {health}")
    else:
        yield Found(Grade.FAIL, bridge, f"{health}; run `kici-admin firecracker provision`")
    if not problems:
        yield Found(Grade.OK, name, f"up to {entry.max_agents} microVMs by {entry.vmm.value} can be started")


async def _ask(machine: Machine, entry: ScalerEntry, network: FirecrackerNetwork) -> tuple[list[str], BridgeHealth]:
    commands = HostCommands(sudo=entry.require_sudo)
    vmm = make_vmm(
        entry,
        processes=this_processes(),
        commands=commands,
        cgroups=machine.cgroups,
        socket_wait_ms=lambda: 0,
    )
    return await vmm.problems(), await IpHostNetwork(bridge_of(network), commands).health()
