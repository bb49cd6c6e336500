"""Clock, entropy and files do what their ports say."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kici.adapters.clock import RealClock
from kici.adapters.disk import free_bytes
from kici.adapters.entropy import SystemEntropy
from kici.adapters.files import RealFiles
from kici.domain.errors import Retryable
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.files import Files
from kici.testing.fake_files import FakeFiles


async def test_the_clock() -> None:
    clock: Clock = RealClock()
    assert abs(clock.now() - time.time() * 1000) < 1000
    before = clock.monotonic()
    others: list[int] = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    await clock.sleep(-1)
    assert others == [1]
    await clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.01


def test_entropy() -> None:
    entropy: Entropy = SystemEntropy()
    assert len(entropy.bytes(5)) == 5
    assert len(entropy.hex(4)) == 8
    assert entropy.hex(16) != entropy.hex(16)
    assert all(2 <= entropy.uniform(2, 3) <= 3 for _ in range(100))


@pytest.mark.parametrize("make", [RealFiles, FakeFiles])
async def test_files(make: Callable[[], Files], tmp_path: Path) -> None:
    files = make()
    folder, path = tmp_path / "a" / "b", tmp_path / "a" / "b" / "file"
    files.make_folder(folder)
    files.make_folder(folder)
    assert files.read(path) is None
    assert (files.size(path), files.read_from(path, 0, 9), files.names(tmp_path / "none")) == (0, b"", [])
    files.write(path, b"old and long")
    files.write(path, b"new")
    assert files.read(path) == b"new"
    assert (files.size(path), files.read_from(path, 1, 9), files.read_from(path, 7, 9)) == (3, b"ew", b"")
    assert files.names(folder) == ["file"]
    files.truncate(path)
    assert files.size(path) == 0
    files.truncate(folder / "none")
    files.remove(path)
    files.remove(path)
    assert files.names(folder) == []
    files.write(path, b"x")
    await files.remove_folder(tmp_path / "a")
    await files.remove_folder(tmp_path / "a")
    assert files.read(path) is None


async def test_real_files_are_private_and_say_what_went_wrong(tmp_path: Path) -> None:
    files = RealFiles()
    folder = tmp_path / "private"
    files.make_folder(folder)
    files.write(folder / "x", b"")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "x").stat().st_mode & 0o777 == 0o600
    with pytest.raises(Retryable, match="private/x"):
        files.write(folder / "x" / "y", b"")
    with pytest.raises(Retryable, match="private/x"):
        files.make_folder(folder / "x")


async def test_a_folder_is_removed_whatever_its_owner_did_to_it(tmp_path: Path) -> None:
    deep = tmp_path / "work" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    (tmp_path / "work" / "link").symlink_to("/etc")
    deep.chmod(0o500)
    deep.parent.chmod(0o500)
    await RealFiles().remove_folder(tmp_path / "work")
    assert not (tmp_path / "work").exists()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    await RealFiles().remove_folder(link)
    assert link.is_symlink(), "a link is no folder of ours"


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    there = shutil.disk_usage(tmp_path).free
    assert abs(free_bytes(tmp_path / "not" / "made" / "yet") - there) < 1024**3
    assert free_bytes(Path("/proc/self")) == 0
