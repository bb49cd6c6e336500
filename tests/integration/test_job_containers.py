"""Jobs in containers that their agents make, on a real engine: what they see, how they end, what is left."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import (
    BUSYBOX,
    DEBIAN,
    EMPTY,
    USER,
    LabCoordinator,
    a_pool,
    coordinator,
    import_images,
)

from kici.adapters.docker_jobs import DockerJobEngine
from kici.backends.container.job_image import LABELS as BUILT_LABELS
from kici.ports.engine import EngineAddress, EngineKind
from kici.testing.agent_harness import AgentHarness, AgentProcess, HarnessJob
from kici.testing.programs import until as wait_until
from kici.wire.messages import JobContainer

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("job-containers"), pytest.mark.timeout(180)]
SECONDS = 60.0
SHELL = ("/bin/sh", "-c")


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        yield running


@asynccontextmanager
async def an_agent(engine: Lab, **environ: str) -> AsyncIterator[tuple[AgentHarness, AgentProcess]]:
    """Its rules would be this machine's: it sets none."""
    told = {
        "TMPDIR": str(engine.folder),
        "DOCKER_HOST": f"unix://{engine.socket}",
        "KICI_SANDBOX_NETWORK_ISOLATION": "false",
        "PATH": os.environ["PATH"],
        **environ,
    }
    async with AgentHarness() as coordinator, AgentProcess(coordinator.url, **told) as agent:
        yield coordinator, agent
        assert coordinator.faults == []
    # Whatever of its jobs is left goes a moment after it; nobody else is to find it.
    await until(lambda: not processes(engine))
    await until(lambda: not job_containers(engine))


def job_containers(engine: Lab) -> list[dict[str, Any]]:
    return engine.containers(kici_job_container="true")


