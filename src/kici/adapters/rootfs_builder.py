"""Root file systems of microVMs: a tree of somebody's distribution, our agent put into it, made into an image.

The tree comes from a folder, from a tar archive of one, or from an image of a container engine (`docker save`, or
the OCI layout).  The agent brings its own interpreter and libraries, so the tree needs nothing but a shell.
Blocking: it is a command's work, not a coordinator's.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from kici.adapters.agent_runtime import PLACE, RuntimeArchive, RuntimeUnavailable, archive_of
from kici.adapters.host_commands import PATH
from kici.domain.errors import DeterministicRefusal

MIB: Final = 1024 * 1024
SPARE_MIB: Final = 64
MKFS_SECONDS: Final = 600.0
MOUNT_POINTS: Final = ("dev", "proc", "sys", "run", "tmp", "etc", "root", ".kici/drive", ".kici/root", ".kici/old")
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"

Say = Callable[[str], None]


def build_rootfs(source: Path, target: Path, *, size_mib: int | None, say: Say) -> int:
    """Make the image `target`; its size in MiB.  Raises `DeterministicRefusal` with what is wrong.

    `size_mib` None: as much as is needed.  Owners are kept when we are root; else everything is root's in the guest.
    """
    with tempfile.TemporaryDirectory(prefix="kici-rootfs-", dir=target.parent) as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir(mode=0o755)
        say(f"unpacking {source}")
        try:
            unpack(source, tree)
            say("adding the agent")
            add_agent(tree, Path(scratch))
        except (OSError, tarfile.TarError, KeyError, ValueError) as error:
            raise DeterministicRefusal(f"{source} cannot be made into a root file system: {error}") from error
        size = size_mib or _size_of(tree) // MIB * 5 // 4 + SPARE_MIB
        say(f"writing an image of {size} MiB")
        beside = target.with_name(f".{target.name}.new")
        try:
            make_image(tree, beside, size)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    return size


def unpack(source: Path, tree: Path) -> None:
    """The files of a source, below `tree`."""
    if source.is_dir():
        shutil.copytree(source, tree, symlinks=True, dirs_exist_ok=True, ignore=_without_devices)
        return
    with tarfile.open(source) as archive:
        names = set(archive.getnames())
        if "manifest.json" in names:
            _unpack_docker(archive, tree)
        elif "index.json" in names:
            _unpack_oci(archive, tree)
        else:
            _extract(archive, tree)


def add_agent(tree: Path, scratch: Path) -> None:
    """Our runtime, the first program of the guest, and mount points that a read-only root must have."""
    try:
        archive = archive_of(scratch / "runtime", write=True)
    except RuntimeUnavailable as error:
        raise DeterministicRefusal(f"the agent of this installation cannot be put into an image: {error}") from error
    place = tree / PLACE.lstrip("/")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    with tarfile.open(archive.tar) as tar:
        tar.extractall(place, filter="data")  # made by us a moment ago
    for name in MOUNT_POINTS:
        if not (tree / name).is_symlink():
            (tree / name).mkdir(parents=True, exist_ok=True)
    if not any((tree / shell).exists() or (tree / shell).is_symlink() for shell in ("bin/sh", "usr/bin/sh")):
        raise DeterministicRefusal("there is no /bin/sh in it, which the first program of a guest needs")
    init = tree / "init"
    init.unlink(missing_ok=True)
    init.write_text(init_script(archive))
    init.chmod(0o755)


def init_script(archive: RuntimeArchive) -> str:
    python = f"{PLACE}/bin/{archive.python}"
    return f"#!/bin/sh\nexec {PLACE}/lib/ld.so --library-path {PLACE}/lib {python} -I -S -X utf8 -m kici.agent.guest\n"


def make_image(tree: Path, target: Path, size_mib: int) -> None:
    """An ext4 file system with these files."""
    owner = [] if os.geteuid() == 0 else ["-E", "root_owner=0:0"]
    command = ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", *owner, "-d", str(tree), str(target)]
    try:
        done = subprocess.run(
            [*command, f"{size_mib}M"],
            capture_output=True,
            text=True,
            check=False,
            timeout=MKFS_SECONDS,
            env={"PATH": PATH, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeterministicRefusal(f"mkfs.ext4 cannot be run: {error}; install e2fsprogs") from error
    if done.returncode != 0:
        raise DeterministicRefusal(
            f"mkfs.ext4 made no image of {size_mib} MiB: {done.stderr.strip()[-1000:]}; a larger --size may help"
        )


def _unpack_docker(archive: tarfile.TarFile, tree: Path) -> None:
    """As `docker save` writes it."""
    manifest = json.load(_member(archive, "manifest.json"))
    if len(manifest) != 1:
        raise ValueError(f"it holds {len(manifest)} images; save one")
    for layer in manifest[0]["Layers"]:
        _apply_layer(_member(archive, layer), tree)


def _unpack_oci(archive: tarfile.TarFile, tree: Path) -> None:
    """The OCI image layout."""
    manifests = json.load(_member(archive, "index.json"))["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"it holds {len(manifests)} images; export one, for one platform")
    manifest: dict[str, Any] = json.load(_member(archive, _blob(manifests[0]["digest"])))
    for layer in manifest["layers"]:
        if "zstd" in layer.get("mediaType", ""):
            raise ValueError("its layers are compressed with zstd; export it with gzip")
        _apply_layer(_member(archive, _blob(layer["digest"])), tree)


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    return f"blobs/{algorithm}/{value}"


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    if found is None:
        raise ValueError(f"{name} is no file in it")
    return found


def _apply_layer(layer: IO[bytes], tree: Path) -> None:
    """Files of a layer over those of the layers before; its whiteouts take some of those away."""
    with tarfile.open(fileobj=layer) as archive:
        members = archive.getmembers()
        for member in members:
            path = PurePosixPath(member.name)
            if path.name == _OPAQUE:
                _empty(tree / path.parent)
            elif path.name.startswith(_WHITEOUT):
                _remove(tree / path.parent / path.name.removeprefix(_WHITEOUT))
        _extract(archive, tree, [each for each in members if not PurePosixPath(each.name).name.startswith(_WHITEOUT)])


def _extract(archive: tarfile.TarFile, tree: Path, members: Iterable[tarfile.TarInfo] | None = None) -> None:
    """Everything but devices, which guests make themselves; nothing may leave the tree."""
    wanted = [each for each in (archive.getmembers() if members is None else members) if not each.isdev()]
    # Each member passes `_as_it_is` directly before it is written.
    archive.extractall(tree, members=wanted, numeric_owner=True, filter=_as_it_is)  # noqa: S202  # see above


def _as_it_is(member: tarfile.TarInfo, root: str) -> tarfile.TarInfo | None:
    """Owners, modes and targets of links are the image's own business; names that lead out of it are not.

    What is there already goes first: a file must not be written through a link of an earlier layer.
    """
    name = PurePosixPath("/", member.name).relative_to("/")
    if not name.parts:
        return None  # the root itself
    place = Path(root, name)
    if ".." in name.parts or not place.parent.resolve().is_relative_to(Path(root).resolve()):
        raise ValueError(f"{member.name} leads out of the image")
    if place.is_symlink() or (place.exists() and not (member.isdir() and place.is_dir())):
        _remove(place)
    return member.replace(name=str(name), deep=False)


def _empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        for entry in folder.iterdir():
            _remove(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _without_devices(folder: str, names: list[str]) -> list[str]:
    """Of a folder that is copied: what is neither file, folder nor link."""
    paths = {name: Path(folder, name) for name in names}
    return [name for name, path in paths.items() if not (path.is_symlink() or path.is_file() or path.is_dir())]


def _size_of(tree: Path) -> int:
    """Bytes that the files take, each rounded up to a block."""
    total = 0
    for folder, folders, names in os.walk(tree):
        for name in (*folders, *names):
            total += (os.lstat(os.path.join(folder, name)).st_size + 4095) // 4096 * 4096 + 256
    return total
