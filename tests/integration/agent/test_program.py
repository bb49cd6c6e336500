"""The real agent program against a small coordinator: its life and its jobs."""

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest

from kici.testing.agent_harness import AgentHarness, AgentProcess, HarnessJob, is_alive
from kici.testing.ports import free_port
from kici.wire.messages import (
    AgentExit,
    AgentLeaving,
    AgentMetrics,
    ConfigAck,
    Credentials,
    JobAck,
    JobDispatch,
    JobStatusReport,
    Reuse,
)

SCALER = {"KICI_SCALER_MANAGED": "1"}


def shell(script: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", script)


def ended(job: HarnessJob) -> JobStatusReport:
    assert job.final is not None
    return job.final


# --- life


@pytest.mark.spec("T2.3")
@pytest.mark.spec("T3.1")
async def test_a_scaler_made_agent_runs_its_job_and_exits(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER) as agent:
        job = await coordinator.run(*shell("echo out; echo err >&2; exit 3"))
        assert await agent.exited() == 0
        assert (job.state, ended(job).exit_code) == ("failed", 3)
        assert (job.stdout, job.stderr) == (b"out\n", b"err\n")
        heard = [message for message in coordinator.heard if isinstance(message, ConfigAck | JobAck | AgentLeaving)]
        assert heard == [ConfigAck(), JobAck(job_id="job-1"), AgentLeaving(reason="done")]
        first, last = [message for message in coordinator.heard if isinstance(message, AgentMetrics)]
        assert first == AgentMetrics()
        assert (last.jobs, last.steps, last.log_bytes, last.active_jobs) == ({"failed": 1}, 1, 8, 0)
        assert 0 < last.step_seconds[0] < 15
        assert agent.work_left() == []


@pytest.mark.spec("T3.1")
async def test_a_static_agent_runs_one_job_after_the_other(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url) as agent:
        for number in range(5):
            job = await coordinator.run("sh", "-c", f"echo {number}", job_id=f"job-{number}")
            assert job.stdout == b"%d\n" % number
        agent.drain()
        assert await agent.exited() == 0
        assert agent.work_left() == []


@pytest.mark.spec("T3.2")
async def test_an_agent_whose_promised_job_never_comes_exits(coordinator: AgentHarness) -> None:
    coordinator.behaviour.ack = {"pending_dispatch": True}
    environ = {**SCALER, "KICI_SCALER_PENDING_DISPATCH_TIMEOUT": "300", "KICI_SCALER_IDLE_TIMEOUT": "60000"}
    async with AgentProcess(coordinator.url, **environ) as agent:
        assert await agent.exited() == 0
        assert AgentLeaving(reason="idle") in coordinator.heard


@pytest.mark.spec("T3.3")
async def test_a_warm_agent_outstays_the_idle_time_and_exits_after_its_job(coordinator: AgentHarness) -> None:
    coordinator.behaviour.ack = {"warm_pool": True}
    async with AgentProcess(coordinator.url, **SCALER, KICI_SCALER_IDLE_TIMEOUT="100") as agent:
        _ = await coordinator.agent()
        with pytest.raises(TimeoutError):
            await agent.exited(0.5)
        assert (await coordinator.run("true")).state == "success"
        assert await agent.exited() == 0


async def test_with_reuse_follow_up_jobs_run_until_the_number_is_reached(coordinator: AgentHarness) -> None:
    coordinator.behaviour.ack = {"reuse": Reuse(idle_seconds=60, max_jobs=2)}
    async with AgentProcess(coordinator.url, **SCALER) as agent:
        _ = await coordinator.run("true", job_id="a")
        _ = await coordinator.run("true", job_id="b")
        assert await agent.exited() == 0


@pytest.mark.spec("T3.4")
async def test_a_busy_agent_rejects_and_its_job_is_unaffected(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url):
        _ = await coordinator.agent()
        first = coordinator.dispatch(*shell("echo started; read x < fifo || sleep 0.3; echo done"))
        await coordinator.until(lambda: first.stdout)
        second = coordinator.dispatch("true", job_id="job-2")
        await coordinator.until(lambda: second.rejections)
        assert second.rejections == ["busy"]
        await coordinator.until(lambda: first.final)
        assert (first.state, first.stdout) == ("success", b"started\ndone\n")


@pytest.mark.spec("T3.6")
async def test_a_bad_token_ends_the_program_without_another_try() -> None:
    async with AgentHarness(tokens=frozenset({"good"})) as coordinator:
        async with AgentProcess(coordinator.url, KICI_AGENT_TOKEN="bad") as agent:
            assert await agent.exited() == 1
        assert len(coordinator.sessions) == 1
        async with AgentProcess(coordinator.url, KICI_AGENT_TOKEN="good", **SCALER) as agent:
            assert (await coordinator.run("true")).state == "success"
        async with AgentProcess(coordinator.url) as agent:
            assert await agent.exited() == 1


@pytest.mark.spec("scaler 46.4.1")
async def test_a_claim_code_is_good_for_one_agent() -> None:
    async with AgentHarness(tokens=frozenset({"good"})) as coordinator:
        coordinator.behaviour.claims["code"] = Credentials(
            agent_token="good", agent_id="scaler-event-1", labels=["gpu"]
        )
        async with AgentProcess(coordinator.url, KICI_SCALER_CLAIM_CODE="code", **SCALER) as agent:
            session = await coordinator.agent()
            assert session.registration is not None
            assert session.registration.agent_id == "scaler-event-1"
            assert "gpu" in session.registration.labels
            assert (await coordinator.run("true")).state == "success"
            assert await agent.exited() == 0
        async with AgentProcess(coordinator.url, KICI_SCALER_CLAIM_CODE="code", **SCALER) as agent:
            assert await agent.exited() == 1


@pytest.mark.spec("T3.9")
async def test_a_typing_error_in_the_environment_is_refused(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, KICI_LABEL="x") as agent:
        assert await agent.exited() == 2
        assert b"KICI_LABEL is not a setting of the agent: did you mean KICI_LABELS?" in agent.log.read_bytes()
    assert coordinator.sessions == []


async def test_a_drained_agent_finishes_its_job_first(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("echo started; sleep 0.3; echo done"))
        await coordinator.until(lambda: job.stdout)
        coordinator.agents[0].send(AgentExit(reason="scaled down"))
        late = coordinator.dispatch("true", job_id="job-2")
        await coordinator.until(lambda: late.rejections)
        assert late.rejections == ["draining"]
        assert await agent.exited() == 0
        assert job.stdout == b"started\ndone\n"


async def test_an_orphan_ends_itself_and_its_job(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER, KICI_AGENT_ORPHAN_TIMEOUT_MS="400") as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("echo $$; exec sleep 100"))
        await coordinator.until(lambda: job.stdout.endswith(b"\n"))
        await coordinator.vanish()
        assert await agent.exited() == 3
        assert not is_alive(int(job.stdout))
        assert agent.work_left() == []


