"""A real Linux guest for tests: Debian's cloud kernel, a small initial RAM disk for its modules, and a root file
system made by our own builder around a static busybox.

Fetched and made once, and kept in the user's cache: the kernel by `apt-get download`, unpacked, never installed.
"""

import atexit
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from kici.adapters.rootfs_builder import build_rootfs
from kici.testing import engines

GIVEN = "KICI_TEST_LINUX_GUEST"
MODULES = (
    *("drivers/virtio/virtio_ring", "drivers/virtio/virtio", "drivers/virtio/virtio_pci_modern_dev"),
    *("drivers/virtio/virtio_pci_legacy_dev", "drivers/virtio/virtio_pci", "drivers/block/virtio_blk"),
    *("net/core/failover", "drivers/net/net_failover", "drivers/net/virtio_net"),
    *("drivers/char/virtio_console", "fs/overlayfs/overlay"),
)
"""In the order in which they need each other."""
_INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
for m in /modules/*.ko; do $b insmod $m; done
n=0
while [ ! -b /dev/vda ] && [ $n -lt 500 ]; do $b usleep 10000; n=$((n+1)); done
$b mount -t ext4 -o ro,noatime /dev/vda /root
$b mount --move /proc /root/proc
$b mount --move /sys /root/sys
$b mount --move /dev /root/dev
exec $b switch_root /root /init
"""


@cache
def linux_guest() -> Path:
    """A folder with `vmlinux`, `vmlinux.initrd` and `rootfs.ext4`.  Skips, or fails where it is required.

    A test that starts another process of tests gives it on as `KICI_TEST_LINUX_GUEST`.
    """
    given = os.environ.get(GIVEN)
    if given:
        return Path(given)
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kici-tests"
    try:
        kernel = _kernel(cache_dir)
    except (subprocess.SubprocessError, OSError, AssertionError) as error:
        reason = f"Debian's cloud kernel cannot be fetched: {error}"
        if "qemu" in os.environ.get(engines.REQUIRE_ENGINES, "").split(","):
            pytest.fail(reason)
        pytest.skip(f"engine qemu: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="kici-linux-guest-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    for name in ("vmlinux", "vmlinux.initrd"):
        (folder / name).symlink_to(kernel / name)
    build_rootfs(_busybox_tree(folder / "tree"), folder / "rootfs.ext4", size_mib=None, say=lambda _: None)
    return folder


def _kernel(cache_dir: Path) -> Path:
    """Kernel and RAM disk, from the package that Debian recommends today."""
    package = _package()
    made = cache_dir / f"{package}-{hashlib.sha256(_recipe()).hexdigest()[:12]}"
    if (made / "vmlinux.initrd").exists():
        return made
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        subprocess.run(
            ("apt-get", "download", "-q", package), cwd=scratch, check=True, capture_output=True, timeout=300
        )
        (deb,) = scratch.glob("*.deb")
        subprocess.run(("dpkg-deb", "-x", str(deb), "tree"), cwd=scratch, check=True)
        fresh = scratch / "made"
        fresh.mkdir()
        (image,) = (scratch / "tree/boot").glob("vmlinuz-*")
        (fresh / "vmlinux").write_bytes(extract_kernel(image.read_bytes()))
        (modules,) = (scratch / "tree/lib/modules").iterdir()
        files = _ram_disk_files(modules / "kernel", scratch)
        (fresh / "vmlinux.initrd").write_bytes(cpio(files))
        with suppress(OSError):  # somebody else was quicker
            fresh.rename(made)
    assert (made / "vmlinux.initrd").exists(), f"{made} is not whole; remove it"
    return made


def _package() -> str:
    done = subprocess.run(
        ("apt-cache", "depends", "linux-image-cloud-amd64"), capture_output=True, text=True, check=True, timeout=60
    )
    names = [line.split()[1] for line in done.stdout.splitlines() if line.strip().startswith("Depends: linux-image")]
    assert names, f"apt knows no cloud kernel: {done.stdout}"
    return names[0]


def _recipe() -> bytes:
    return f"{MODULES}{_INIT}".encode()


def extract_kernel(image: bytes) -> bytes:
    """The ELF file inside a bzImage, which boots without being unpacked first."""
    start = (image[0x1F1] or 4) * 512 + 512
    offset, size = struct.unpack_from("<II", image, 0x248)
    packed = image[start + offset : start + offset + size]
    program = {b"\x02\x21\x4c\x18": "lz4", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"\x1f\x8b\x08\x00": "gzip"}
    command = (program[packed[:4]], "-dcq")
    # The last four bytes are the size of the whole, which some of these programs take for rubbish at the end.
    done = subprocess.run(command, input=packed[:-4], capture_output=True, check=False)
    assert done.stdout.startswith(b"\x7fELF"), done.stderr[-200:]
    return done.stdout


def _ram_disk_files(modules: Path, scratch: Path) -> Iterator[tuple[str, bytes, int]]:
    for folder in ("bin", "modules", "proc", "sys", "dev", "root"):
        yield folder, b"", 0o040755
    busybox = shutil.which("busybox")
    assert busybox is not None
    yield "bin/busybox", Path(busybox).read_bytes(), 0o100755
    yield "init", _INIT.encode(), 0o100755
    for number, name in enumerate(MODULES):
        stripped = scratch / f"{number:02}.ko"
        subprocess.run(("strip", "--strip-debug", "-o", str(stripped), str(modules / f"{name}.ko")), check=True)
        yield f"modules/{number:02}.ko", stripped.read_bytes(), 0o100644


def cpio(files: Iterator[tuple[str, bytes, int]]) -> bytes:
    """An archive of the kind that the kernel unpacks ("newc")."""
    out = bytearray()

    def entry(number: int, name: str, data: bytes, mode: int) -> None:
        raw = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        out.extend(b"070701" + b"".join(b"%08X" % field for field in fields) + raw)
        out.extend(bytes(-len(out) % 4) + data)
        out.extend(bytes(-len(out) % 4))

    number = 0
    for number, (name, data, mode) in enumerate(files, start=1):
        entry(number, name, data, mode)
    entry(number + 1, "TRAILER!!!", b"", 0)
    return bytes(out)


def _busybox_tree(tree: Path) -> Path:
    """A distribution of one program."""
    for folder in ("bin", "etc"):
        (tree / folder).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, tree / "bin/busybox")
    names = subprocess.run((busybox, "--list"), capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if name != "busybox":
            (tree / "bin" / name).symlink_to("busybox")
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
    (tree / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n")
    return tree
