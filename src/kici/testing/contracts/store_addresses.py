"""Contract cases of `ports.addresses.AddressStore`."""

from dataclasses import replace
from ipaddress import IPv4Address
from typing import Final

from kici.decide.microvm import mac_of, tap_of
from kici.domain.ids import ScalerName, scaler_agent_id
from kici.ports.addresses import AddressRow
from kici.ports.store import Store
from kici.testing.builders import HERE
from kici.testing.contracts.store_rules import ALL, THERE, Case, together


def _row(number: int) -> AddressRow:
    vm_id = scaler_agent_id("firecracker", f"{number:08x}")
    ip = IPv4Address(f"10.0.0.{number}")
    return AddressRow(
        ip=ip,
        vm_id=vm_id,
        scaler=ScalerName("vms"),
        owner_instance_id=HERE,
        tap_device=tap_of(vm_id),
        mac_address=mac_of(ip),
    )


async def gives_an_address_once(store: Store) -> None:
    assert await store.insert_address(_row(5))
    assert not await store.insert_address(replace(_row(6), ip=_row(5).ip, owner_instance_id=THERE))
    assert not await store.insert_address(replace(_row(5), ip=_row(6).ip)), "it has one already"
    assert await store.insert_address(_row(6))
    assert await store.addresses(limit=ALL) == [_row(5), _row(6)]
    assert len(await store.addresses(limit=1)) == 1


async def gives_back_an_address(store: Store) -> None:
    await store.insert_address(_row(5))
    await store.insert_address(_row(6))
    assert await store.delete_address(_row(5).vm_id)
    assert not await store.delete_address(_row(5).vm_id)
    assert await store.addresses(limit=ALL) == [_row(6)]
    assert await store.insert_address(replace(_row(7), ip=_row(5).ip))


async def lets_one_of_many_have_an_address(store: Store) -> None:
    tries = [store.insert_address(replace(_row(number), ip=_row(1).ip)) for number in range(1, 9)]
    assert sum(await together(tries)) == 1


CASES: Final[tuple[Case, ...]] = (gives_an_address_once, gives_back_an_address, lets_one_of_many_have_an_address)
