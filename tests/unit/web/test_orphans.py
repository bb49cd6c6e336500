"""Routes of live microVMs: who may, what is refused before anybody is asked, what an answer looks like."""

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kici.decide.classify import StopOutcome, Tracker
from kici.ports.live_vms import NodeFailed, NodeSilent
from kici.testing.fake_surface import FakeSurface
from kici.testing.fake_vms import a_live_vm

Client = TestClient[web.Request, web.Application]
PATH = "/api/v1/admin/scaler/orphans"
VM = a_live_vm(1).seen.vm_id


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {role}"}


async def stop(client: Client, body: dict[str, Any], *, role: str = "owner") -> tuple[int, dict[str, Any]]:
    response = await client.post(f"{PATH}/stop", headers=bearer(role), json=body)
    answer: dict[str, Any] = await response.json()
    return response.status, answer


async def test_machines_are_listed_with_who_tracks_them_and_why(client: Client, fake: FakeSurface) -> None:
    fake.live_vms.add(a_live_vm(1), a_live_vm(2, trackers=[Tracker.BACKEND]))
    response = await client.get(PATH, headers=bearer("auditor"))
    answer = await response.json()
    assert (response.status, answer["instance"], answer["scalers"]) == (200, "instance-1", ["vms"])
    assert [(each["id"], each["status"], each["trackers"]) for each in answer["items"]] == [
        (VM, "orphaned", []),
        (a_live_vm(2).seen.vm_id, "tracked", ["backend"]),
    ]
    assert answer["items"][0]["startedAt"].endswith("Z")


@pytest.mark.spec("scaler 42.7.1")
async def test_who_may_read_may_not_stop(client: Client, fake: FakeSurface) -> None:
    fake.live_vms.add(a_live_vm(1))
    assert (await stop(client, {"vmIds": [VM]}, role="auditor"))[0] == 403
    assert (await client.get(PATH, headers=bearer("submitter"))).status == 403
    assert (await client.get(PATH)).status == 401
    assert fake.live_vms.stops == []


@pytest.mark.spec("scaler 42.7.2")
@pytest.mark.parametrize("role", ["owner", "admin", "auditor"])
async def test_a_token_for_some_contexts_only_says_nothing_about_the_host(
    client: Client, fake: FakeSurface, role: str
) -> None:
    fake.live_vms.add(a_live_vm(1))
    fake.tokens.api["limited"] = replace(fake.tokens.api[role], secret_contexts=frozenset({"deploy"}))
    response = await client.get(PATH, headers=bearer("limited"))
    assert (response.status, "limited to some secret contexts" in (await response.json())["detail"]) == (403, True)
    assert (await stop(client, {"vmIds": [VM]}, role="limited"))[0] == 403
    assert fake.live_vms.stops == []
    assert [(each.action, each.outcome) for each in fake.access_log.records] == [
        ("scaler.orphans.read", "denied"),
        ("scaler.orphan.stop", "denied"),
    ]


async def test_each_machine_has_its_result_in_order(client: Client, fake: FakeSurface) -> None:
    fake.live_vms.add(a_live_vm(1), a_live_vm(2))
    fake.live_vms.outcomes[a_live_vm(2).seen.vm_id] = StopOutcome.TRACKED
    status, answer = await stop(client, {"vmIds": [a_live_vm(2).seen.vm_id, VM, "none"], "target": "instance-2"})
    assert status == 200
    assert [each["outcome"] for each in answer["items"]] == ["tracked", "stopped", "not-found"]
    assert fake.live_vms.stops[0][0] == "instance-2"
    assert [record.action for record in fake.access_log.records] == ["scaler.orphan.stop"]


@pytest.mark.spec("scaler 42.7.3")
@pytest.mark.parametrize(
    "body",
    [
        {"vmIds": []},
        {"vmIds": [f"vm-{number}" for number in range(101)]},
        {"vmIds": ["x" * 257]},
        {"vmIds": ["x"], "timeoutMs": 500},
        {"vmIds": ["x"], "timeoutMs": 300_000},
        {"vmIds": ["x"], "unknown": 1},
    ],
)
async def test_what_is_out_of_bounds_is_refused(client: Client, fake: FakeSurface, body: dict[str, Any]) -> None:
    assert (await stop(client, body))[0] in (400, 422)
    assert fake.live_vms.stops == []


@pytest.mark.parametrize("timeout", ["500", "300000", "x"])
async def test_a_wait_that_is_out_of_bounds_is_refused(client: Client, timeout: str) -> None:
    assert (await client.get(f"{PATH}?timeoutMs={timeout}", headers=bearer("owner"))).status == 400


@pytest.mark.spec("scaler 42.7.4")
async def test_a_node_that_is_unknown_silent_or_broken_has_its_status(client: Client, fake: FakeSurface) -> None:
    assert (await client.get(f"{PATH}?target=no-such", headers=bearer("owner"))).status == 404
    fake.live_vms.fault = NodeSilent("coordinator instance-2 did not answer within 30 s")
    response = await client.get(f"{PATH}?target=instance-2", headers=bearer("owner"))
    assert (response.status, "did not answer" in (await response.json())["detail"]) == (504, True)
    fake.live_vms.fault = NodeFailed("coordinator instance-2: out of order")
    assert (await stop(client, {"vmIds": [VM], "target": "instance-2"}))[0] == 502
