"""Connections to sockets that lie deep in a folder.

The name of a Unix socket may have 107 characters, and a machine's directory alone can be longer; a name below an open
folder is always short.
"""

import asyncio
import os
from pathlib import Path


async def connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises `OSError`."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
