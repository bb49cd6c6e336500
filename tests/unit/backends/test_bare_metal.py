"""What bare metal does beyond the contract of backends, on a fake host and on virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kici.adapters.cgroups import NoCgroups
from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.decide.launch import CgroupPlan, CgroupSupport, LaunchHost, LimitsBy, ProcessSet, Systemd
from kici.domain.errors import DeterministicRefusal, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, JobId, ScalerName, TokenId
from kici.domain.resources import NOTHING, Amount
from kici.domain.spawn import ScaleDownReason
from kici.kit.supervise import Supervisor
from kici.ports.backend import ComputeState, SpawnOrder
from kici.ports.cgroups import Cgroup, Cgroups
from kici.ports.processes import Completed, Exit, Process, ProcessId, Program, Starter
from kici.testing.contracts.backend import Heard
from kici.testing.fake_files import FakeFiles
from kici.testing.fake_processes import FakeHost, FakeProcesses, Script
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import virtual

ID = AgentId("scaler-bare-metal-00000001")
OTHER = AgentId("scaler-bare-metal-00000002")
RECORD = Path("/data/agents") / f"{ID}.json"
LOG = RECORD.with_suffix(".log")
LINUX = LaunchHost(system="linux", environment={"PATH": "/bin"}, python="/bin/python", program_folder="/bin")
AGENT = "/opt/agent"
OWN = "/bin/python"


def an_order(agent_id: AgentId = ID, *labels: str, limits: Amount = NOTHING) -> SpawnOrder:
    return SpawnOrder(
        agent_id=agent_id,
        label_set=labels or ("linux",),
        labels=("linux", "kici:scaler:local"),
        gate=frozenset({"gpu"}),
        token="sesame",
        token_id=TokenId("token-1"),
        orchestrator_url="ws://127.0.0.1:4000/ws",
        limits=limits,
        requests=NOTHING,
        bound_job_id=JobId("job-1"),
    )


class World:
    """One coordinator on a fake machine."""

    def __init__(self, script: Script | None = None, host: LaunchHost = LINUX) -> None:
        self.files = FakeFiles()
        self.machine = FakeHost(self.files, {AGENT: script or Script(), OWN: Script()})
        self.host = host
        self.heard = Heard()
        self.cgroups: Cgroups = NoCgroups()
        self.zygote: Starter | None = None
        self.settings = BareMetalSettings(
            scaler=ScalerName("local"),
            max_agents=4,
            sets=(
                ProcessSet(labels=("linux",), binary_path=AGENT),
                ProcessSet(labels=("own",), binary_path="kici-agent"),
                ProcessSet(labels=("image",), binary_path=None, image="ubuntu"),
            ),
            enforce_cgroups=True,
            data_dir=Path("/data"),
            log_bytes_max=1000,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "World":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.machine.is_stuck = False
        await self.backend.shutdown_all()
        await self._stack.aclose()

    async def start(self) -> None:
        self.processes = FakeProcesses(self.machine)
        self.backend = self.another(self.settings, await self._stack.enter_async_context(Supervisor("test")))

    async def restart(self) -> None:
        await self._stack.aclose()
        await self.start()

    def another(self, settings: BareMetalSettings, supervisor: Supervisor) -> BareMetalBackend:
        self.supervisor = supervisor
        tools = Tools(
            processes=self.processes, files=self.files, cgroups=self.cgroups, clock=SimClock(), zygote=self.zygote
        )
        return BareMetalBackend(
            settings=settings, host=self.host, tools=tools, supervisor=supervisor, on_exit=self.heard.on_exit
        )

    async def spawn(self, order: SpawnOrder | None = None) -> None:
        _ = await self.backend.spawn(order or an_order(), self.heard.on_event)

    def failure(self, agent_id: AgentId = ID) -> str:
        (event,) = self.heard.failures(agent_id)
        return event.detail

    def marks(self) -> list[str]:
        return sorted(Path(one.mark).name for one in self.machine.running())


# --- launches that come to nothing


@pytest.mark.spec("scaler 30.10.5")
@virtual
async def test_the_end_of_the_output_tells_why_it_died() -> None:
    lines = "".join(f"line {number} {'x' * 30}\n" for number in range(100))
    script = Script(output=lines + "\x1b[31mno such\0 host\n", lives_seconds=2.0, exit=Exit(code=1))
    async with World(script) as world:
        await world.spawn()
        await asyncio.sleep(1.9)
        assert world.backend.active_count() == 1
        await asyncio.sleep(0.2)
        told = world.failure()
        assert "exited with code 1 before it registered" in told
        assert told.endswith("[31mno such host")
        assert len(told) < 2048 + 200
        assert "line 99" in told
        assert "line 49 " not in told
        assert world.backend.tail(ID, 1) == ["\x1b[31mno such\0 host"]


@virtual
async def test_an_end_by_signal_in_silence_is_told_as_that() -> None:
    async with World(Script(lives_seconds=1.0, exit=Exit(signal=11))) as world:
        await world.spawn()
        await asyncio.sleep(2)
        assert "exited with signal 11 before it registered; it printed nothing" in world.failure()


@pytest.mark.spec("scaler 30.10.12")
@virtual
async def test_a_set_of_containers_is_refused_here() -> None:
    async with World() as world:
        with pytest.raises(DeterministicRefusal, match="kici:runtime:docker"):
            await world.spawn(an_order(ID, "image"))
        assert "kici:runtime:docker" in world.failure()


@pytest.mark.spec("scaler 30.10.4")
@virtual
async def test_a_failed_start_leaves_nothing_and_is_raised_as_it_is() -> None:
    for error in (DeterministicRefusal("argument list too long"), Retryable("no more processes")):
        async with World(Script(start_error=error)) as world:
            with pytest.raises(type(error)):
                await world.spawn()
            assert world.failure() == str(error)
            assert world.files.contents == {}
            assert world.backend.computes() == ()


@pytest.mark.spec("scaler 30.10.3")
@virtual
async def test_a_missing_program_is_told_once_and_leaves_nothing() -> None:
    """And it is the host's refusal: trying again helps nobody before somebody mends the path."""
    async with World() as world:
        del world.machine.scripts[AGENT]
        with pytest.raises(DeterministicRefusal, match="/opt/agent"):
            await world.spawn()
        assert "no such program" in world.failure()
        assert world.backend.active_count() == 0
        assert world.files.contents == {}


