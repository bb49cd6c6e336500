import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kici.domain.access import Role
from kici.domain.agent import AgentKind
from kici.domain.errors import Denied, StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId, TokenId
from kici.domain.job import JobStatus, Outcome
from kici.ports.store import Claim, Store
from kici.services import tokens as module
from kici.services.tokens import CACHE_SECONDS, TokenPurge, Tokens
from kici.testing.builders import AGENT, HERE, a_new_job, a_new_run
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual

OTHER_AGENT = AgentId("scaler-bare-metal-ffffffff")
MINUTE_MS = 60_000


class World:
    def __init__(self, store: Store) -> None:
        self.clock = SimClock()
        self.faults = StoreFaults()
        self.store = store
        self.entropy = SeededEntropy(1)
        self.tokens = self.coordinator()
        self.revoked: list[TokenId] = []
        self.tokens.on_revoked(self.revoked.append)

    def coordinator(self) -> Tokens:
        return Tokens(store=faulty(self.store, self.faults), clock=self.clock, entropy=self.entropy)

    async def ephemeral(self, expires_in_ms: int = MINUTE_MS, agent_id: AgentId = AGENT) -> str:
        token, plain = self.tokens.new_agent_token(
            kind=AgentKind.EPHEMERAL, agent_id=agent_id, expires_in_ms=expires_in_ms
        )
        await self.store.create_agent_token(token)
        return plain

    async def dispatch(self, agent_id: AgentId = AGENT) -> JobId:
        """Give the agent a job."""
        job = a_new_job("job-1", claimed_by=agent_id)
        await self.store.submit(a_new_run(), [job], claim=Claim(agent_id=agent_id, instance_id=HERE, ack_ms=1000))
        return job.id


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    async with a_store() as store:
        yield World(store)


@virtual
async def test_a_static_token_admits_agents_until_it_is_revoked() -> None:
    async with a_world() as world:
        token, plain = await world.tokens.create_agent_token(
            name="rack", labels=frozenset({"linux"}), gate=frozenset({"gpu"}), expires_in_ms=None
        )
        assert re.fullmatch(r"kat_[0-9a-f]{64}", plain)
        found = await world.tokens.verify_agent(plain)
        assert found.labels == frozenset({"linux"})
        assert (found.gate, found.kind) == (frozenset({"gpu"}), AgentKind.STATIC)
        await world.clock.sleep(10 * 3600)
        assert await world.tokens.verify_agent(plain) == token
        assert await world.tokens.revoke_agent_token(token.id)
        with pytest.raises(Denied, match=f"token {token.prefix} is revoked"):
            await world.tokens.verify_agent(plain)
        assert world.revoked == [token.id]


@virtual
async def test_an_unknown_token_is_denied_with_a_way_out() -> None:
    async with a_world() as world:
        for plain in ("kat_" + "0" * 64, "", "something else"):
            with pytest.raises(Denied, match="agent-token create"):
                await world.tokens.verify_agent(plain)


@pytest.mark.spec("T2.10")
@virtual
async def test_plain_texts_are_neither_stored_nor_shown() -> None:
    async with a_world() as world:
        token, plain = await world.tokens.create_agent_token(
            name="rack", labels=None, gate=frozenset(), expires_in_ms=None
        )
        secret = plain.removeprefix("kat_")
        assert secret not in repr(token)
        assert secret not in repr(await world.tokens.agent_tokens())
        assert token.prefix == plain[:12]
        api, plain = await world.tokens.create(name="ci", role=Role.ADMIN)
        assert plain.removeprefix("kici_") not in repr(api) + repr(await world.tokens.tokens())


@virtual
async def test_an_expired_ephemeral_token_admits_nobody() -> None:
    async with a_world() as world:
        plain = await world.ephemeral()
        assert (await world.tokens.verify_agent(plain)).agent_id == AGENT
        await world.clock.sleep(MINUTE_MS / 1000)
        with pytest.raises(Denied, match="expired"):
            await world.tokens.verify_agent(plain)


@virtual
async def test_an_expired_ephemeral_token_still_admits_its_agent_while_a_job_names_it() -> None:
    async with a_world() as world:
        plain, idle = await world.ephemeral(), await world.ephemeral(agent_id=OTHER_AGENT)
        job_id = await world.dispatch()
        await world.clock.sleep(2 * MINUTE_MS / 1000)
        assert (await world.tokens.verify_agent(plain)).agent_id == AGENT
        with pytest.raises(Denied, match="expired"):
            await world.tokens.verify_agent(idle)
        await world.store.start_job(job_id, AGENT)
        assert (await world.tokens.verify_agent(plain)).agent_id == AGENT
        await world.store.finish_job(
            job_id, Outcome(status=JobStatus.SUCCESS), from_statuses=frozenset({JobStatus.RUNNING})
        )
        with pytest.raises(Denied, match="expired"):
            await world.tokens.verify_agent(plain)