async def test_a_terminal_that_closes_ends_the_agent_in_order(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("echo $$; exec sleep 100"))
        await coordinator.until(lambda: job.stdout.endswith(b"\n"))
        agent.hang_up()
        assert await agent.exited() == 0
        assert job.state == "failed"
        assert agent.work_left() == []


FAULT = """
from kici.wire.outbox import Outbox
def add(*_): raise RuntimeError("a planted fault")
Outbox.add = add
"""


async def test_an_agent_with_a_fault_of_its_own_ends_and_tells_its_story(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, prelude=FAULT) as agent:
        _ = await coordinator.agent()
        coordinator.dispatch(*shell("echo x; exec sleep 100"))
        assert await agent.exited() == 4
        (crash,) = [event for event in agent.events() if event["message"] == "agent.crashed"]
        assert "a planted fault" in crash["story"]
        assert agent.work_left() == []


async def test_a_runner_user_that_does_not_exist_is_refused(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, KICI_RUNNER_USER="no-such-user") as agent:
        assert await agent.exited() == 2
        assert b"there is no user 'no-such-user' here" in agent.log.read_bytes()


async def test_a_health_port_that_is_taken_does_not_stop_it(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER, KICI_PORT=str(coordinator.port)) as agent:
        assert (await coordinator.run("true")).state == "success"
        assert await agent.exited() == 0
        assert "agent.health" in [event["message"] for event in agent.events()]


# --- starting and ending steps