@pytest.mark.spec("scaler 30.10.6")
@virtual
async def test_an_end_after_the_registration_is_no_failed_launch() -> None:
    async with World(Script(lives_seconds=5.0, exit=Exit(code=1))) as world:
        await world.spawn()
        await asyncio.sleep(2)
        world.backend.mark_registered(ID)
        await asyncio.sleep(4)
        assert not world.heard.failures(ID)
        ((agent_id, how),) = world.heard.exits
        assert agent_id == ID
        assert "code 1" in how
        assert world.backend.active_count() == 0


@pytest.mark.spec("scaler 30.10.8")
@virtual
async def test_destroying_what_has_just_ended_by_itself_is_no_error() -> None:
    async with World() as world:
        await world.spawn()
        for one in world.machine.running():
            one.end(Exit(signal=9))
        await world.backend.destroy(ID, ScaleDownReason.IDLE)
        assert world.backend.active_count() == 0
        assert world.files.contents == {}
        await world.backend.destroy(ID, ScaleDownReason.IDLE)


# --- records


@virtual
async def test_the_record_is_there_before_the_process_and_complete() -> None:
    async with World(Script(start_seconds=5.0)) as world:
        task = asyncio.create_task(world.backend.spawn(an_order(), world.heard.on_event))
        await asyncio.sleep(1)
        assert b'"process":null' in world.files.contents[RECORD]
        _ = await task
        record = world.files.contents[RECORD].decode()
        (running,) = world.machine.running()
        for text in (f'"pid":{running.id.pid}', '"gate":["gpu"]', '"token_id":"token-1"', "job-1", "local", "boot-1"):
            assert text in record
        assert "sesame" not in record