@virtual
async def test_a_revoked_token_admits_nobody_whatever_its_agent_does() -> None:
    async with a_world() as world:
        plain = await world.ephemeral()
        await world.dispatch()
        token = await world.tokens.verify_agent(plain)
        await world.tokens.revoke_agent_token(token.id)
        with pytest.raises(Denied, match="revoked"):
            await world.tokens.verify_agent(plain)


@virtual
async def test_an_expiring_static_token_ends_although_its_agent_works() -> None:
    async with a_world() as world:
        _, plain = await world.tokens.create_agent_token(
            name="rack", labels=None, gate=frozenset(), expires_in_ms=MINUTE_MS
        )
        await world.clock.sleep(MINUTE_MS / 1000)
        with pytest.raises(Denied, match="expired"):
            await world.tokens.verify_agent(plain)


def test_an_ephemeral_token_is_for_exactly_one_agent() -> None:
    @virtual
    async def check() -> None:
        async with a_world() as world:
            with pytest.raises(AssertionError):
                world.tokens.new_agent_token(kind=AgentKind.EPHEMERAL)
            with pytest.raises(AssertionError):
                world.tokens.new_agent_token(kind=AgentKind.STATIC, agent_id=AGENT)

    check()


@virtual
async def test_api_tokens_carry_role_contexts_and_expiry() -> None:
    async with a_world() as world:
        token, plain = await world.tokens.create(
            name="ci", role=Role.SUBMITTER, secret_contexts=frozenset({"deploy"}), expires_in_ms=MINUTE_MS
        )
        assert re.fullmatch(r"kici_[0-9a-f]{64}", plain)
        assert await world.tokens.authenticate(plain) == token
        assert token.secret_contexts == frozenset({"deploy"})
        await world.clock.sleep(MINUTE_MS / 1000)
        assert await world.tokens.authenticate(plain) is None
        assert await world.tokens.authenticate("kici_" + "0" * 64) is None


@virtual
async def test_an_agent_token_opens_no_api_and_the_other_way_round() -> None:
    async with a_world() as world:
        agent = await world.ephemeral()
        _, api = await world.tokens.create(name="ci", role=Role.OWNER)
        assert await world.tokens.authenticate(agent) is None
        with pytest.raises(Denied):
            await world.tokens.verify_agent(api)


@virtual
async def test_checking_costs_the_store_one_look_in_ten_seconds() -> None:
    async with a_world() as world:
        _, plain = await world.tokens.create(name="ci", role=Role.ADMIN)
        for _ in range(100):
            assert await world.tokens.authenticate(plain)
            await world.clock.sleep(0.05)
        assert world.faults.calls["api_token"] == 1
        for _ in range(3):
            assert await world.tokens.authenticate("kici_wrong") is None
        assert world.faults.calls["api_token"] == 4  # anybody can make up wrong ones: they are not kept


@virtual
async def test_a_revocation_is_known_here_at_once_and_elsewhere_within_the_cache_time() -> None:
    async with a_world() as world:
        elsewhere = world.coordinator()
        token, plain = await world.tokens.create(name="ci", role=Role.ADMIN)
        assert await world.tokens.authenticate(plain)
        assert await elsewhere.authenticate(plain)
        assert await world.tokens.revoke(token.id)
        assert await world.tokens.authenticate(plain) is None
        assert world.revoked == [token.id]
        await world.clock.sleep(CACHE_SECONDS)
        assert await elsewhere.authenticate(plain) is None
        assert not await world.tokens.revoke(token.id)


@virtual
async def test_being_told_of_a_revocation_elsewhere_is_as_good_as_revoking() -> None:
    async with a_world() as world:
        elsewhere = world.coordinator()
        token, plain = await world.tokens.create(name="ci", role=Role.ADMIN)
        assert await world.tokens.authenticate(plain)
        await elsewhere.revoke(token.id)
        world.tokens.forget(token.id)
        assert world.revoked == [token.id]
        assert await world.tokens.authenticate(plain) is None