async def test_a_step_starts_in_an_empty_directory_with_nothing_on_its_input(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER):
        job = await coordinator.run(
            *shell("ls -A; cat; readlink /proc/self/fd/0; touch $TMPDIR/x; ps -o pid=,sid= -p $$")
        )
        lines = job.stdout.decode().splitlines()
        assert lines[0] == "/dev/null"
        pid, sid = lines[1].split()
        assert pid == sid, "a session of its own"


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        (("no-such-program",), 127, "command not found: no-such-program"),
        (("/etc/passwd",), 126, "not executable: /etc/passwd"),
        ((), 127, "the command is empty"),
        (("a\0b",), 126, "cannot start"),
    ],
)
async def test_a_command_that_cannot_start_fails_with_its_reason(
    coordinator: AgentHarness, command: tuple[str, ...], code: int, reason: str
) -> None:
    async with AgentProcess(coordinator.url, **SCALER) as agent:
        job = await coordinator.run(*command)
        assert (job.state, ended(job).exit_code) == ("failed", code)
        assert (ended(job).reason or "").startswith(reason)
        assert await agent.exited() == 0
        assert agent.work_left() == []


async def test_a_step_that_dies_of_a_signal_says_so(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER):
        job = await coordinator.run(*shell("kill -SEGV $$"))
        assert (job.state, ended(job).exit_code, ended(job).signal) == ("failed", None, signal.SIGSEGV)


async def test_a_step_that_runs_too_long_is_ended(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER):
        job = await coordinator.run(*shell("trap 'echo bye; exit 0' TERM; sleep 100 & wait"), timeout_ms=300)
        assert (job.state, job.stdout) == ("timed_out", b"bye\n")


@pytest.mark.spec("T7.5")
@pytest.mark.parametrize("options", [{"grace_ms": 300}, {"force": True}])
async def test_a_step_that_ignores_its_end_is_killed(coordinator: AgentHarness, options: dict[str, Any]) -> None:
    async with AgentProcess(coordinator.url, **SCALER) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("trap 'echo no' TERM; echo started; while :; do sleep 0.05; done"))
        await coordinator.until(lambda: job.stdout)
        coordinator.cancel(**options)
        await coordinator.until(lambda: job.final)
        assert (job.state, ended(job).signal) == ("cancelled", signal.SIGKILL)
        assert (b"no" in job.stdout) == ("grace_ms" in options)
        assert await agent.exited() == 0
        assert agent.work_left() == []


LEAVES_BEHIND = """
import os, sys, time
tells, told = os.pipe()
def daemon(setsid):
    if os.fork() == 0:
        if setsid: os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            os.write(told, b".")
            time.sleep(1000)
        os._exit(0)
daemon(False); daemon(True)
for _ in range(2): os.read(tells, 1)
"""


async def test_nothing_that_a_step_leaves_behind_survives_it(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url):
        job = await coordinator.run(sys.executable, "-c", LEAVES_BEHIND)
        assert job.state == "success"
        left = [int(word) for word in job.stdout.split()]
        assert len(left) == 2
        assert [pid for pid in left if is_alive(pid)] == []


async def test_a_background_process_that_keeps_the_output_open_does_not_hold_the_job(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER):
        _ = await coordinator.agent()
        began = time.monotonic()
        job = await coordinator.run(*shell("sleep 1000 & echo done"))
        assert (job.state, job.stdout) == ("success", b"done\n")
        assert time.monotonic() - began < 5


# --- work directory


@pytest.mark.spec("T3.7")
@pytest.mark.parametrize("how", ["success", "failure", "cancel", "term"])
async def test_the_work_directory_is_gone_however_the_job_ends(coordinator: AgentHarness, how: str) -> None:
    messy = "mkdir -p a/b; touch a/b/c; chmod 0 a/b; mkdir $TMPDIR/t; pwd; "
    rest = {"success": "exit 0", "failure": "exit 1"}.get(how, "sleep 100")
    async with AgentProcess(coordinator.url, **SCALER) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell(messy + rest))
        await coordinator.until(lambda: job.stdout.endswith(b"\n"))
        if how == "cancel":
            coordinator.cancel(grace_ms=1000)
        elif how == "term":
            agent.terminate()
        assert await agent.exited() == 0
        assert agent.work_left() == []


