"""The tiny guest (`guest/guest.c`), compiled for tests: a kernel of 20 KB for real firecracker."""

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "guest"
FLAGS = (
    *("-O2", "-std=gnu11", "-ffreestanding", "-nostdlib", "-static", "-mno-red-zone", "-mgeneral-regs-only"),
    *("-fno-stack-protector", "-fno-pic", "-no-pie", "-fno-builtin", "-fcf-protection=none"),
    *("-fno-tree-loop-distribute-patterns", "-Wall", "-Wextra", "-Werror"),
    *("-Wl,--build-id=none", "-Wl,--no-warn-rwx-segments"),
)


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def compile_guest(folder: Path) -> Path:
    """The guest's ELF file in a folder."""
    target = folder / "tiny-guest.elf"
    gcc = compiler()
    assert gcc is not None, "a C compiler is needed"
    command = (gcc, *FLAGS, f"-Wl,-T,{SOURCE / 'link.ld'}", "-o", str(target), str(SOURCE / "guest.c"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target
