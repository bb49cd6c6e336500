"""The EC2 path: jobs become instances of a pretended cloud, whose user data is run here; the coordinator may die.

`EC2_JOBS` says how many jobs; the default is small, because every step of the workflow loads a whole SDK.
"""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from kici.decide.reap import reap_grace_ms
from kici.testing.ports import free_port
from kici.testing.programs import CoordinatorProgram, environment, until

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PROVISIONERS = Path(__file__).parents[2] / "provisioners"
JOBS = int(os.environ.get("EC2_JOBS", "5"))
SECONDS = 60 + 6 * JOBS
REAPER = {"KICI_SCALER_REAP_STRANDED_TIMEOUT_MS": "60000", "KICI_SCALER_REAP_INTERVAL_MS": "5000"}
REAPED_SECONDS = reap_grace_ms(0) / 1000 + 60
"""An agent that ended while its coordinator was down is only missed, and never for less than the reaper's grace."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ec2_machines_e2e", PROVISIONERS / "ec2" / "machines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


machines = load()


class Cloud:
    """Moto, and what moto leaves out: instances that boot, run their user data, and switch themselves off."""

    def __init__(self, url: str) -> None:
        self.env = {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "eu-central-1",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        self.ec2 = machines.boto3.client(
            "ec2",
            endpoint_url=url,
            region_name="eu-central-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )
        self.settings = machines.Settings(ami="ami-12c6146b")
        self.seen: dict[str, str] = {}
        """Every instance there ever was, and the agent it is tagged with."""
        self.foreign: set[str] = set()
        """Agents that have an instance and no user data."""
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def alive(self) -> list[str]:
        return [machines.tag_of(each, machines.AGENT_ID) for each in machines.instances(self.ec2, self.settings)]

    def stranger(self, tags: list[dict[str, str]]) -> None:
        """An instance under our tag that nobody asked for."""
        self.foreign.add(tags[-1]["Value"])
        self.ec2.run_instances(
            ImageId=self.settings.ami,
            MinCount=1,
            MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
        )

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for process in self._agents.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            alive = {each["InstanceId"]: each for each in machines.instances(self.ec2, self.settings)}
            for instance_id, instance in alive.items():
                if instance_id not in self.seen and machines.tag_of(instance, machines.AGENT_ID) not in self.foreign:
                    self.seen[instance_id] = machines.tag_of(instance, machines.AGENT_ID)
                    self._agents[instance_id] = self._boot(instance_id)
            for instance_id, process in self._agents.items():
                if process.poll() is not None and instance_id in alive:
                    self.ec2.terminate_instances(InstanceIds=[instance_id])
                elif instance_id not in alive and process.poll() is None:
                    process.terminate()

    def _boot(self, instance_id: str) -> "subprocess.Popen[bytes]":
        answer = self.ec2.describe_instance_attribute(InstanceId=instance_id, Attribute="userData")
        text = base64.b64decode(answer["UserData"]["Value"]).decode().split("\n", 1)[1]
        lines = json.loads(text)["write_files"][0]["content"].splitlines()
        return subprocess.Popen(
            [sys.executable, "-m", "kici", "agent"],
            env=environment(**dict(line.split("=", 1) for line in lines)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def a_cloud() -> Iterator[Cloud]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _answers(url), seconds=60, what="the cloud answers")
        cloud = Cloud(url)
        try:
            yield cloud
        finally:
            cloud.close()
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    with a_cloud() as cloud:
        yield cloud


@pytest.fixture
def program(tmp_path: Path, cloud: Cloud) -> Iterator[CoordinatorProgram]:
    scalers = PROVISIONERS / "ec2" / "scalers.yaml"
    with CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(scalers)], env=REAPER) as program:
        for name in ("access-key-id", "secret-access-key"):
            assert program.run("admin", "secrets", "set", f"aws:{name}", given="testing").returncode == 0
        variables = {
            **{name: value for name, value in cloud.env.items() if "KEY" not in name},
            "EC2_AMI": cloud.settings.ami,
            "PROVISIONERS": str(PROVISIONERS),
            "PYTHON": sys.executable,
        }
        sets = [word for name, value in variables.items() for word in ("--set", f"{name}={value}")]
        done = program.run("workflow", "apply", str(PROVISIONERS / "ec2" / "workflow.yaml"), *sets)
        assert done.returncode == 0, done.stderr
        yield program


def ended(program: CoordinatorProgram, jobs: list[str]) -> bool:
    known = program.jobs(500)
    return {known[job]["status"] for job in jobs} == {"success"}


def test_each_job_gets_an_instance_and_all_are_terminated(program: CoordinatorProgram, cloud: Cloud) -> None:
    jobs = [program.submit("true", "-l", "ec2") for _ in range(JOBS)]
    until(lambda: ended(program, jobs), seconds=SECONDS, what="all jobs succeed")
    until(lambda: cloud.alive() == [], seconds=SECONDS, what="all instances are terminated")
    until(lambda: program.admin("provisions") == [], seconds=60, what="no row is left")
    assert len(cloud.seen) == JOBS
    assert {program.job(job)["agentId"] for job in jobs} == set(cloud.seen.values())


Step = Callable[[CoordinatorProgram, Cloud, int, int], bool]
"""Whether it is reached: given how long the log was, and how many instances there had been, when the job came."""


def logged(event: str, *words: str) -> Step:
    """A line of this event with these words."""

    def is_reached(program: CoordinatorProgram, cloud: Cloud, offset: int, instances: int) -> bool:
        lines = program.log.read_bytes()[offset:].decode().splitlines()
        return any(f'"event":"{event}"' in line and all(word in line for word in words) for line in lines)

    return is_reached


def is_made(program: CoordinatorProgram, cloud: Cloud, offset: int, instances: int) -> bool:
    return len(cloud.seen) > instances


def is_terminated(program: CoordinatorProgram, cloud: Cloud, offset: int, instances: int) -> bool:
    return len(cloud.seen) > instances and cloud.alive() == []


STEPS: dict[str, Step] = {
    "the machine is asked for": logged("event.emitted", "scale-up"),
    "the workflow that makes it starts": logged("event.started_run", "scale-up"),
    "the cloud has made it": is_made,
    "the workflow has succeeded": logged("event.handled", "scale-up"),
    "its agent has its token": logged("claim.redeemed"),
    "its agent is registered": logged("agent.registered", '"scaler":"ec2"'),
    "its job is over": logged("job.finished", "scaler-event-"),
    "it is given back": logged("event.emitted", "scale-down"),
    "the workflow that removes it starts": logged("event.started_run", "scale-down"),
    "the cloud has removed it": is_terminated,
}


def inventory(program: CoordinatorProgram, cloud: Cloud, *options: str) -> "subprocess.CompletedProcess[str]":
    """The provisioner's own comparison of the cloud with the coordinator."""
    admin = f"{sys.executable} -m kici admin"
    state = program.data_dir.with_name("deletions.json")
    words = ("inventory", "--min-age", "0", "--kici-admin", admin, "--state", str(state), *options)
    return subprocess.run(
        [sys.executable, str(PROVISIONERS / "ec2" / "machines.py"), *words],
        env=environment(KICI_DATA_DIR=str(program.data_dir), EC2_AMI=cloud.settings.ami, **cloud.env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_killed_at_each_step_it_leaves_no_instance_without_a_row(program: CoordinatorProgram, cloud: Cloud) -> None:
    for number, (name, is_reached) in enumerate(STEPS.items()):
        offset, instances = program.log.stat().st_size, len(cloud.seen)
        job = program.submit("true", "-l", "ec2")
        until(partial(is_reached, program, cloud, offset, instances), seconds=SECONDS, what=name)
        program.stop(signal.SIGKILL)
        alive = cloud.alive()
        program.start()
        known = {row["agentId"] for row in program.admin("provisions")}
        assert set(alive) & set(cloud.alive()) <= known, f"killed when {name}: an instance without a row"
        until(partial(ended, program, [job]), seconds=SECONDS, what=f"the job succeeds, killed when {name}")
        until(lambda: cloud.alive() == [], seconds=SECONDS, what=f"the instance goes, killed when {name}")
        assert len(set(cloud.seen.values())) == len(cloud.seen), f"killed when {name}: two instances of one agent"
        assert len(cloud.seen) >= number + 1
    until(lambda: program.admin("provisions") == [], seconds=REAPED_SECONDS, what="no row is left")

    agreed = inventory(program, cloud)
    assert (agreed.returncode, agreed.stdout) == (0, ""), agreed
    tags = [{"Key": machines.MANAGED, "Value": "default"}, {"Key": machines.AGENT_ID, "Value": "nobody"}]
    cloud.stranger(tags)
    told = inventory(program, cloud)
    assert (told.returncode, "of nobody" in told.stdout) == (1, True), told
    removed = inventory(program, cloud, "--delete")
    assert (removed.returncode, "terminated" in removed.stdout) == (0, True), removed
    assert cloud.alive() == []