@virtual
async def test_a_crash_between_start_and_record_is_made_good_by_the_mark() -> None:
    async with World() as world:
        await world.spawn()
        (running,) = world.machine.running()
        written = world.files.contents[RECORD]
        await world.restart()
        world.files.write(RECORD, written[: written.index(b'"process"')] + b'"groups":[]}')
        (compute,) = await world.backend.recover(frozenset({ID}))
        assert compute.ref == str(running.id.pid)
        assert f'"pid":{running.id.pid}'.encode() in world.files.contents[RECORD]


@virtual
async def test_another_boot_or_another_process_of_that_pid_is_nobody() -> None:
    async with World() as world:
        await world.spawn()
        (running,) = world.machine.running()
        await world.restart()
        running.id = replace(running.id, started=running.id.started + 1)
        running.mark = "somebody else's"
        assert await world.backend.recover(frozenset({ID})) == ()
        assert world.files.contents == {}
        assert len(world.machine.running()) == 1, "it is not ours to end"


@virtual
async def test_an_unreadable_record_is_an_orphan() -> None:
    async with World() as world:
        await world.spawn()
        await world.restart()
        world.files.write(RECORD, b"{")
        assert await world.backend.recover(frozenset({ID})) == ()
        assert await world.backend.cleanup_orphans(frozenset({ID})) == 0
        assert await world.backend.cleanup_orphans(frozenset()) == 1
        assert (world.marks(), world.files.contents) == ([], {})


@virtual
async def test_a_mark_that_is_no_agent_id_becomes_no_path() -> None:
    async with World() as world:
        kept = Path("/data/agents/../../etc/passwd")
        world.files.write(kept, b"root")
        _ = await world.processes.start(
            Program(argv=(AGENT,), env={}, cwd=Path("/"), output=Path("/o"), mark="/data/agents/../../etc/passwd")
        )
        assert await world.backend.cleanup_orphans(frozenset()) == 0
        assert kept in world.files.contents


@virtual
async def test_scalers_leave_each_others_agents_alone() -> None:
    async with World() as world, Supervisor("other") as supervisor:
        await world.spawn()
        await world.restart()
        other = world.another(replace(world.settings, scaler=ScalerName("other")), supervisor)
        assert await other.recover(frozenset({ID})) == ()
        assert not await other.reap_unowned(ID)
        assert await other.cleanup_orphans(frozenset()) == 0
        assert world.marks() == [ID]


# --- ends


@virtual
async def test_an_end_that_cannot_be_confirmed_stays_tracked_and_can_be_tried_again() -> None:
    async with World() as world:
        await world.spawn()
        world.machine.is_stuck = True
        with pytest.raises(Retryable, match=ID):
            await world.backend.destroy(ID, ScaleDownReason.IDLE)
        (compute,) = world.backend.computes()
        assert compute.state is ComputeState.DESTROYING
        assert RECORD in world.files.contents
        world.machine.is_stuck = False
        await world.backend.destroy(ID, ScaleDownReason.IDLE)
        assert world.backend.computes() == ()
        assert world.files.contents == {}
        assert not world.heard.failures(ID)


@virtual
async def test_a_shutdown_ends_the_others_when_one_resists() -> None:
    class Resisting(FakeProcesses):
        async def end_tree(self, root: ProcessId | None, *, mark: str, grace_seconds: float) -> bool:
            return not mark.endswith(ID) and await super().end_tree(root, mark=mark, grace_seconds=grace_seconds)

    async with World() as world:
        world.processes = Resisting(world.machine)
        world.backend = world.another(world.settings, world.supervisor)
        await world.spawn()
        await world.spawn(an_order(OTHER))
        with pytest.raises(Retryable, match=ID):
            await world.backend.shutdown_all()
        assert world.marks() == [ID]
        world.processes = FakeProcesses(world.machine)
        world.backend = world.another(world.settings, world.supervisor)
        assert await world.backend.reap_unowned(ID)