@virtual
async def test_a_look_up_that_a_revocation_overtakes_is_not_believed() -> None:
    async with a_world() as world:
        token, plain = await world.tokens.create(name="ci", role=Role.ADMIN)
        world.tokens.on_revoked(lambda _: None)

        class Overtaken:
            """Answers the first look with the row from before the revocation."""

            def __init__(self) -> None:
                self.looks = 0

            async def api_token(self, token_hash: str) -> object:
                row = await world.store.api_token(token_hash)
                self.looks += 1
                if self.looks == 1:
                    await world.store.revoke_api_token(token.id)
                    tokens.forget(token.id)
                return row

        overtaken = Overtaken()
        tokens = Tokens(
            store=overtaken,  # type: ignore[arg-type]  # only this one method is used here
            clock=world.clock,
            entropy=world.entropy,
        )
        assert await tokens.authenticate(plain) is None
        assert overtaken.looks == 2


@virtual
async def test_an_outage_is_told_as_such_and_not_as_a_wrong_token() -> None:
    async with a_world() as world:
        _, plain = await world.tokens.create(name="ci", role=Role.ADMIN)
        world.faults.is_down = True
        with pytest.raises(StoreDown):
            await world.tokens.authenticate(plain)
        with pytest.raises(StoreDown):
            await world.tokens.verify_agent("kat_x")


@virtual
async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_MAX", 2)
    async with a_world() as world:
        plains = [(await world.tokens.create(name=f"ci-{n}", role=Role.ADMIN))[1] for n in range(3)]
        for plain in plains:
            await world.tokens.authenticate(plain)
        looks = world.faults.calls["api_token"]
        await world.tokens.authenticate(plains[2])
        assert world.faults.calls["api_token"] == looks
        await world.tokens.authenticate(plains[0])
        assert world.faults.calls["api_token"] == looks + 1


@virtual
async def test_the_first_start_makes_an_owner_token_and_later_ones_leave_it_alone() -> None:
    async with a_world() as world:
        plain = await world.tokens.owner_token(None, of=HERE)
        assert plain is not None
        token = await world.tokens.authenticate(plain)
        assert token is not None
        assert token.role is Role.OWNER
        assert await world.tokens.owner_token(plain, of=HERE) is None
        await world.tokens.revoke(token.id)
        assert await world.tokens.owner_token(plain, of=HERE) is None  # revoked on purpose
        assert len(await world.tokens.tokens()) == 1


@virtual
async def test_the_operator_may_choose_the_token_of_a_new_installation() -> None:
    chosen = "chosen-by-the-operator-0123456789"
    async with a_world() as world:
        assert await world.tokens.owner_token(None, of=HERE, wanted=chosen) == chosen
        token = await world.tokens.authenticate(chosen)
        assert token is not None
        assert token.role is Role.OWNER
        assert await world.tokens.owner_token(chosen, of=HERE, wanted="another-one-that-comes-too-late-0") is None
        # Another coordinator on the same store, told the same.
        assert await world.tokens.owner_token(None, of=InstanceId("there"), wanted=chosen) == chosen
        assert len(await world.tokens.tokens()) == 1


@virtual
async def test_a_lost_owner_file_or_one_of_another_store_gives_a_new_token_and_ends_the_old() -> None:
    async with a_world() as world:
        lost = await world.tokens.owner_token(None, of=HERE)
        again = await world.tokens.owner_token(None, of=HERE)
        other = await world.tokens.owner_token("kici_" + "0" * 64, of=HERE)
        assert lost
        assert again
        assert other
        assert await world.tokens.authenticate(lost) is None
        assert await world.tokens.authenticate(again) is None
        assert await world.tokens.authenticate(other) is not None


@virtual
async def test_the_purge_takes_expired_ephemeral_tokens_and_spares_those_of_working_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PURGE_BATCH", 2)
    async with a_world() as world:
        working = await world.ephemeral()
        for number in range(5):
            await world.ephemeral(agent_id=AgentId(f"scaler-bare-metal-0000000{number}"))
        living = await world.ephemeral(10 * MINUTE_MS, agent_id=OTHER_AGENT)
        await world.tokens.create_agent_token(name="rack", labels=None, gate=frozenset(), expires_in_ms=None)
        await world.dispatch()
        await world.clock.sleep(MINUTE_MS / 1000 + 1)
        assert await TokenPurge(tokens=world.tokens).tick() == 5
        assert len(await world.tokens.agent_tokens()) == 3
        assert (await world.tokens.verify_agent(working)).agent_id == AGENT
        assert (await world.tokens.verify_agent(living)).agent_id == OTHER_AGENT


@virtual
async def test_the_purge_comes_back_after_an_outage() -> None:
    async with a_world() as world:
        world.faults.is_down = True
        assert await TokenPurge(tokens=world.tokens).tick() == 0
        world.faults.is_down = False
        await world.ephemeral(expires_in_ms=1)
        await world.clock.sleep(1)
        assert await TokenPurge(tokens=world.tokens).tick() == 1