async def test_told_to_stop_an_agent_ends_a_stubborn_step_and_exits_within_four_seconds(
    coordinator: AgentHarness,
) -> None:
    coordinator.behaviour.acknowledges_status = False
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("trap '' TERM; echo started; while :; do sleep 0.05; done"))
        await coordinator.until(lambda: job.stdout)
        began = time.monotonic()
        agent.terminate()
        assert await agent.exited() == 0
        assert 2.9 < time.monotonic() - began < 10, "the grace of a step, not what an offline agent keeps its job for"
        assert (job.state, ended(job).reason) == ("failed", "the agent was told to stop (SIGTERM)")
        await coordinator.until(lambda: AgentLeaving(reason="signal") in coordinator.heard)
        assert agent.work_left() == []


async def test_what_a_killed_agent_left_is_collected_by_the_next_one(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("echo $$; touch file; exec sleep 1000"))
        await coordinator.until(lambda: job.stdout.endswith(b"\n"))
        os.kill(agent.pid, signal.SIGKILL)
        assert await agent.exited() == -signal.SIGKILL
        os.kill(int(job.stdout), signal.SIGKILL)  # what a backend does: its whole session
        assert agent.work_left() != []
        async with AgentProcess(coordinator.url, **SCALER, TMPDIR=str(agent.tmp)) as next_agent:
            _ = await coordinator.run("true", job_id="job-2")
            assert await next_agent.exited() == 0
        assert agent.work_left() == []


# --- secrets and environment


@pytest.mark.spec("T3.8")
async def test_a_secret_reaches_the_step_and_nobody_else(coordinator: AgentHarness) -> None:
    secrets = {"API_KEY": "hunter2-value", "PEM": "line-one\nline-two\n"}
    script = """
        test "$API_KEY" = hunter2-value && echo same
        for part in hunter 2-val ue; do printf %s $part; sleep 0.05; done; echo
        echo "err: $PEM" >&2
        tr '\\0' '\\n' < /proc/$PPID/environ | grep -c -e hunter2 -e kat_secret
        tr '\\0' '\\n' < /proc/$PPID/cmdline | grep -c hunter2
        ps axww -o args | grep -v grep | grep -c hunter2
        env | grep -c -e KICI_ -e kat_secret
    """
    async with AgentProcess(coordinator.url, **SCALER, KICI_AGENT_TOKEN="kat_secret") as agent:
        job = await coordinator.run(*shell(script), secrets=secrets)
        assert job.stdout.decode().split() == ["same", "***", "0", "0", "0", "0"]
        assert job.stderr == b"err: ***\n***\n\n"
        assert await agent.exited() == 0
        assert b"hunter2" not in agent.log.read_bytes()
        assert b"kat_secret" not in agent.log.read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
async def test_the_agents_memory_is_closed_to_its_steps(coordinator: AgentHarness) -> None:
    """Without root's privileges a step of the same user cannot open the agent's memory or environment."""
    script = "for f in environ maps mem; do cat /proc/$PPID/$f >/dev/null 2>&1 && echo open; done; echo end"
    async with AgentProcess(coordinator.url, **SCALER, KICI_RUNNER_USER="nobody") as agent:
        agent.tmp.chmod(0o711)
        job = await coordinator.run(*shell(f"{script}; id -un; touch x && echo writable; echo $HOME"))
        assert job.stdout.decode().split()[:3] == ["end", "nobody", "writable"]
        assert await agent.exited() == 0
        assert agent.work_left() == []


@pytest.mark.spec("T3.10")
async def test_a_step_sees_the_system_its_job_and_nothing_else(coordinator: AgentHarness) -> None:
    environ = {"HOME": "/somewhere", "DATABASE_URL": "postgres://x", "AGENT_COMPUTE_MARK": "m"}
    async with AgentProcess(coordinator.url, **SCALER, **environ):
        job = await coordinator.run("env", env={"CI": "true", "KICI_X": "1", "HOME": "/mine"})
        names = {line.partition("=")[0] for line in job.stdout.decode().splitlines()}
        assert names - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "CI", "AGENT_COMPUTE_MARK"}
        assert b"HOME=/mine\n" in job.stdout


