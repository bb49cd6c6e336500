import json
from typing import get_args

import pytest

from kici.domain.ids import AgentId, Instant, JobId, ScalerName
from kici.domain.say import TEXT_CHARS_MAX, WORDS_SHOWN_MAX, say
from kici.domain.verdict import (
    AgentDoesNotFit,
    AgentsBusy,
    AtCap,
    CapName,
    Dimension,
    Dispatched,
    Draining,
    InBackoff,
    NearMiss,
    NoScalerMatches,
    QueueFull,
    Running,
    SpawnBooting,
    SpawnFailed,
    Unroutable,
    Verdict,
    WaitingForNeeds,
    decode,
    encode,
    nearest_first,
    nearness,
)

NOW = Instant(1_000_000)
AGENT, POOL = AgentId("scaler-container-0000000a"), ScalerName("pool")
GIB = 1 << 30


def cap(
    name: CapName = CapName.MAX_AGENTS,
    dimension: Dimension = Dimension.AGENTS,
    *,
    used: float = 4,
    requested: float = 1,
    limit: float = 4,
) -> AtCap:
    return AtCap(cap=name, dimension=dimension, used=used, requested=requested, limit=limit, scaler=POOL, pool="build")


def backoff(until_seconds: int = 42, *, repeated: bool = False, external: bool = False) -> InBackoff:
    return InBackoff(
        scaler=POOL,
        failures=3,
        until=Instant(NOW + until_seconds * 1000),
        last_error="no space left.",
        is_repeated=repeated,
        is_external=external,
    )


def miss(*missing: str, excluded: tuple[str, ...] = (), gate: tuple[str, ...] = ()) -> NearMiss:
    return NearMiss(scaler=POOL, label_set=("linux", "gpu"), missing=missing, excluded=excluded, gate=gate)


HOPELESS = cap(CapName.RESOURCE_CAP, Dimension.CPUS, used=0, requested=8, limit=4)
NEAREST_FIRST: tuple[Verdict, ...] = (
    Running(agent_id=AGENT),
    Dispatched(agent_id=AGENT),
    SpawnBooting(agent_id=AGENT, scaler=POOL, since=Instant(NOW - 12_000)),
    AgentsBusy(count=3, labels=("linux",)),
    cap(),
    backoff(42),
    backoff(90),
    SpawnFailed(text="image not found", scaler=POOL),
    Draining(),
    QueueFull(depth=10, limit=10),
    WaitingForNeeds(needs=(JobId("build"), JobId("lint"))),
    AgentDoesNotFit(agent_id=AGENT, reason="it is draining"),
    NoScalerMatches(labels=("linux", "arm64"), nearest=(miss("arm64"),)),
    NoScalerMatches(labels=("linux", "arm64", "x"), nearest=(miss("arm64", "x"),)),
    NoScalerMatches(labels=("linux",)),
    Unroutable(labels=("linux",), since=Instant(NOW - 20_000), ends_at=Instant(NOW + 100_000)),
    HOPELESS,
)


@pytest.mark.parametrize("verdict", NEAREST_FIRST)
def test_a_verdict_survives_json_with_its_kind(verdict: Verdict) -> None:
    text = encode(verdict)
    assert decode(text) == verdict
    assert json.loads(text)["kind"]


def test_the_json_form_is_camel_case_with_a_kebab_kind() -> None:
    assert json.loads(encode(SpawnBooting(agent_id=AGENT, scaler=POOL, since=NOW))) == {
        "kind": "spawn-booting",
        "agentId": AGENT,
        "scaler": POOL,
        "since": NOW,
    }


@pytest.mark.parametrize("text", ['{"kind": "of-the-future"}', '{"kind": "running"}', "[]"])
def test_what_this_version_does_not_know_is_no_verdict(text: str) -> None:
    assert decode(text) is None


def test_the_nearest_to_running_comes_first() -> None:
    assert nearest_first(reversed(NEAREST_FIRST)) == list(NEAREST_FIRST)
    assert len({nearness(verdict) for verdict in NEAREST_FIRST}) == len(NEAREST_FIRST)


