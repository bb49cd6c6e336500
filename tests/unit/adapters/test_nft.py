"""Many scripts for the packet filter at once, with a command of the test in place of `nft`."""

import asyncio
from pathlib import Path

import pytest

from kici.adapters.nft import Nft
from kici.domain.errors import Conflict

COMMAND = """#!/bin/sh
script=$(cat)
echo "$script" > {begun}
while [ -e {hold} ]; do sleep 0.02; done
case "$script" in *absent*) echo "Error: No such file or directory" >&2; exit 1;; esac
printf '%s.' $script >> {log}
echo >> {log}
"""


class Filter:
    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._begun = folder / "begun"
        self.hold = folder / "hold"
        """While it is there, the command works."""
        command = folder / "nft"
        command.write_text(COMMAND.format(log=self._log, begun=self._begun, hold=self.hold))
        command.chmod(0o755)
        self.nft = Nft((str(command),))

    async def apply(self, *scripts: str) -> list[BaseException | None]:
        return await asyncio.gather(*(self.nft.apply(f"{one}\n") for one in scripts), return_exceptions=True)

    async def begins(self, script: str) -> None:
        """Wait until the command has read a script that begins so."""
        async with asyncio.timeout(20):
            while not (self._begun.exists() and self._begun.read_text().startswith(script)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @property
    def transactions(self) -> list[str]:
        return self._log.read_text().splitlines()


async def test_scripts_that_come_while_the_filter_works_are_one_transaction(tmp_path: Path) -> None:
    packets = Filter(tmp_path)
    assert await packets.apply("a", "b", "c", "d") == [None] * 4
    assert packets.transactions == ["a.", "b.c.d."]


async def test_one_that_does_not_fit_fails_alone(tmp_path: Path) -> None:
    packets = Filter(tmp_path)
    told = await packets.apply("a", "b", "absent", "d")
    assert [type(one) for one in told] == [type(None), type(None), Conflict, type(None)]
    assert packets.transactions == ["a.", "b.", "d."]


def three(packets: Filter) -> list["asyncio.Future[None]"]:
    packets.hold.touch()
    return [asyncio.ensure_future(packets.nft.apply(f"{one}\n")) for one in "abc"]


async def called_off(one: "asyncio.Future[None]") -> None:
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one


async def test_one_that_is_called_off_before_its_turn_does_not_happen(tmp_path: Path) -> None:
    packets = Filter(tmp_path)
    first, second, third = three(packets)
    await packets.begins("a")
    await called_off(second)
    packets.hold.unlink()
    await asyncio.gather(first, third)
    assert packets.transactions == ["a.", "c."]


async def test_others_are_served_when_the_one_whose_turn_it_was_is_called_off(tmp_path: Path) -> None:
    packets = Filter(tmp_path)
    first, second, third = three(packets)
    await packets.begins("a")
    await called_off(first)
    await packets.begins("b")
    await called_off(second)
    packets.hold.unlink()
    await third
    assert packets.transactions == ["c."]