# --- output


async def test_output_is_kept_byte_for_byte(coordinator: AgentHarness) -> None:
    produce = "import os; d=bytes(range(256))*4096; os.write(1,d); os.write(2,d[::-1]); os.write(1,b'no newline')"
    async with AgentProcess(coordinator.url, **SCALER):
        job = await coordinator.run(sys.executable, "-c", produce)
        data = bytes(range(256)) * 4096
        assert job.stdout == data + b"no newline"
        assert job.stderr == data[::-1]


async def test_the_first_output_is_seen_while_the_step_runs(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url):
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell("printf prompt; sleep 1000"))
        await coordinator.until(lambda: job.stdout == b"prompt")
        assert job.process_started
        assert job.final is None


async def test_a_step_waits_when_nobody_takes_its_output_and_loses_nothing(coordinator: AgentHarness) -> None:
    coordinator.behaviour.acknowledges_output = False
    size = 3 * 1024 * 1024
    async with AgentProcess(coordinator.url, **SCALER):
        _ = await coordinator.agent()
        job = coordinator.dispatch(*shell(f"head -c {size} /dev/zero; echo end >&2"))
        await coordinator.until(lambda: len(job.stdout) >= 1024 * 1024 - 65536)
        await asyncio.sleep(0.2)
        assert len(job.stdout) < 1024 * 1024 + 2 * 65536
        assert job.stderr == b""
        coordinator.behaviour.acknowledges_output = True
        coordinator.acknowledge_all()
        await coordinator.until(lambda: job.final)
        assert job.stdout == bytes(size)
        assert job.stderr == b"end\n"


async def test_in_drop_mode_a_step_never_waits(coordinator: AgentHarness) -> None:
    coordinator.behaviour.acknowledges_output = False
    size = 3 * 1024 * 1024
    async with AgentProcess(coordinator.url, **SCALER, KICI_BACKPRESSURE_MODE="drop"):
        job = await coordinator.run(*shell(f"head -c {size} /dev/zero"))
        kept, _, marker = job.stdout.partition(b"\n[kici: ")
        dropped = int(marker.split()[0])
        assert len(kept) + dropped == size
        assert dropped > 1024 * 1024


async def test_too_much_output_is_cut_with_a_notice(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER, KICI_MAX_LOG_SIZE_BYTES="1000"):
        job = await coordinator.run(*shell("head -c 5000 /dev/zero; exit 4"))
        assert job.stdout == bytes(1000) + b"\n[kici: output cut here, its limit is 1000 bytes]\n"
        assert ended(job).exit_code == 4


# --- health port


async def test_the_health_port_tells_whether_it_is_connected(coordinator: AgentHarness) -> None:
    port = free_port()

    async def get(path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        return text

    async with AgentProcess(coordinator.url, KICI_PORT=str(port)):
        _ = await coordinator.run("true")
        assert '"connected":true' in await get("/health")
        assert (await get("/ready")).startswith("HTTP/1.1 200")
        await coordinator.until(lambda: coordinator.jobs["job-1"].final)
        assert "kici_agent_connection_status 1\n" in await get("/metrics")
        assert (await get("/other")).startswith("HTTP/1.1 404")
        coordinator.behaviour.refuse = (4006, "later")
        coordinator.gateway.close_all(1001, "restart")
        await coordinator.until(lambda: coordinator.closed)
        async with asyncio.timeout(30):
            while not (await get("/ready")).startswith("HTTP/1.1 503"):
                pass


# --- cost


async def test_an_agent_is_small(coordinator: AgentHarness) -> None:
    """How quick it is, `make bench ARGS=spawn` says."""
    async with AgentProcess(coordinator.url) as agent:
        _ = await coordinator.agent()
        assert agent.resident_kb < 40_000


async def test_offers_of_a_job_twice_start_it_once(coordinator: AgentHarness) -> None:
    async with AgentProcess(coordinator.url, **SCALER):
        session = await coordinator.agent()
        job = coordinator.dispatch(*shell("echo x >> ../once; cat ../once"))
        session.send(JobDispatch(job_id="job-1", run_id="run-1"))
        await coordinator.until(lambda: job.final)
        assert job.stdout == b"x\n"
