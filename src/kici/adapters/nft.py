"""The packet filter by its command, `nft`: a script on standard input is one transaction."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kici.adapters.short_commands import as_stdin, outputs
from kici.domain.errors import Conflict, DeterministicRefusal, KiciError, Retryable

NFT_SECONDS: Final = 10.0
SCRIPTS_AT_ONCE: Final = 64
PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True, eq=False)
class _Script:
    text: str
    error: KiciError | None = None
    is_done: bool = False


class Nft:
    """Contract: `ports.network.PacketFilter`.

    Scripts that come while the command runs are given to the next one together: where many agents end at once,
    a process for each was a quarter of the work.  If they fail together, each is tried by itself.
    """

    def __init__(self, command: Sequence[str] = ("nft",)) -> None:
        """`command` may begin with whatever gives the right to use it."""
        self._command = tuple(command)
        self._waiting: list[_Script] = []
        self._turn = asyncio.Lock()

    async def apply(self, script: str) -> None:
        mine = _Script(script)
        self._waiting.append(mine)
        try:
            async with self._turn:
                if not mine.is_done:
                    await self._apply([one for one in self._waiting if not one.is_done][:SCRIPTS_AT_ONCE])
        finally:
            self._waiting.remove(mine)  # one that was called off before its turn has not happened
        if mine.error is not None:
            raise mine.error

    async def _apply(self, scripts: Sequence[_Script]) -> None:
        error = await self._error_of("".join(one.text for one in scripts))
        for one in scripts:
            one.error = error if error is None or len(scripts) == 1 else await self._error_of(one.text)
            one.is_done = True

    async def _error_of(self, script: str) -> KiciError | None:
        try:
            code, _, error = await self._run("-f", "-", script=script)
        except KiciError as fault:
            return fault
        return None if code == 0 else _fault(error)

    async def elements(self, table: str, verdict_map: str) -> dict[str, str]:
        code, output, error = await self._run("-j", "list", "map", "inet", table, verdict_map)
        if code != 0:
            fault = _fault(error)
            if isinstance(fault, Conflict):
                return {}
            raise fault
        return dict(_elements(json.loads(output)))

    async def problem(self) -> str | None:
        try:
            code, _, error = await self._run("list", "tables")
        except KiciError as fault:
            return str(fault)
        return None if code == 0 else str(_fault(error))

    async def _run(self, *arguments: str, script: str = "") -> tuple[int, str, str]:
        try:
            with as_stdin(script) as given:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *arguments,
                    stdin=given,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={"PATH": PATH, "LC_ALL": "C"},
                )
        except FileNotFoundError as error:
            raise DeterministicRefusal(
                "nft is not installed, and without it agents cannot be isolated; install nftables, "
                "or set networkIsolation: false on the scaler"
            ) from error
        try:
            output, errors = await outputs(process, seconds=NFT_SECONDS)
        except TimeoutError as error:
            raise Retryable(f"nft did not end within {NFT_SECONDS:g} s") from error
        return process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace")


def _elements(told: Any) -> list[tuple[str, str]]:
    found = []
    for item in told["nftables"]:
        for key, verdict in (item.get("map") or {}).get("elem") or ():
            address = key["elem"]["val"] if isinstance(key, dict) and "elem" in key else key
            found.append((str(address), str(verdict["jump"]["target"])))
    return found


def _fault(text: str) -> KiciError:
    short = " ".join(text.split())[:500]
    if "not permitted" in text:
        return DeterministicRefusal(
            f"nft may not be used by us: the capability NET_ADMIN is missing ({short}); "
            "run the coordinator with it, or set networkIsolation: false on the scaler"
        )
    if any(word in text for word in ("No such file", "File exists", "Device or resource busy", "does not exist")):
        return Conflict(f"the packet filter is not as expected: {short}")
    return DeterministicRefusal(f"nft refused our rules: {short}")
