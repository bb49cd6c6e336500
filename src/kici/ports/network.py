"""The packet filter of this host, one script at a time."""

from typing import Protocol


class PacketFilter(Protocol):
    async def apply(self, script: str) -> None:
        """Run a script as one transaction: all of it or nothing.

        Raises `DeterministicRefusal` when this host has no packet filter for us, `Conflict` when the script does
        not fit what is there, `Retryable` when it takes too long.
        """
        ...

    async def elements(self, table: str, verdict_map: str) -> dict[str, str]:
        """Keys of a verdict map and the chains that they lead to; empty when there is no such map."""
        ...

    async def problem(self) -> str | None:
        """Why the filter cannot be used here; None: it can.  Never raises."""
        ...