def processes(engine: Lab) -> list[int]:
    """Programs that look after containers of this engine's jobs."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            is_ours = str(engine.folder).encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if b"kici.apps.job_container" in words and is_ours:
            found.append(int(path.name))
    return found


async def until(condition: Any, seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (an engine tells nobody)
            await asyncio.sleep(0.05)


def in_image(image: str, **more: Any) -> JobContainer:
    return JobContainer(image=image, **more)


@pytest.mark.parametrize("image", [BUSYBOX, DEBIAN, USER])
async def test_a_job_runs_in_its_image_and_nothing_is_left(engine: Lab, image: str) -> None:
    async with an_agent(engine) as (coordinator, _):
        script = "echo $GREETING $NAME $(id -u) $(pwd); echo oops >&2; echo > here; exit 3"
        job = await coordinator.run(*SHELL, script, env={"NAME": "job"}, container=in_image(image), seconds=SECONDS)
        assert job.final is not None
        assert job.final.exit_code == 3, job.stderr
        expected = {BUSYBOX: "job 0", DEBIAN: "hello job 0", USER: "job 1234"}[image]
        assert job.stdout.decode().split() == [*expected.split(), "/workspace"]
        assert job.stderr.endswith(b"oops\n")
        await until(lambda: not job_containers(engine))
        volumes = engine.ask("GET", "/volumes")["Volumes"] or []
        assert {one["Name"][:13] for one in volumes} == {"kici-runtime-"}


async def test_a_runtime_that_somebody_removed_is_made_again(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, _):
        first = await coordinator.run(*SHELL, "echo one", container=in_image(BUSYBOX), seconds=SECONDS)
        await until(lambda: not job_containers(engine))
        (volume,) = engine.ask("GET", "/volumes")["Volumes"]
        engine.ask("DELETE", f"/volumes/{volume['Name']}")
        second = await coordinator.run(*SHELL, "echo two", job_id="job-2", container=in_image(BUSYBOX), seconds=SECONDS)
        assert (first.stdout, second.stdout) == (b"one\n", b"two\n"), second.stderr


@pytest.mark.spec("scaler 29.4")
async def test_its_container_is_closed(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, _):
        _ = await coordinator.agent()
        container = in_image(BUSYBOX, cpus=0.5, memory_bytes=96 * 2**20)
        job = coordinator.dispatch(*SHELL, "grep CapBnd /proc/self/status; sleep 100", container=container)
        await coordinator.until(lambda: b"CapBnd" in job.stdout, SECONDS)
        assert job.stdout == b"CapBnd:\t0000000000000000\n"
        (one,) = job_containers(engine)
        host = engine.ask("GET", f"/containers/{one['Id']}/json")["HostConfig"]
        assert (host["NanoCpus"], host["Memory"], host["MemorySwap"]) == (500_000_000, 96 * 2**20, 96 * 2**20)
        assert (host["PidsLimit"], host["CapDrop"], host["SecurityOpt"]) == (512, ["ALL"], ["no-new-privileges"])
        assert one["Labels"] == {
            "kici-managed": "true",
            "kici-job-container": "true",
            "kici-agent-id": "agent-1",
            "kici-bound-job-id": "job-1",
            "kici-run-id": "run-1",
        }
        coordinator.cancel(force=True)
        await coordinator.until(lambda: job.final, SECONDS)


async def test_an_agent_can_be_told_to_close_less_or_more(engine: Lab) -> None:
    tight = {"KICI_SANDBOX_READONLY_ROOTFS": "true", "KICI_SANDBOX_USER": "1234", "KICI_SANDBOX_HARDENED": "false"}
    async with an_agent(engine, **tight) as (coordinator, _):
        script = "(echo > /here) 2>/dev/null || echo closed; echo > here; echo > /tmp/here; id -u; "
        script += "grep CapBnd /proc/self/status"
        job = await coordinator.run(*SHELL, script, container=in_image(BUSYBOX), seconds=SECONDS)
        closed, user, capabilities = job.stdout.decode().splitlines()
        assert (closed, user) == ("closed", "1234"), job.stderr
        assert int(capabilities.split()[1], 16) != 0


async def test_a_job_that_declares_no_limit_gets_the_agents(engine: Lab) -> None:
    limits = {"KICI_SANDBOX_MEMORY_BYTES": str(48 * 2**20), "KICI_SANDBOX_PIDS_LIMIT": "32"}
    async with an_agent(engine, **limits) as (coordinator, _):
        eats = "x=$(cat /dev/zero | tr '\\0' a); echo survived"
        job = await coordinator.run(*SHELL, eats, container=in_image(BUSYBOX), seconds=SECONDS)
        assert job.final is not None
        assert job.final.state == "failed"
        assert b"survived" not in job.stdout
        forks = f"for n in {' '.join(map(str, range(40)))}; do sleep 5 & done"
        job = await coordinator.run(*SHELL, forks, job_id="job-2", container=in_image(BUSYBOX), seconds=SECONDS)
        assert b"fork" in job.stderr


@pytest.mark.spec("D35")
async def test_what_a_job_is_told_is_nowhere_to_be_read(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, agent):
        _ = await coordinator.agent()
        job = coordinator.dispatch(
            *SHELL,
            "echo it is $TOKEN; sleep 100",
            secrets={"TOKEN": "open-sesame-42"},
            container=in_image(BUSYBOX, username="me", password="hunter2-77", registry="127.0.0.1:1"),
        )
        await coordinator.until(lambda: b"it is" in job.stdout, SECONDS)
        assert job.stdout == b"it is ***\n"
        (one,) = job_containers(engine)
        told = json.dumps(engine.ask("GET", f"/containers/{one['Id']}/json"))
        told += json.dumps(engine.ask("GET", f"/containers/{one['Id']}/top?ps_args=-eo%20pid,args"))
        (program,) = processes(engine)
        for name in ("environ", "cmdline"):
            for pid in (program, agent.pid, engine.ask("GET", f"/containers/{one['Id']}/json")["State"]["Pid"]):
                told += (Path("/proc") / str(pid) / name).read_text()
        assert "sesame" not in told
        assert "hunter2" not in told
        coordinator.cancel(force=True)
        await coordinator.until(lambda: job.final, SECONDS)


async def test_output_is_byte_exact_however_much(engine: Lab) -> None:
    async with an_agent(engine, KICI_MAX_LOG_SIZE_BYTES="100000000") as (coordinator, _):
        script = "i=0; while [ $i -lt 64 ]; do printf '%065536d' $i; i=$((i+1)); done; printf '\\377\\0end' >&2"
        job = await coordinator.run(*SHELL, script, container=in_image(DEBIAN), seconds=SECONDS)
        assert job.stdout == b"".join(b"%065536d" % number for number in range(64))
        assert job.stderr == b"\377\0end"


async def test_a_job_is_asked_to_end_and_then_made_to(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, _):
        _ = await coordinator.agent()
        script = "trap 'echo asked; exit 5' TERM; echo ready; while true; do sleep 0.1; done"
        job = coordinator.dispatch(*SHELL, script, container=in_image(BUSYBOX))
        await coordinator.until(lambda: b"ready" in job.stdout, SECONDS)
        coordinator.cancel(grace_ms=20_000)
        await coordinator.until(lambda: job.final, SECONDS)
        assert job.stdout == b"ready\nasked\n"
        assert job.final is not None
        assert (job.final.state, job.final.exit_code) == ("cancelled", 5)

        job = coordinator.dispatch(
            *SHELL,
            "trap '' TERM; echo deaf; while true; do sleep 0.1; done",
            job_id="job-2",
            container=in_image(BUSYBOX),
        )
        await coordinator.until(lambda: b"deaf" in job.stdout, SECONDS)
        coordinator.cancel("job-2", grace_ms=300)
        await coordinator.until(lambda: job.final, SECONDS)
        assert job.final is not None
        assert job.final.state == "cancelled"
        await until(lambda: not job_containers(engine))


async def test_a_job_that_runs_too_long_is_ended(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, _):
        job = await coordinator.run(*SHELL, "sleep 100", timeout_ms=4000, container=in_image(BUSYBOX), seconds=SECONDS)
        assert job.final is not None
        assert job.final.state == "timed_out"
        await until(lambda: not job_containers(engine))


@pytest.mark.parametrize("who", ["agent by TERM", "agent by KILL", "agent and program by KILL"])
async def test_no_container_outlives_its_agent(engine: Lab, who: str) -> None:
    async with an_agent(engine) as (coordinator, agent):
        _ = await coordinator.agent()
        job = coordinator.dispatch(*SHELL, "echo ready; sleep 100", container=in_image(BUSYBOX))
        await coordinator.until(lambda: b"ready" in job.stdout, SECONDS)
        victims = [agent.pid, *(processes(engine) if "program" in who else [])]
        for pid in victims:
            os.kill(pid, signal.SIGTERM if "TERM" in who else signal.SIGKILL)
        await agent.exited()
        await until(lambda: not job_containers(engine))
        await until(lambda: not processes(engine))
    async with an_agent(engine):
        records = next(engine.folder.glob("kici-containers-*")) / "containers"
        await until(lambda: not list(records.iterdir()))


async def test_the_next_agent_removes_a_container_that_never_ran(engine: Lab) -> None:
    """Its maker died between making and starting it: nothing in it can end it."""
    records = engine.folder / f"kici-containers-{os.getuid()}" / "containers"
    records.mkdir(mode=0o700, parents=True, exist_ok=True)
    records.parent.chmod(0o700)
    engine.ask(
        "POST",
        "/containers/create?name=kici-job-lost",
        {"Image": BUSYBOX, "Cmd": ["true"], "Labels": {"kici-job-container": "true"}},
    )
    engine.ask("POST", "/containers/create?name=bystander", {"Image": BUSYBOX, "Cmd": ["true"]})
    (records / "kici-job-lost").write_text(f"unix://{engine.socket}")
    async with an_agent(engine):
        await until(lambda: not job_containers(engine))
        await until(lambda: not list(records.iterdir()))
    assert engine.ask("GET", "/containers/bystander/json") is not None
    engine.ask("DELETE", "/containers/bystander")


async def ends(engine: Lab, *command: str, **container: Any) -> HarnessJob:
    async with an_agent(engine) as (coordinator, _):
        return await coordinator.run(*command, container=JobContainer(**container), seconds=SECONDS)


async def test_an_image_that_is_nowhere_is_the_reason(engine: Lab) -> None:
    job = await ends(engine, "true", image="127.0.0.1:1/nobody/has:this")
    assert job.final is not None
    assert "image 127.0.0.1:1/nobody/has:this could not be pulled" in str(job.final.reason)


async def test_a_command_that_is_not_in_the_image_is_the_reason(engine: Lab) -> None:
    job = await ends(engine, "/no/such", image=EMPTY)
    assert job.final is not None
    assert job.final.exit_code == 127
    assert job.stderr.endswith(b"command not found in the image: /no/such\n")


async def test_a_host_without_an_engine_is_the_reason(engine: Lab) -> None:
    async with an_agent(engine, DOCKER_HOST="unix:///nowhere.sock") as (coordinator, _):
        session = await coordinator.agent()
        assert session.registration is not None
        assert not [label for label in session.registration.labels if label.startswith("kici:runtime:")]
        job = await coordinator.run("true", container=in_image(BUSYBOX), seconds=SECONDS)
        assert job.final is not None
        assert "this agent has no engine to make it" in str(job.final.reason)


async def test_an_agent_says_which_engine_it_has(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, _):
        session = await coordinator.agent()
        assert session.registration is not None
        assert {"kici:runtime:docker", "kici:runtime:container-build"} <= set(session.registration.labels)


STAGES = f"""
FROM {BUSYBOX} AS base
ARG WORD=none
COPY data/greeting /greeting
RUN echo $WORD >> /greeting
FROM base AS more
RUN echo more >> /greeting
"""
FILES = {"ci/Dockerfile": STAGES, "data/greeting": "hello\n"}


async def test_an_image_is_built_and_used(engine: Lab) -> None:
    job = await ends(
        engine,
        "/bin/cat",
        "/greeting",
        dockerfile="ci/Dockerfile",
        context=FILES,
        args={"WORD": "world"},
        target="base",
    )
    assert job.stdout == b"hello\nworld\n", job.stderr
    assert b"kici: building the image from ci/Dockerfile\n" in job.stderr
    assert b"RUN echo $WORD" in job.stderr
    job = await ends(engine, "/bin/cat", "/greeting", dockerfile="ci/Dockerfile", context=FILES)
    assert job.stdout == b"hello\nnone\nmore\n", job.stderr


async def test_an_instruction_that_fails_is_the_reason(engine: Lab) -> None:
    job = await ends(
        engine, "true", dockerfile="Dockerfile", context={"Dockerfile": f"FROM {BUSYBOX}\nRUN echo almost; exit 9\n"}
    )
    assert job.final is not None
    assert job.final.state == "failed"
    assert "step 2, RUN echo almost; exit 9: " in str(job.final.reason)
    assert str(job.final.reason).strip().endswith((" code: 9", " exit status 9"))  # as the engine says it
    assert b"almost" in job.stderr


async def test_a_dockerfile_that_was_not_given_is_the_reason(engine: Lab) -> None:
    job = await ends(engine, "true", dockerfile="Dockerfile", context={"Containerfile": "FROM scratch\n"})
    assert job.final is not None
    assert "there is no Dockerfile among the files of the build (Containerfile)" in str(job.final.reason)


async def test_a_build_that_is_called_off_leaves_nothing(engine: Lab) -> None:
    async with an_agent(engine) as (coordinator, _):
        _ = await coordinator.agent()
        files = {"Dockerfile": f"FROM {BUSYBOX}\nRUN echo begun && sleep 100\n"}
        job = coordinator.dispatch("true", container=JobContainer(dockerfile="Dockerfile", context=files))
        await coordinator.until(lambda: b"kici: begun" in job.stderr, SECONDS)
        coordinator.cancel(grace_ms=5000)
        await coordinator.until(lambda: job.final, SECONDS)
        assert job.final is not None
        assert job.final.state == "cancelled"
        await until(lambda: not engine.containers())
        await until(lambda: not processes(engine))


async def test_only_images_that_were_built_for_jobs_are_removed_in_time(engine: Lab) -> None:
    files = {"Dockerfile": f"FROM {BUSYBOX}\nRUN echo prune > /me\n"}
    job = await ends(engine, "/bin/cat", "/me", dockerfile="Dockerfile", context=files)
    assert job.stdout == b"prune\n", job.stderr
    await until(lambda: not job_containers(engine))
    client = DockerJobEngine(EngineAddress(url=f"unix://{engine.socket}", kind=EngineKind.DOCKER, is_local=True))

    def built() -> list[str]:
        return [
            tag for one in engine.ask("GET", "/images/json") for tag in one["RepoTags"] or () if "kici-built" in tag
        ]

    try:
        await client.prune_images(BUILT_LABELS, older_than_hours=1)
        assert built()
        for _ in range(40):  # an agent that looks for old images at this moment keeps the engine from doing it for us
            await client.prune_images(BUILT_LABELS, older_than_hours=0)
            if not built():
                break
            await asyncio.sleep(0.25)
        assert not built()
    finally:
        await client.close()
    assert engine.ask("GET", f"/images/{BUSYBOX}/json") is not None


async def test_the_same_image_is_built_once_at_a_time(engine: Lab) -> None:
    """The second waits for the first, and finds every instruction done."""
    files = {"Dockerfile": f"FROM {BUSYBOX}\nRUN sleep 3; echo $PPID > /made\n"}
    container = JobContainer(dockerfile="Dockerfile", context=files)
    async with an_agent(engine) as (first, _), an_agent(engine) as (second, _):
        both = (first, second)
        for coordinator in both:
            _ = await coordinator.agent()
        one, other = [coordinator.dispatch("/bin/cat", "/made", container=container) for coordinator in both]
        await first.until(lambda: one.final, SECONDS)
        await second.until(lambda: other.final, SECONDS)
    assert one.stdout == other.stdout != b""
    assert sorted(b"another job is building this image" in job.stderr for job in (one, other)) == [False, True]
    assert sorted(b"Using cache" in job.stderr for job in (one, other)) == [False, True]


async def test_an_engine_that_stops_ends_its_jobs_and_runs_others_later() -> None:
    """Its jobs are asked to end, and say by what; while it is away a job fails with the reason."""
    with lab() as engine:
        import_images(engine)
        async with an_agent(engine) as (coordinator, _):
            _ = await coordinator.agent()
            job = coordinator.dispatch(*SHELL, "echo ready; sleep 100", container=in_image(BUSYBOX))
            await coordinator.until(lambda: b"ready" in job.stdout, SECONDS)
            await asyncio.to_thread(engine.stop_engine)
            await coordinator.until(lambda: job.final, SECONDS)
            assert job.final is not None
            assert job.final.state == "failed"
            assert b"ended by signal 15" in job.stderr or "does not answer" in str(job.final.reason)
            job = await coordinator.run("true", job_id="job-2", container=in_image(BUSYBOX), seconds=SECONDS)
            assert job.final is not None
            assert f"the container engine at unix://{engine.socket} does not answer" in str(job.final.reason)
            engine.start_engine()
            job = await coordinator.run(
                "/bin/echo", "again", job_id="job-3", container=in_image(BUSYBOX), seconds=SECONDS
            )
            assert job.stdout == b"again\n", job.final
            await until(lambda: not job_containers(engine))
        async with an_agent(engine):
            records = next(engine.folder.glob("kici-containers-*")) / "containers"
            await until(lambda: not list(records.iterdir()))


# ---------------------------------------------------------------------- whole jobs, from the command line


@pytest.fixture(scope="module")
def kici(engine: Lab) -> Iterator[LabCoordinator]:
    """Process agents with an engine, others without, and agents in containers."""
    with_engine = {"DOCKER_HOST": f"unix://{engine.socket}", "TMPDIR": str(engine.folder)}
    environments = {
        "host": with_engine,
        "open": {**with_engine, "KICI_SANDBOX_NETWORK_ISOLATION": "false"},
        "bare": {"DOCKER_HOST": "unix:///nowhere.sock"},
    }
    scalers = (
        {
            "name": name,
            "type": "bare-metal",
            "maxAgents": 4,
            "labelSets": [{"labels": ["linux", name], "binaryPath": "kici-agent", "env": env}],
        }
        for name, env in environments.items()
    )
    with coordinator(engine, "process-agents", *scalers, a_pool(engine)) as running:
        yield running


@pytest.mark.spec("scaler 18.13")
def test_a_process_agent_runs_a_job_in_its_image_with_its_secrets(kici: LabCoordinator) -> None:
    assert kici.run("admin", "secrets", "set", "deploy:token", given="open-sesame-42\n").returncode == 0
    script = "echo ${#TOKEN} in $(pwd) as $(id -u); exit 4"
    asked = ("run", "-l", "host", "--image", USER, "--secret", "TOKEN=deploy:token", "--", "/bin/sh", "-c", script)
    done = kici.run(*asked)
    assert (done.returncode, done.stdout) == (4, "14 in /workspace as 1234\n"), done.stderr
    until_sync(lambda: not job_containers(kici.lab))


def test_a_job_that_needs_an_engine_fails_with_the_reason_where_there_is_none(kici: LabCoordinator) -> None:
    done = kici.run("run", "-l", "bare", "--image", BUSYBOX, "--", "true")
    assert done.returncode != 0
    assert "the agent's host has neither docker nor podman; name labels of agents that have one" in done.stderr


@pytest.mark.spec("scaler 28.4.5")
def test_a_job_builds_its_image_where_an_agent_can(kici: LabCoordinator) -> None:
    job = {"command": ["/bin/cat", "/greeting"], "container": {"dockerfile": "ci/Dockerfile", "context": FILES}}
    file = kici.lab.folder / "built.json"
    file.write_text(json.dumps({"jobs": {"built": {**job, "runsOn": ["host"]}}}))
    done = kici.run("submit", str(file))
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout
    file.write_text(json.dumps({"jobs": {"built": {**job, "runsOn": ["pool"]}}}))
    done = kici.run("submit", str(file))
    assert done.returncode != 0
    assert "neither docker nor podman" in done.stdout + done.stderr


def test_the_command_line_brings_what_a_dockerfile_copies(kici: LabCoordinator) -> None:
    folder = kici.lab.folder / "sources"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {BUSYBOX}\nCOPY data /data/\n")
    (folder / "data").mkdir()
    (folder / "data" / "greeting").write_text("hello from here\n")
    job = {"runsOn": ["host"], "command": ["/bin/cat", "/data/greeting"], "container": {"dockerfile": "Dockerfile"}}
    (folder / "run.json").write_text(json.dumps({"jobs": {"one": job}}))
    done = kici.run("submit", str(folder / "run.json"))
    assert "hello from here" in done.stdout, done.stderr


def test_a_jobs_container_reaches_what_jobs_may_reach(kici: LabCoordinator) -> None:
    """Not this machine's ports, nor another job's container.  Without rules the ports are open."""
    kici.lab.spawn("python3", "-m", "http.server", "8099", "--bind", "0.0.0.0")
    until_sync(lambda: ":8099 " in kici.lab.run("ss", "-Hltn"))
    listens = "ip -4 addr show eth0 | grep inet; nc -l -p 7000 -e /bin/echo hello; sleep 100"
    first = kici.submit(listens, "-l", "host", "--image", BUSYBOX)
    until_sync(lambda: "inet" in kici.output(first))
    address = kici.output(first).split()[1].partition("/")[0]
    assert address.startswith("172.31.")
    script = "gateway=$(ip route | grep default | tr ' ' '\\n' | grep '\\.' | grep -v src); "
    script += "nc -w 2 $gateway 8099 </dev/null && echo open host; "
    script += f"nc -w 2 {address} 7000 </dev/null && echo open peer; echo done"
    found = {}
    for label in ("host", "open"):
        found[label] = kici.run("run", "-l", label, "--image", BUSYBOX, "--", "/bin/sh", "-c", script).stdout
    assert found == {"host": "done\n", "open": "open host\ndone\n"}
    assert kici.run("cancel", first).returncode == 0
    until_sync(lambda: not job_containers(kici.lab))

    def elements() -> list[object]:
        told = json.loads(kici.lab.run("nft", "-j", "list", "map", "inet", "kici_jobs", "agents_forward"))
        return [item["map"].get("elem") for item in told["nftables"] if "map" in item]

    until_sync(lambda: elements() == [None])


def until_sync(condition: Any) -> None:
    wait_until(condition, seconds=60, what="it happens")
