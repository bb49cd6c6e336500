"""Event spawns, what became of them, and the shared backoff: `ports.event_store.ProvisionStore`."""

from collections.abc import Sequence
from typing import Final

from kici.decide.backoff import COUNTED_MAX, BackoffSettings, Deferral, refusal
from kici.domain.errors import Retryable
from kici.domain.event import SCALE_DOWN, SCALE_UP, NewEvent
from kici.domain.ids import AgentId, InstanceId, Instant, RunId, ScalerName
from kici.domain.provision import (
    ProvisionNews,
    ReapCandidate,
    ScaleDownOrder,
    SlotAnswer,
    SlotRefused,
    SlotRules,
)
from kici.domain.spawn import Reservation, Spawn, SpawnState
from kici.domain.verdict import AtCap, CapName, Dimension
from kici.ports.event_store import Ended, SharedDeferral
from kici.stores.database import Params, Row, Step
from kici.stores.events import emit_params, emit_step
from kici.stores.query import Query
from kici.stores.rows import clean_text, strings_from, to_json
from kici.stores.spawns import Spawns, reservation_params, spawn_params

INSERT_TRIES_MAX: Final = 3
_STATES: Final = {str(state): state for state in SpawnState}
"""Many rows are read at once, and calling the enum is the dearest part of each."""


class Provisions(Spawns):
    async def insert_cluster_spawn(
        self, spawn: Spawn, reservation: Reservation, rules: SlotRules, *, now: Instant | None = None
    ) -> SlotAnswer:
        params = {
            **spawn_params(spawn),
            **reservation_params(reservation),
            "agents_max": rules.agents_max,
            "may_probe": rules.may_probe,
            "lock_name": f"kici:scaler:cap|{spawn.scaler}",
            "lock_wait_ms": max(1, rules.lock_wait_ms),
            "now": now,
        }
        for _ in range(INSERT_TRIES_MAX):
            if await self._write(Query.INSERT_CLUSTER_SPAWN, params, told_apart_by="agent_id", alike_in="lock_name"):
                return None
            (state,) = await self._database.read(Query.SLOT_STATE, {"scaler_name": spawn.scaler, "now": now})
            refused = _refused(spawn.scaler, state, rules)
            serving = None if spawn.bound_job_id is None else await self.spawn_for_job(spawn.bound_job_id)
            if serving is not None or refused is not None:
                return serving or refused
        raise Retryable(f"spawns of job {spawn.bound_job_id} come and go; {spawn.agent_id} was not written, ask again")

    async def emit_scale_up(self, event: NewEvent, *, now: Instant | None = None) -> bool:
        params = emit_params(event, now)
        return bool(await self._write(Query.EMIT_SCALE_UP, params, told_apart_by="emission_id"))

    async def end_provision(
        self, order: ScaleDownOrder, event: NewEvent | None, *, now: Instant | None = None
    ) -> Ended | None:
        about: Params = {"agent_id": order.agent_id, "scale_up": SCALE_UP}
        steps = [
            _end_step(order, now),
            Step(Query.WITHDRAW_SCALE_UPS, {**about, "now": now}, told_apart_by="agent_id"),
            Step(Query.SCALE_UP_RUNS, about, told_apart_by="agent_id"),
            Step(Query.DELETE_RESERVATION, {"agent_id": order.agent_id}, told_apart_by="agent_id"),
        ]
        if order.over is not None:
            steps.append(
                Step(
                    Query.RECORD_CONDEMNED,
                    {
                        "agent_id": order.agent_id,
                        "scaler_name": order.over.scaler,
                        "reason": order.reason,
                        "now": now,
                    },
                    told_apart_by="agent_id",
                )
            )
        if event is not None:
            steps.append(emit_step(event, now))
        results = await self._database.unit(steps)
        if results is None:
            return None
        return Ended(
            emitted=0 if event is None else len(results[-1]),
            runs=tuple(RunId(row["run_id"]) for row in results[2] if row["run_id"] is not None),
        )

    async def provision_adopter(self, agent_id: AgentId) -> InstanceId | None:
        row = await self._one(Query.PROVISION_ADOPTER, {"agent_id": agent_id})
        return None if row is None else row["adopted_by"]

    async def has_adopted_provisions(self, instance_id: InstanceId) -> bool:
        return await self._one(Query.HAS_ADOPTED_PROVISIONS, {"instance_id": instance_id}) is not None

    async def reap_candidates(
        self,
        *,
        spawned_before: Instant,
        present_ms: int,
        after: tuple[ScalerName, AgentId] | None,
        limit: int,
        now: Instant | None = None,
    ) -> list[ReapCandidate]:
        scaler, agent_id = after or ("", "")
        rows = await self._database.read(
            Query.REAP_CANDIDATES,
            {
                "spawned_before": spawned_before,
                "present_ms": present_ms,
                "after_scaler": scaler,
                "after_agent": agent_id,
                "scale_down": SCALE_DOWN,
                "limit": limit,
                "now": now,
            },
        )
        return [_candidate_from(row) for row in rows]

    async def provision_news(self, agent_ids: Sequence[AgentId]) -> list[ProvisionNews]:
        params: Params = {"agent_ids": to_json(list(agent_ids)), "scale_up": SCALE_UP}
        return [
            ProvisionNews(
                agent_id=row["agent_id"],
                state=None if row["state"] is None else SpawnState(row["state"]),
                adopted_by=row["adopted_by"],
                job_over=bool(row["job_over"]),
                failure=row["failure"],
                end_reason=row["end_reason"],
            )
            for row in await self._database.read(Query.PROVISION_NEWS, params)
        ]

    async def purge_outcomes(self, *, updated_before: Instant, limit: int) -> int:
        return len(await self._write(Query.PURGE_OUTCOMES, {"updated_before": updated_before, "limit": limit}))

    async def deferrals(self, *, limit: int) -> list[SharedDeferral]:
        return [_deferral_from(row) for row in await self._database.read(Query.DEFERRALS, {"limit": limit})]

    async def count_provision_failure(
        self,
        scaler: ScalerName,
        agent_id: AgentId,
        *,
        error: str,
        settings: BackoffSettings,
        now: Instant | None = None,
    ) -> SharedDeferral | None:
        counted: Params = {"scaler_name": scaler, "agent_id": agent_id, "now": now}
        deferred: Params = {
            "scaler_name": scaler,
            "error": clean_text(error),
            "base_ms": settings.base_ms,
            "max_ms": settings.max_ms,
            "now": now,
        }
        results = await self._database.unit(
            [
                Step(Query.COUNT_FAILURE, counted, guard=True),
                Step(Query.DEFER_SCALER, deferred),
                Step(Query.FORGET_COUNTED, {"scaler_name": scaler, "kept_max": COUNTED_MAX}),
            ]
        )
        return None if results is None else _deferral_from(results[1][0])


