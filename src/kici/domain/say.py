"""Verdicts in words: one sentence each, for people who wait for a job.

A sentence names the object, says what is the matter, and then what would change it.
"""

from collections.abc import Sequence
from typing import Final, assert_never

from kici.domain.ids import Instant
from kici.domain.verdict import (
    AgentDoesNotFit,
    AgentsBusy,
    AtCap,
    CapName,
    Dimension,
    Dispatched,
    Draining,
    InBackoff,
    NoScalerMatches,
    QueueFull,
    Running,
    SpawnBooting,
    SpawnFailed,
    Unroutable,
    Verdict,
    WaitingForNeeds,
)

WORDS_SHOWN_MAX: Final = 8
TEXT_CHARS_MAX: Final = 500


def say(verdict: Verdict, *, now: Instant) -> str:
    """One sentence: the object, what is the matter, and what would change it."""
    match verdict:
        case Running() | Dispatched() | SpawnBooting() | AgentsBusy():
            return _say_served(verdict, now)
        case AtCap():
            return _say_cap(verdict)
        case InBackoff():
            return _say_backoff(verdict, now)
        case NoScalerMatches():
            return _say_no_match(verdict)
        case Unroutable():
            return _say_unroutable(verdict, now)
        case _:
            return _say_held_up(verdict)


def _say_held_up(verdict: SpawnFailed | Draining | QueueFull | WaitingForNeeds | AgentDoesNotFit) -> str:
    match verdict:
        case SpawnFailed(text=text, scaler=scaler):
            whose = f" of scaler {scaler}" if scaler else ""
            return f"The last agent{whose} started for this job failed: {_cut(text)}; another one will be tried."
        case Draining():
            return "This coordinator is draining and starts nothing new; `kici-admin resume` ends that."
        case QueueFull(depth=depth, limit=limit):
            return f"The queue holds {depth} jobs, its limit is {limit}; wait, or raise queue_max_depth."
        case WaitingForNeeds(needs=needs):
            return f"Waits for {_count(len(needs), 'job')} that it needs: {_list(needs)}."
        case AgentDoesNotFit(agent_id=agent_id, reason=reason):
            return f"Agent {agent_id} is free but does not fit: {_cut(reason)}."
        case _:
            assert_never(verdict)


def _say_served(verdict: Running | Dispatched | SpawnBooting | AgentsBusy, now: Instant) -> str:
    match verdict:
        case Running(agent_id=agent_id):
            return f"Runs on agent {agent_id}."
        case Dispatched(agent_id=agent_id):
            return f"Offered to agent {agent_id}; it starts when the agent acknowledges."
        case SpawnBooting(agent_id=agent_id, scaler=scaler, since=since, trouble=trouble):
            age = _duration(now - since)
            told = "" if trouble is None else f"  Last trouble: {_cut(trouble)}."
            return (
                f"Agent {agent_id} of scaler {scaler} has been starting for {age}; "
                f"the job runs there once it connects.{told}"
            )
        case AgentsBusy(count=1, labels=labels):
            return f"The one connected agent that fits {_asked(labels)} is busy; the job goes to the first free one."
        case AgentsBusy(count=count, labels=labels):
            return (
                f"All {count} connected agents that fit {_asked(labels)} are busy; the job goes to the first free one."
            )
        case _:
            assert_never(verdict)


def _say_cap(verdict: AtCap) -> str:
    requested, limit = _amount(verdict.requested, verdict.dimension), _amount(verdict.limit, verdict.dimension)
    match verdict.cap:
        case CapName.MAX_AGENTS | CapName.RESOURCE_CAP:
            owner, raise_what = f"Scaler {verdict.scaler}", f"raise its {verdict.cap}"
        case CapName.GLOBAL_MAX_AGENTS | CapName.GLOBAL_RESOURCE_CAP:
            owner, raise_what = "This host", f"raise {verdict.cap}"
        case CapName.MACHINE_POOL:
            owner, raise_what = f"Machine pool {verdict.pool}", "raise its cap"
        case _:
            assert_never(verdict.cap)
    if verdict.is_hopeless:
        return f"{owner} may use {limit} in all and this job asks for {requested}; ask for less, or {raise_what}."
    used = _amount(verdict.used, verdict.dimension) if verdict.dimension is Dimension.MEMORY else f"{verdict.used:g}"
    needs = "one more" if verdict.dimension is Dimension.AGENTS else requested
    return f"{owner} uses {used} of {limit} and this job needs {needs}; it waits for an agent to end, or {raise_what}."


def _say_backoff(verdict: InBackoff, now: Instant) -> str:
    again = "repeatedly failed" if verdict.is_repeated else "failed"
    look = (
        f"check its provisioning workflow and `kici-admin diagnose {verdict.scaler}`"
        if verdict.is_external
        else f"`kici-admin diagnose {verdict.scaler}` shows why"
    )
    error = f" (last: {_cut(verdict.last_error)})" if verdict.last_error else ""
    return (
        f"Scaler {verdict.scaler} {again} to provide an agent, {_count(verdict.failures, 'time')} in a row{error}, "
        f"and is asked again in {_duration(verdict.until - now)}; {look}."
    )


def _say_no_match(verdict: NoScalerMatches) -> str:
    asked = _asked(verdict.labels)
    if not verdict.nearest:
        return f"No scaler is configured here and no connected agent fits {asked}; add a scaler or start such an agent."
    miss = verdict.nearest[0]
    obstacles = [
        *([f"it lacks {_list(miss.missing)}"] if miss.missing else []),
        *([f"the job excludes {_list(miss.excluded)}"] if miss.excluded else []),
        *([f"the job must also name {_list(miss.gate)}"] if miss.gate else []),
    ]
    return (
        f"No scaler fits {asked}; the nearest is label set [{_list(miss.label_set)}] of scaler {miss.scaler}: "
        f"{' and '.join(obstacles)}."
    )


def _say_unroutable(verdict: Unroutable, now: Instant) -> str:
    end = "" if verdict.ends_at is None else f" and it is given up in {_duration(verdict.ends_at - now)}"
    return (
        f"For {_duration(now - verdict.since)} no agent and no scaler could run {_asked(verdict.labels)}{end}; "
        "add a scaler or an agent that fits, or change what the job asks for."
    )


def _asked(labels: Sequence[str]) -> str:
    return f"a job with labels [{_list(labels)}]" if labels else "a job without labels"


def _list(words: Sequence[str]) -> str:
    shown = ", ".join(words[:WORDS_SHOWN_MAX])
    more = len(words) - WORDS_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cut(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= TEXT_CHARS_MAX else line[: TEXT_CHARS_MAX - 1] + "…"


def _duration(ms: int) -> str:
    seconds = max(0, -(-ms // 1000))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"


def _amount(number: float, dimension: Dimension) -> str:
    match dimension:
        case Dimension.AGENTS:
            return _count(round(number), "agent")
        case Dimension.CPUS:
            return f"{number:g} cpu" if number == 1 else f"{number:g} cpus"
        case Dimension.MEMORY:
            return f"{number / 1024**3:.3g} GiB" if number >= 1024**3 else f"{number / 1024**2:.3g} MiB"
        case _:
            assert_never(dimension)
