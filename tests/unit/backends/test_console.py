"""What a guest prints is read in bounded pieces, whatever its size, and its end is what tells how it failed."""

import asyncio
from pathlib import Path

import pytest

from kici.backends.firecracker.console import FILE_BYTES_MAX, PASS_BYTES_MAX, REMEMBERED_LINES, Console
from kici.decide.microvm_boot import BootFailure, failure_of
from kici.domain.ids import AgentId
from kici.testing.fake_files import FakeFiles
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import virtual

FILE = Path("/vm/console")
PANIC = b"Kernel panic - not syncing: VFS: Unable to mount root fs\n"


class CountedFiles(FakeFiles):
    """Counts what is read of it."""

    taken = 0

    def read_from(self, path: Path, offset: int, bytes_max: int) -> bytes:
        data = super().read_from(path, offset, bytes_max)
        self.taken += len(data)
        return data


def a_console() -> tuple[Console, CountedFiles]:
    files = CountedFiles()
    return Console(AgentId("scaler-firecracker-00000001"), files, console=FILE, vmm_log=None), files


@pytest.mark.spec("scaler 50.10")
def test_a_look_reads_a_bounded_piece_of_a_large_file() -> None:
    console, files = a_console()
    files.append(FILE, b"a line of no interest\n" * (3 * PASS_BYTES_MAX // 22))
    console.look()
    assert files.taken == PASS_BYTES_MAX
    assert len(console.last) == REMEMBERED_LINES


@pytest.mark.spec("scaler 50.10")
@virtual
async def test_the_end_of_a_long_story_says_how_it_failed_and_the_file_stays_small() -> None:
    console, files = a_console()
    following = asyncio.get_running_loop().create_task(console.follow(SimClock()))
    for _ in range(30):
        files.append(FILE, b"a line of no interest\n" * 40_000)
        await asyncio.sleep(1)
        assert files.size(FILE) <= FILE_BYTES_MAX + 40_000 * 22
    files.append(FILE, PANIC)
    await asyncio.sleep(1)
    following.cancel()
    assert failure_of(console.last) is BootFailure.ROOTFS_MOUNT_FAILURE