def _end_step(order: ScaleDownOrder, now: Instant | None) -> Step:
    params = {"agent_id": order.agent_id, "reason": clean_text(order.reason), "now": now}
    if order.over is None:
        return Step(Query.END_PROVISION, {**params, "instance_id": order.by}, guard=True, told_apart_by="agent_id")
    assert order.term is not None, "only a leader condemns"
    seen = {
        "seen_adopted_by": order.over.adopted_by,
        "seen_state": order.over.state,
        "present_ms": order.present_ms,
        "term": order.term,
    }
    return Step(Query.CONDEMN_PROVISION, {**params, **seen}, guard=True, told_apart_by="agent_id")


def _refused(scaler: ScalerName, state: Row, rules: SlotRules) -> SlotRefused | None:
    """Why the scaler had no room; None when it has by now."""
    if state["failures"]:
        deferral = _deferral(state)
        now = Instant(state["now"])
        waits = refusal(deferral, scaler=scaler, is_external=True, settings=BackoffSettings(), now=now)
        if waits is None and state["is_probing"]:
            waits = refusal(deferral, scaler=scaler, is_external=True, settings=BackoffSettings(), now=deferral.since)
        if waits is not None and (state["is_probing"] or not rules.may_probe):
            return SlotRefused(verdict=waits)
    if state["taken"] >= rules.agents_max:
        return SlotRefused(
            verdict=AtCap(
                cap=CapName.MAX_AGENTS,
                dimension=Dimension.AGENTS,
                used=state["taken"],
                requested=1,
                limit=rules.agents_max,
                scaler=scaler,
            )
        )
    return None


def _deferral_from(row: Row) -> SharedDeferral:
    return SharedDeferral(
        scaler=row["scaler_name"],
        deferral=_deferral(row),
        is_probing=bool(row["is_probing"]),
    )


def _deferral(row: Row) -> Deferral:
    return Deferral(failures=row["failures"], since=row["updated_at"], until=row["until"], last_error=row["last_error"])


def _candidate_from(row: Row) -> ReapCandidate:
    return ReapCandidate(
        agent_id=row["agent_id"],
        scaler=row["scaler_name"],
        state=_STATES[row["state"]],
        owner_instance_id=row["owner_instance_id"],
        adopted_by=row["adopted_by"],
        spawned_at=row["spawned_at"],
        was_sent=row["emitted_at"] is not None,
        is_ending_sent=bool(row["is_ending_sent"]),
        undelivered_at=row["undelivered_at"],
        adopter_beat_at=row["adopter_beat_at"],
        job_over=bool(row["job_over"]),
        bound_job_id=row["bound_job_id"],
        run_id=row["run_id"],
        end_reason=row["end_reason"],
        targets=strings_from(row["provisioning_targets"]),
    )