def test_the_list_above_holds_every_kind() -> None:
    assert {type(verdict) for verdict in NEAREST_FIRST} == set(get_args(Verdict))


SENTENCES: list[tuple[Verdict, str]] = [
    (NEAREST_FIRST[0], f"Runs on agent {AGENT}."),
    (
        NEAREST_FIRST[2],
        f"Agent {AGENT} of scaler pool has been starting for 12 s; the job runs there once it connects.",
    ),
    (
        AgentsBusy(count=1),
        "The one connected agent that fits a job without labels is busy; the job goes to the first free one.",
    ),
    (
        cap(),
        "Scaler pool uses 4 of 4 agents and this job needs one more; it waits for an agent to end, "
        "or raise its maxAgents.",
    ),
    (
        cap(CapName.GLOBAL_RESOURCE_CAP, Dimension.MEMORY, used=6 * GIB, requested=4 * GIB, limit=8 * GIB),
        "This host uses 6 GiB of 8 GiB and this job needs 4 GiB; it waits for an agent to end, "
        "or raise globalResourceCap.",
    ),
    (
        cap(CapName.MACHINE_POOL, Dimension.CPUS, used=3.5, requested=1, limit=4),
        "Machine pool build uses 3.5 of 4 cpus and this job needs 1 cpu; it waits for an agent to end, "
        "or raise its cap.",
    ),
    (
        HOPELESS,
        "Scaler pool may use 4 cpus in all and this job asks for 8 cpus; ask for less, or raise its resourceCap.",
    ),
    (
        backoff(),
        "Scaler pool failed to provide an agent, 3 times in a row (last: no space left), "
        "and is asked again in 42 s; `kici-admin diagnose pool` shows why.",
    ),
    (
        NoScalerMatches(
            labels=("arm64", "linux"), exclude=("spot",), nearest=(miss("arm64", excluded=("spot",), gate=("gpu",)),)
        ),
        "No scaler fits a job with labels [arm64, linux]; the nearest is label set [linux, gpu] of scaler pool: "
        "it lacks arm64 and the job excludes spot and the job must also name gpu.",
    ),
    (
        NoScalerMatches(labels=("linux",)),
        "No scaler is configured here and no connected agent fits a job with labels [linux]; "
        "add a scaler or start such an agent.",
    ),
    (
        NEAREST_FIRST[15],
        "For 20 s no agent and no scaler could run a job with labels [linux] and it is given up in 100 s; "
        "add a scaler or an agent that fits, or change what the job asks for.",
    ),
    (WaitingForNeeds(needs=(JobId("build"),)), "Waits for 1 job that it needs: build."),
]


@pytest.mark.parametrize(("verdict", "sentence"), SENTENCES)
def test_the_sentence(verdict: Verdict, sentence: str) -> None:
    assert say(verdict, now=NOW) == sentence


@pytest.mark.parametrize("verdict", NEAREST_FIRST)
def test_every_verdict_is_one_line_that_ends_with_a_full_stop(verdict: Verdict) -> None:
    sentence = say(verdict, now=NOW)
    assert sentence.endswith(".")
    assert not sentence.endswith("..")
    assert "\n" not in sentence


@pytest.mark.spec("scaler 13.4")
def test_a_backoff_that_repeats_says_so_and_an_external_one_points_at_its_workflow() -> None:
    assert "repeatedly failed" in say(backoff(repeated=True), now=NOW)
    assert "provisioning workflow" in say(backoff(external=True), now=NOW)
    assert "provisioning workflow" not in say(backoff(), now=NOW)


def test_long_lists_and_texts_are_cut() -> None:
    labels = tuple(f"label-{number}" for number in range(WORDS_SHOWN_MAX + 3))
    assert "and 3 more" in say(NoScalerMatches(labels=labels), now=NOW)
    assert len(say(SpawnFailed(text="x" * 10_000), now=NOW)) < TEXT_CHARS_MAX + 200


def test_a_moment_that_is_past_is_no_time_away() -> None:
    assert "asked again in 0 s" in say(backoff(-5), now=NOW)
