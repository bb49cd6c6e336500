"""Programs that stand in for firecracker and its jailer where a Linux guest is wanted and cannot run under KVM.

    python -m tests.microvm.stand_in DESCRIPTION jailer --id ID --chroot-base-dir BASE … -- --api-sock /api.sock …
    python -m tests.microvm.stand_in DESCRIPTION firecracker --id ID --api-sock PATH …

`DESCRIPTION`: the interface's published description, as JSON.  Called with the real programs' own options.  As the
real one does, the jailer leaves a process with this machine's root and ends; nothing is done about users and groups.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.microvm.stand_in.api import Vmm
from tests.microvm.stand_in.guest import QemuGuest
from tests.microvm.stand_in.outside import Outside, call_ourselves


def main(words: list[str]) -> None:
    description = json.loads(Path(words[1]).read_text())
    if words[2] == "jailer":
        options, rest = words[3 : words.index("--")], words[words.index("--") + 1 :]
        _jail(description, options, rest)
    else:
        _serve(description, Outside(None), words[3:], vm_id=_value(words, "--id"))


def _value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def _jail(description: dict[str, object], options: list[str], rest: list[str]) -> None:
    vm_id = _value(options, "--id")
    root = Path(_value(options, "--chroot-base-dir")) / "firecracker" / vm_id / "root"
    root.mkdir(parents=True, exist_ok=True)
    outside = Outside(root.absolute())
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        os.setsid()
        outside.lock_in()
        call_ourselves("firecracker")
        os.close(tell)
        _serve(description, outside, rest, vm_id=vm_id)
    os.close(tell)
    os.read(ready, 1)
    (root / "firecracker.pid").write_text(str(pid))


def _serve(description: dict[str, object], outside: Outside, options: list[str], *, vm_id: str) -> None:
    asyncio.run(_answer(description, outside, _value(options, "--api-sock"), vm_id))


async def _answer(description: dict[str, object], outside: Outside, path: str, vm_id: str) -> None:
    over = asyncio.Event()
    vmm = Vmm(description, vm_id, QemuGuest(outside, vm_id, over.set))

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await _one(vmm, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    async with await asyncio.start_unix_server(met, path):
        await over.wait()
    sys.stdout.flush()
    os._exit(0)


async def _one(vmm: Vmm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ", 2)
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    data = await reader.readexactly(int(fields.get("content-length", "0")))
    status, body = await vmm.answer(method, target, data)
    text = b"" if body is None else json.dumps(body).encode()
    kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    writer.write(f"HTTP/1.1 {status} -\r\nServer: stand-in\r\n{kind}\r\n".encode() + text)
    await writer.drain()


if __name__ == "__main__":
    main(sys.argv)
