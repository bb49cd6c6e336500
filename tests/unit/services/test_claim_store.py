"""Claim codes: one token each, on any coordinator, and none for those who guess."""

import pytest

from kici.domain.claim import CONSUMED, EXPIRED, INVALID
from kici.domain.errors import Denied, NoCapacity, StoreDown
from kici.domain.ids import AgentId
from kici.ports.event_store import EventFilter
from kici.testing.bench_agent import BenchAgent
from kici.testing.cloud_bench import CloudBench, a_cloud_scaler, clouded
from kici.wire.messages import ClaimCredentials, ClaimCredentialsResponse, RegisterAck


async def a_code(bench: CloudBench) -> str:
    await bench.submits()
    return str((await bench.machine())["claimCode"])


@pytest.mark.spec("scaler 24.7.1", "H11")
@clouded()
async def test_no_table_holds_a_code(bench: CloudBench) -> None:
    code = await a_code(bench)
    events = await bench.store.events(EventFilter())
    assert code not in repr(events)
    assert "[redacted]" in repr(events)
    assert code not in repr(bench.events)


@pytest.mark.spec("scaler 24.7.2", "scaler 24.7.5", "T2.9")
@clouded(nodes=2)
async def test_two_redemptions_give_one_token(bench: CloudBench) -> None:
    code = await a_code(bench)
    redeemed = await bench.nodes[1].coordinator.claims.redeem(code, caller="a")
    with pytest.raises(Denied, match=CONSUMED):
        await bench.nodes[0].coordinator.claims.redeem(code, caller="a")
    assert redeemed.agent_token.startswith("kat_")
    assert len(redeemed.agent_token) == 4 + 64
    token = await bench.nodes[0].coordinator.tokens.verify_agent(redeemed.agent_token)
    assert (token.agent_id, token.labels) == (redeemed.agent_id, frozenset(redeemed.labels))


@pytest.mark.spec("scaler 24.7.3")
@clouded(a_cloud_scaler(claim_ttl_seconds=60))
async def test_a_code_expires(bench: CloudBench) -> None:
    code = await a_code(bench)
    await bench.passes(61)
    with pytest.raises(Denied, match=EXPIRED):
        await bench.node.coordinator.claims.redeem(code, caller="a")
    await bench.store.purge_claims(expired_before=bench.clock.now())
    with pytest.raises(Denied, match=INVALID):
        await bench.node.coordinator.claims.redeem(code, caller="a")


@pytest.mark.spec("scaler 24.7.4")
@clouded()
async def test_a_failed_mint_does_not_reopen_the_code(bench: CloudBench) -> None:
    code = await a_code(bench)
    bench.node.traps.fail("give_token", done=False)
    with pytest.raises(StoreDown):
        await bench.node.coordinator.claims.redeem(code, caller="a")
    with pytest.raises(Denied, match=CONSUMED):
        await bench.node.coordinator.claims.redeem(code, caller="a")


@clouded()
async def test_whoever_guesses_is_told_to_wait(bench: CloudBench) -> None:
    claims = bench.node.coordinator.claims
    code = await a_code(bench)
    for number in range(20):
        with pytest.raises(Denied, match=INVALID):
            await claims.redeem(f"guess {number}", caller="bad")
    with pytest.raises(NoCapacity):
        await claims.redeem(code, caller="bad")
    await claims.redeem(code, caller="good")
    await bench.passes(61)
    with pytest.raises(Denied):
        await claims.redeem(code, caller="bad")


@pytest.mark.spec("scaler 24.7.8")
@clouded()
async def test_an_agent_redeems_on_its_socket_and_registers_as_itself_only(bench: CloudBench) -> None:
    code = await a_code(bench)
    up = await bench.machine()
    agent = await _unborn(bench, AgentId(up["agentId"]))
    agent.says(ClaimCredentials(request_id="7", claim_code=code))
    answer = await agent.hears(ClaimCredentialsResponse)
    redeemed = answer.credentials
    assert redeemed is not None
    assert (answer.request_id, redeemed.agent_id) == ("7", up["agentId"])
    agent.says(ClaimCredentials(request_id="8", claim_code=code))
    assert (await agent.hears(ClaimCredentialsResponse)).error == CONSUMED
    agent.token, agent.labels = redeemed.agent_token, list(redeemed.labels)
    agent.agent_id = AgentId("scaler-event-0badc0de")
    await agent.tries_to_register()
    await agent.is_closed()
    agent.agent_id = AgentId(up["agentId"])
    assert isinstance(await agent.registers(), RegisterAck)


@clouded()
async def test_a_store_that_is_down_says_nothing_about_the_code(bench: CloudBench) -> None:
    code = await a_code(bench)
    agent = await _unborn(bench, AgentId("scaler-event-00000001"))
    bench.node.traps.fail("redeem_claim", done=False)
    agent.says(ClaimCredentials(request_id="1", claim_code=code))
    answer = await agent.hears(ClaimCredentialsResponse)
    assert answer.retryable
    assert answer.credentials is None


async def _unborn(bench: CloudBench, agent_id: AgentId) -> BenchAgent:
    """An agent program that has connected and says nothing yet."""
    agent = BenchAgent(agent_id, labels=(), token=None, entropy=bench.entropy.fork("unborn"), accept=bench.node.accept)
    agent.connects()
    return agent