@virtual
async def test_a_death_with_remains_that_resist_is_still_told() -> None:
    async with World(Script(lives_seconds=1.0, children=1)) as world:
        await world.spawn()
        world.backend.mark_registered(ID)
        world.machine.is_stuck = True
        await asyncio.sleep(2)
        assert [agent_id for agent_id, _ in world.heard.exits] == [ID]
        assert world.backend.active_count() == 1


@virtual
async def test_releasing_waits_for_what_is_starting() -> None:
    async with World(Script(start_seconds=5.0)) as world:
        task = asyncio.create_task(world.backend.spawn(an_order(), world.heard.on_event))
        await asyncio.sleep(1)
        await world.backend.release_all()
        assert task.done()
        assert world.backend.active_count() == 0
        assert world.marks() == [ID]
        assert len(await world.backend.recover(frozenset({ID}))) == 1


@pytest.mark.spec("scaler 30.10.9")
@virtual
async def test_windows_ends_trees_by_taskkill() -> None:
    host = LaunchHost(system="win32", environment={}, python=OWN, program_folder="/bin")
    async with World(host=host) as world:
        await world.spawn()
        world.processes.command = lambda argv: Completed(code=1, output="access is denied")
        with pytest.raises(Retryable, match="access is denied"):
            await world.backend.destroy(ID, ScaleDownReason.IDLE)
        assert world.backend.active_count() == 1

        def ends(code: int, argv: Sequence[str]) -> Completed:
            world.machine.table[int(argv[-1])].end(Exit(code=1))
            return Completed(code=code, output="")

        world.processes.command = lambda argv: ends(128, argv)
        await world.backend.destroy(ID, ScaleDownReason.IDLE)
        assert world.backend.active_count() == 0
        assert world.processes.commands[0][0].endswith("taskkill.exe")


# --- how it is started


class Zygote:
    def __init__(self, processes: FakeProcesses) -> None:
        self.asked: list[Program] = []
        self.error: Retryable | None = None
        self._processes = processes

    async def start(self, program: Program) -> Process:
        self.asked.append(program)
        if self.error is not None:
            raise self.error
        return await self._processes.start(program)


@virtual
async def test_the_zygote_serves_this_installations_agent_only() -> None:
    async with World() as world:
        world.zygote = zygote = Zygote(world.processes)
        await world.restart()
        await world.spawn()
        assert zygote.asked == []
        await world.spawn(an_order(OTHER, "own"))
        (program,) = zygote.asked
        assert program.env["KICI_AGENT_ID"] == OTHER


@virtual
async def test_without_the_zygote_it_is_started_plainly() -> None:
    async with World() as world:
        world.zygote = zygote = Zygote(world.processes)
        zygote.error = Retryable("it is gone")
        await world.restart()
        await world.spawn(an_order(ID, "own"))
        assert world.marks() == [ID]
        assert world.machine.started[0].argv[-2:] == ("-m", "kici.apps.agent")


class Groups:
    """Control groups that remember what was asked of them."""

    def __init__(self, *, works: bool) -> None:
        self.support = CgroupSupport(tracking=True, limits=LimitsBy.V1)
        self.works = works
        self.groups: dict[str, Group] = {}

    def folders(self, name: str, plan: CgroupPlan) -> tuple[Path, ...]:
        return (Path("/cg/cpu") / name,)

    def create(self, name: str, plan: CgroupPlan) -> Cgroup:
        if not self.works:
            raise Retryable("read-only file system")
        self.groups[name] = Group(name, plan)
        return self.groups[name]

    def find(self, folders: tuple[Path, ...]) -> Cgroup:
        return self.groups[folders[0].name]


class Group:
    def __init__(self, name: str, plan: CgroupPlan) -> None:
        self.plan = plan
        self.folders = (Path("/cg/cpu") / name,)
        self.entries = (self.folders[0] / "cgroup.procs",)
        self.kills = 0
        self.is_removed = False

    def kill(self) -> bool:
        self.kills += 1
        return self.kills > 2

    def remove(self) -> bool:
        self.is_removed = True
        return True


def with_groups(works: bool) -> tuple[World, Groups]:
    groups = Groups(works=works)
    world = World(host=replace(LINUX, cgroups=groups.support))
    world.cgroups = groups
    return world, groups


