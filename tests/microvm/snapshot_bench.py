"""Real firecracker whose machines go on from snapshots, as a bench of the contract of backends."""

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.microvm.lab import Namespace
from tests.microvm.real_bench import RealMicroVmBench

from kici.decide.microvm_snapshot import ADDRESS
from kici.domain.ids import AgentId


class SnapshotBench(RealMicroVmBench):
    """Every label set has its snapshot before a case begins, except where there is no kernel."""

    def __init__(self, folder: Path, network: Namespace) -> None:
        super().__init__(folder, network)
        self.configure(sets=tuple(replace(each, snapshot_start=True) for each in self.settings.sets))

    async def start(self) -> None:
        await super().start()
        await self.backend.recover(frozenset())
        await self.are_made()

    async def are_made(self) -> None:
        wanted = sum(each.kernel.exists() for each in self.settings.sets)
        async with asyncio.timeout(30):
            while len(self.snapshots()) < wanted:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.02)

    def on_host(self) -> frozenset[AgentId]:
        """Without those that are being copied, which serve nobody and go by themselves."""
        records = (self.settings.data_dir / "microvms").glob("*.json")
        being_copied = {path.stem[-8:] for path in records if str(ADDRESS).encode() in path.read_bytes()}
        return frozenset(each for each in super().on_host() if each[-8:] not in being_copied)

    def snapshots(self) -> list[Path]:
        return list((self.settings.base / "firecracker/.snapshots").glob("*/[0-9a-f]*"))

    async def close(self) -> None:
        await super().close()
        assert not self.snapshots(), "a scaler that ends takes its snapshots with it"
