"""The EC2 provisioner on a real SDK against moto's server: made once, tagged, removed, and compared."""

import argparse
import base64
import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kici.domain.event import ScaleUp
from kici.testing.ports import free_port
from kici.testing.programs import environment

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PATH = Path(__file__).parents[2] / "provisioners" / "ec2" / "machines.py"
ONE = "scaler-event-00000001"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ec2_machines", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ec2_machines"] = module
    spec.loader.exec_module(module)
    return module


machines = load()


@pytest.fixture(scope="module")
def cloud() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{url}/moto-api/data.json", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def ec2(cloud: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    urllib.request.urlopen(urllib.request.Request(f"{cloud}/moto-api/reset", method="POST"), timeout=5).close()
    for name, value in aws(cloud).items():
        monkeypatch.setenv(name, value)
    return machines.boto3.client("ec2")


def aws(cloud: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": cloud,
        "AWS_REGION": "eu-central-1",
        "AWS_DEFAULT_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "EC2_AMI": "ami-12c6146b",
    }


def settings(**fields: Any) -> Any:
    return machines.Settings(ami="ami-12c6146b", **fields)


def a_scale_up(agent_id: str = ONE) -> ScaleUp:
    return ScaleUp(
        scaler_name="ec2",
        agent_id=agent_id,
        labels=["linux"],
        mandatory_labels=[],
        orchestrator_url="ws://10.0.0.1:4000/ws",
        claim_code="c" * 64,
        request_id="1",
    )


def tags(instance: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}


@pytest.mark.spec("T5.6")
def test_a_repeated_scale_up_makes_one_tagged_instance(ec2: Any) -> None:
    first = machines.up(ec2, settings(), a_scale_up())
    second = machines.up(ec2, settings(), a_scale_up())
    (instance,) = machines.instances(ec2, settings())
    assert instance["InstanceId"] in first
    assert "already" in second
    assert tags(instance) == {
        "Name": ONE,
        "kici-managed": "default",
        "kici-agent-id": ONE,
        "kici-scaler": "ec2",
    }


def test_user_data_starts_an_agent_with_its_code_and_no_token(ec2: Any) -> None:
    machines.up(ec2, settings(boot="true"), a_scale_up())
    (instance,) = machines.instances(ec2, settings())
    answer = ec2.describe_instance_attribute(InstanceId=instance["InstanceId"], Attribute="userData")
    text = base64.b64decode(answer["UserData"]["Value"]).decode()
    assert text.startswith("#cloud-config\n")
    config = json.loads(text.split("\n", 1)[1])
    env, unit = config["write_files"]
    assert env["permissions"] == "0600"
    assert f"KICI_SCALER_CLAIM_CODE={'c' * 64}\n" in env["content"]
    assert "TOKEN" not in env["content"]
    assert "poweroff" in unit["content"]
    assert ["sh", "-c", "true"] in config["runcmd"]
    assert instance["MetadataOptions"]["HttpTokens"] == "required"


def test_a_teardown_accepts_what_it_does_not_know(ec2: Any) -> None:
    assert "not known" in machines.down(ec2, settings(), ONE)
    machines.up(ec2, settings(), a_scale_up())
    assert "was i-" in machines.down(ec2, settings(), ONE)
    assert "not known" in machines.down(ec2, settings(), ONE)
    assert list(machines.instances(ec2, settings())) == []


def test_installations_in_one_account_do_not_touch_each_other(ec2: Any) -> None:
    machines.up(ec2, settings(installation="a"), a_scale_up())
    assert list(machines.instances(ec2, settings(installation="b"))) == []
    assert "not known" in machines.down(ec2, settings(installation="b"), ONE)


def test_no_image_is_said_before_anything_is_asked(ec2: Any) -> None:
    with pytest.raises(ValueError, match="EC2_AMI"):
        machines.up(ec2, machines.Settings(ami=""), a_scale_up())


def test_strangers_and_missing_ones_are_told_apart(ec2: Any) -> None:
    for number in range(3):
        machines.up(ec2, settings(), a_scale_up(f"scaler-event-0000000{number}"))
    found = list(machines.instances(ec2, settings()))
    later = datetime.now(UTC) + timedelta(seconds=700)
    known = ["scaler-event-00000000", "scaler-event-000000ff"]
    seen = machines.compare(found, known, min_age_seconds=600, now=later)
    assert [machines.tag_of(each, "kici-agent-id") for each in seen.strangers] == [
        "scaler-event-00000001",
        "scaler-event-00000002",
    ]
    assert seen.missing == ("scaler-event-000000ff",)
    assert machines.compare(found, known, min_age_seconds=600, now=datetime.now(UTC)).strangers == ()


def test_the_inventory_deletes_no_more_than_it_may(
    ec2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        machines.up(ec2, settings(), a_scale_up(f"scaler-event-0000000{number}"))
    monkeypatch.setattr(machines, "known_agents", lambda command: ["scaler-event-00000000"])
    args = argparse.Namespace(
        delete=False, yes=False, max_deletes=3, min_age=0.0, state=tmp_path / "deletions.json", kici_admin="x"
    )
    assert machines.inventory(ec2, settings(), args) == 1
    assert len(list(machines.instances(ec2, settings()))) == 5
    args.delete = True
    assert machines.inventory(ec2, settings(), args) == 1
    assert len(list(machines.instances(ec2, settings()))) == 2
    assert machines.inventory(ec2, settings(), args) == 1  # the window is used up
    assert "1 more are left alone" in capsys.readouterr().out
    args.yes = True
    assert machines.inventory(ec2, settings(), args) == 0
    (left,) = machines.instances(ec2, settings())
    assert machines.tag_of(left, "kici-agent-id") == "scaler-event-00000000"


def test_the_step_reads_its_event_and_says_what_went_wrong(cloud: str, ec2: Any) -> None:
    payload = {"scalerName": "ec2", "agentId": ONE, "reason": "idle", "requestId": "1"}
    env = environment(**aws(cloud), KICI_EVENT_PAYLOAD=json.dumps(payload))
    done = subprocess.run([sys.executable, PATH, "down"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{ONE} is not known\n"), done.stderr
    env["KICI_EVENT_PAYLOAD"] = "{}"
    done = subprocess.run([sys.executable, PATH, "up"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "scalerName" in done.stderr