@virtual
async def test_its_group_is_entered_recorded_emptied_and_removed() -> None:
    world, groups = with_groups(works=True)
    async with world:
        await world.spawn(an_order(limits=Amount(cpus=1)))
        group = groups.groups[ID]
        assert group.plan.settings
        assert world.machine.started[0].groups == group.entries
        assert b"/cg/cpu/" in world.files.contents[RECORD]
        await world.restart()
        assert len(await world.backend.recover(frozenset({ID}))) == 1
        await world.backend.destroy(ID, ScaleDownReason.IDLE)
        assert group.is_removed
        assert group.kills == 3, "until it is empty"


@virtual
async def test_a_group_is_recorded_before_it_is_made() -> None:
    world, groups = with_groups(works=True)

    def crash(name: str, plan: CgroupPlan) -> Cgroup:
        assert b"/cg/cpu/" in world.files.contents[RECORD]
        raise Retryable("looked")

    async with world:
        groups.create = crash  # type: ignore[method-assign]  # looks at the record at that moment
        await world.spawn()
        assert b"/cg/cpu/" not in world.files.contents[RECORD], "and forgotten when there is none"


@virtual
async def test_half_written_records_go_at_the_next_start() -> None:
    async with World() as world:
        half = RECORD.with_name(f".{RECORD.name}.new")
        world.files.write(half, b"{")
        _ = await world.backend.recover(frozenset())
        assert half not in world.files.contents


@virtual
async def test_a_missing_group_matters_only_for_limits() -> None:
    world, _ = with_groups(works=False)
    async with world:
        await world.spawn()
        assert world.machine.started[0].groups == ()
        with pytest.raises(Retryable, match="read-only"):
            await world.spawn(an_order(OTHER, limits=Amount(cpus=1)))
        assert world.marks() == [ID]


@virtual
async def test_a_scope_is_ended_too() -> None:
    world = World(host=replace(LINUX, systemd=Systemd.USER))
    world.machine.scripts["systemd-run"] = Script()
    async with world:
        await world.spawn(an_order(limits=Amount(cpus=1)))
        await world.backend.destroy(ID, ScaleDownReason.IDLE)
        assert world.processes.commands == [
            ("systemctl", "--user", "kill", "--signal=SIGKILL", f"kici-agent-{ID}.scope")
        ]


# --- the rest


@virtual
async def test_output_is_bounded_and_its_end_kept() -> None:
    async with World() as world:
        await world.spawn()
        for number in range(300):
            world.files.append(LOG, f"line {number}\n".encode())
            await asyncio.sleep(1.0)
        assert world.files.size(LOG) < 1000
        total = sum(world.files.size(path) for path in world.files.contents if path != RECORD)
        assert total < 2000
        assert world.backend.tail(ID, 3) == ["line 297", "line 298", "line 299"]
        assert len(world.backend.tail(ID, 60)) == 60


@virtual
async def test_a_changed_entry_is_served_at_once() -> None:
    async with World() as world:
        await world.spawn()
        changed = ProcessSet(labels=("linux", "new"), binary_path=AGENT)
        world.backend.configure(replace(world.settings, max_agents=1, sets=(changed,)))
        with pytest.raises(NoCapacity):
            await world.spawn(an_order(OTHER, "new", "linux"))
        with pytest.raises(Permanent, match="no label set"):
            await world.spawn(an_order(OTHER))
        await world.backend.destroy(ID, ScaleDownReason.IDLE)
        await world.spawn(an_order(OTHER, "new", "linux"))


@virtual
async def test_what_is_remembered_of_the_gone_is_bounded() -> None:
    async with World(Script(output="hello\n")) as world:
        ids = [AgentId(f"scaler-bare-metal-{number:08x}") for number in range(300)]
        for agent_id in ids:
            await world.spawn(an_order(agent_id))
            await world.backend.destroy(agent_id, ScaleDownReason.IDLE)
        assert world.backend.tail(ids[-1], 5) == ["hello"]
        assert world.backend.tail(ids[0], 5) == []
