"""Room on the disk of this host's microVMs: machines that died are cleared away before anything else is begun.

Works without a database and beside no coordinator: what runs is left alone because it runs, and addresses that dead
machines have in the database are given back by the coordinator's own sweep, once it is up.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kici.adapters.disk import free_bytes
from kici.adapters.host_commands import HostCommands
from kici.adapters.ipam import AddressPool, MemoryAddresses
from kici.adapters.this_host import this_cgroups, this_processes
from kici.apps.microvms import make_tools, make_vmm
from kici.backends.disk_room import make_room
from kici.backends.firecracker.backend import MicroVmBackend
from kici.backends.firecracker.factory import bridge_of, settings_of
from kici.config.model import BackendType, ScalerEntry, ScalersConfig
from kici.decide.disk import DiskVerdict, is_short, judge, shortage
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.domain.resources import UNDECLARED
from kici.kit.supervise import Supervisor
from kici.ports.clock import Clock

BACKOFF_SECONDS: Final = 10.0
"""Before a start that found no room gives up, so that whoever restarts it at once does not spin."""
CURE: Final = (
    "free some, or clear away what is dead with `kici-admin scaler reap-orphans` while no coordinator runs on this host"
)


def microvm_scalers(config: ScalersConfig) -> list[ScalerEntry]:
    return [entry for entry in config.scalers if entry.type is BackendType.FIRECRACKER]


async def guard(
    config: ScalersConfig, *, data_dir: Path, clock: Clock, measure: Callable[[Path], int] = free_bytes
) -> DiskVerdict | None:
    """Make room where there is too little; None: no microVMs are made here.

    Raises `Retryable`, after a pause, when it stays too little.
    """
    entries = microvm_scalers(config)
    if not entries:
        return None
    base = Path(entries[0].chroot_base_dir)
    async with Supervisor("reclaim") as supervisor:
        backends = list(_backends(config, entries, data_dir=data_dir, clock=clock, supervisor=supervisor))
        verdict = await make_room(lambda: measure(base), lambda: _reclaim(backends, lambda: measure(base)))
    if not verdict.recovered:
        await clock.sleep(BACKOFF_SECONDS)
        raise Retryable(shortage(str(base), verdict, CURE))
    return verdict


async def reap(config: ScalersConfig, *, data_dir: Path, clock: Clock) -> DiskVerdict | None:
    """Clear away what is dead, however much room there is; None: no microVMs are made here."""
    entries = microvm_scalers(config)
    if not entries:
        return None
    base = Path(entries[0].chroot_base_dir)
    async with Supervisor("reclaim") as supervisor:
        backends = list(_backends(config, entries, data_dir=data_dir, clock=clock, supervisor=supervisor))
        reaped = await _reclaim(backends, lambda: free_bytes(base))
    return judge(free_bytes_after=free_bytes(base), reaped=reaped)


async def _reclaim(backends: Sequence[MicroVmBackend], measure: Callable[[], int]) -> int:
    """Dead machines; where that is not enough, what can be made again, too."""
    count = 0
    for backend in backends:
        count += await backend.sweep()
    if is_short(measure()):
        for backend in backends:
            count += await backend.discard()
    return count


def _backends(
    config: ScalersConfig, entries: Sequence[ScalerEntry], *, data_dir: Path, clock: Clock, supervisor: Supervisor
) -> Iterator[MicroVmBackend]:
    network, pool = config.firecracker, AddressPool()
    for entry in entries:
        commands = HostCommands(sudo=entry.require_sudo)
        vmm = make_vmm(
            entry,
            processes=this_processes(),
            commands=commands,
            cgroups=this_cgroups().support,
            socket_wait_ms=lambda: 0,
        )
        addresses = MemoryAddresses(pool, bridge=bridge_of(network), scaler=entry.name)
        yield MicroVmBackend(
            settings=settings_of(entry, network, data_dir=data_dir, environ={}, defaults=lambda: UNDECLARED),
            tools=make_tools(entry, network, vmm, commands, addresses=addresses, clock=clock),
            supervisor=supervisor,
            on_exit=_nobody,
        )


def _nobody(agent_id: AgentId, how: str) -> None:
    """Nothing is started here, so nothing of ours ends."""
