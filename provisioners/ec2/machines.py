"""Reference provisioner: machines that are EC2 instances, one agent each.

    machines.py up | down        the steps of the workflow beside this file
    machines.py inventory        compare what the cloud has under our tag with what the coordinators know

An instance is tagged in the call that makes it, and the call carries the agent's id as its token, so that asking
twice makes one.  It gets a claim code and no token, and terminates itself when its agent exits.  Removing an
instance that is not there is no error.  `inventory` reports strangers: instances with our tag that nobody knows;
with `--delete` it terminates those that are old enough, and no more of them in an hour than `--max-deletes` unless
a person says `--yes`.

Settings come from the environment: AWS_REGION and the usual credentials, EC2_AMI, and optionally EC2_TYPE,
EC2_SUBNET, EC2_SECURITY_GROUPS (commas), EC2_INSTANCE_PROFILE, EC2_BOOT (a shell line that runs before the agent),
EC2_AGENT (its command line) and INSTALLATION, which tells installations in one account apart.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from kici.domain.event import ScaleUp, read_scale_down, read_scale_up

MANAGED, AGENT_ID, SCALER = "kici-managed", "kici-agent-id", "kici-scaler"
ALIVE = ("pending", "running", "stopping", "stopped")
WINDOW_SECONDS = 3600
NO_CAPACITY_EXIT = 75
"""For people who read job lists: the provider has none; the scaler backs off whatever the code."""


@dataclass(frozen=True)
class Settings:
    ami: str
    instance_type: str = "t3.medium"
    subnet: str | None = None
    security_groups: tuple[str, ...] = ()
    instance_profile: str | None = None
    boot: str = ""
    agent: str = "kici-agent"
    installation: str = "default"

    @staticmethod
    def of_environment() -> "Settings":
        env = os.environ
        return Settings(
            ami=env.get("EC2_AMI", ""),
            instance_type=env.get("EC2_TYPE") or "t3.medium",
            subnet=env.get("EC2_SUBNET") or None,
            security_groups=tuple(filter(None, env.get("EC2_SECURITY_GROUPS", "").split(","))),
            instance_profile=env.get("EC2_INSTANCE_PROFILE") or None,
            boot=env.get("EC2_BOOT", ""),
            agent=env.get("EC2_AGENT") or "kici-agent",
            installation=env.get("INSTALLATION") or "default",
        )


def up(ec2: Any, settings: Settings, event: ScaleUp) -> str:
    """Make the instance of an agent, unless there is one."""
    for instance in instances(ec2, settings, event.agent_id):
        return f"{event.agent_id} is {instance['InstanceId']} already"
    if not settings.ami:
        raise ValueError("EC2_AMI is not set: name the image that instances start from")
    tags = {
        "Name": event.agent_id,
        MANAGED: settings.installation,
        AGENT_ID: event.agent_id,
        SCALER: event.scaler_name,
    }
    marked = [{"Key": key, "Value": value} for key, value in tags.items()]
    made = ec2.run_instances(
        ImageId=settings.ami,
        InstanceType=settings.instance_type,
        MinCount=1,
        MaxCount=1,
        ClientToken=event.agent_id,
        InstanceInitiatedShutdownBehavior="terminate",
        MetadataOptions={"HttpTokens": "required"},
        TagSpecifications=[{"ResourceType": kind, "Tags": marked} for kind in ("instance", "volume")],
        UserData=user_data(settings, event),
        **_placement(settings),
    )
    return f"{event.agent_id} is {made['Instances'][0]['InstanceId']}"


def down(ec2: Any, settings: Settings, agent_id: str) -> str:
    """Terminate the instance of an agent, if there is one."""
    found = [instance["InstanceId"] for instance in instances(ec2, settings, agent_id)]
    if not found:
        return f"{agent_id} is not known"
    ec2.terminate_instances(InstanceIds=found)
    return f"{agent_id} was {', '.join(found)}"


def instances(ec2: Any, settings: Settings, agent_id: str | None = None) -> Iterator[dict[str, Any]]:
    """Living instances under our tag, of one agent or of all."""
    filters = [
        {"Name": f"tag:{MANAGED}", "Values": [settings.installation]},
        {"Name": "instance-state-name", "Values": list(ALIVE)},
    ]
    if agent_id is not None:
        filters.append({"Name": f"tag:{AGENT_ID}", "Values": [agent_id]})
    for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]


def user_data(settings: Settings, event: ScaleUp) -> str:
    """Cloud-init: start the agent with its claim code, and switch the machine off when it ends."""
    agent_env = {
        "KICI_ORCHESTRATOR_URL": event.orchestrator_url,
        "KICI_SCALER_CLAIM_CODE": event.claim_code,
        "KICI_SCALER_MANAGED": "true",
    }
    unit = f"""[Unit]
Description=KiCI agent
Wants=network-online.target
After=network-online.target
[Service]
EnvironmentFile=/run/kici-agent.env
ExecStart=/usr/bin/env {settings.agent}
ExecStopPost=/sbin/poweroff
"""
    config = {
        "write_files": [
            {
                "path": "/run/kici-agent.env",
                "permissions": "0600",
                "content": "".join(f"{name}={value}\n" for name, value in agent_env.items()),
            },
            {"path": "/etc/systemd/system/kici-agent.service", "permissions": "0644", "content": unit},
        ],
        "runcmd": [
            *([["sh", "-c", settings.boot]] if settings.boot else []),
            ["systemctl", "daemon-reload"],
            ["systemctl", "start", "--no-block", "kici-agent"],
        ],
    }
    return "#cloud-config\n" + json.dumps(config, indent=1) + "\n"  # JSON is YAML


@dataclass(frozen=True)
class Inventory:
    strangers: tuple[dict[str, Any], ...]
    """Instances with our tag whose agent no coordinator knows."""
    missing: tuple[str, ...]
    """Agents that are known and have no instance."""


def compare(
    found: Iterable[dict[str, Any]], known: Iterable[str], *, min_age_seconds: float, now: datetime
) -> Inventory:
    """What does not agree.  Young instances are left out: their rows may have been read before they were made."""
    rows = {tag_of(instance, AGENT_ID): instance for instance in found}
    ids = set(known)
    return Inventory(
        strangers=tuple(
            instance
            for agent_id, instance in sorted(rows.items())
            if agent_id not in ids and (now - instance["LaunchTime"]).total_seconds() >= min_age_seconds
        ),
        missing=tuple(sorted(ids - rows.keys())),
    )


def tag_of(instance: dict[str, Any], key: str) -> str:
    return next((tag["Value"] for tag in instance.get("Tags", ()) if tag["Key"] == key), "")


def known_agents(kici_admin: list[str]) -> list[str]:
    """Agents of event scalers that any coordinator knows.  Raises `OSError` when it cannot say."""
    done = subprocess.run([*kici_admin, "provisions", "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"the coordinators cannot be asked: {done.stderr.strip()}")
    return [row["agentId"] for row in json.loads(done.stdout)]


class Deletions:
    """How many instances were terminated within the last hour, kept in a file."""

    def __init__(self, path: Path, maximum: int) -> None:
        self._path = path
        self._maximum = maximum

    def allowed(self) -> int:
        return max(0, self._maximum - len(self._recent()))

    def record(self, count: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps([*self._recent(), *[time.time()] * count]))

    def _recent(self) -> list[float]:
        try:
            times: list[float] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return []
        return [at for at in times if at > time.time() - WINDOW_SECONDS]


def inventory(ec2: Any, settings: Settings, args: argparse.Namespace) -> int:
    """Report, and delete what may be deleted.  0: everything agrees or was mended."""
    found = list(instances(ec2, settings))  # before the rows are read: a row that is made meanwhile is known
    known = known_agents(args.kici_admin.split())
    seen = compare(found, known, min_age_seconds=args.min_age, now=datetime.now(UTC))
    for agent_id in seen.missing:
        print(f"missing   {agent_id}: known, and without an instance")
    for instance in seen.strangers:
        print(f"stranger  {instance['InstanceId']} of {tag_of(instance, AGENT_ID)}, since {instance['LaunchTime']}")
    if not seen.strangers:
        return 0
    if not args.delete:
        return 1
    deletions = Deletions(args.state, args.max_deletes)
    may = len(seen.strangers) if args.yes else min(len(seen.strangers), deletions.allowed())
    doomed = [instance["InstanceId"] for instance in seen.strangers[:may]]
    if doomed:
        deletions.record(len(doomed))
        ec2.terminate_instances(InstanceIds=doomed)
        print(f"terminated {', '.join(doomed)}")
    left = len(seen.strangers) - len(doomed)
    if left:
        print(f"{left} more are left alone: the limit is {args.max_deletes} in an hour; --yes removes them all")
    return 1 if left else 0


def event_of_step() -> dict[str, Any]:
    """The event of this step; its secret comes apart."""
    payload: dict[str, Any] = json.loads(os.environ["KICI_EVENT_PAYLOAD"])
    if "KICI_EVENT_CLAIM_CODE" in os.environ:
        payload["claimCode"] = os.environ["KICI_EVENT_CLAIM_CODE"]
    return payload


def main() -> int:
    parser = argparse.ArgumentParser(description="Machines that are EC2 instances.")
    parser.add_argument("what", choices=("up", "down", "inventory"))
    parser.add_argument("--delete", action="store_true", help="terminate strangers")
    parser.add_argument("--yes", action="store_true", help="however many they are")
    parser.add_argument("--max-deletes", type=int, default=5, help="at most so many in an hour")
    parser.add_argument("--min-age", type=float, default=600, help="seconds; younger instances are left alone")
    parser.add_argument("--state", type=Path, default=Path.home() / ".local/state/kici-ec2/deletions.json")
    parser.add_argument("--kici-admin", default="kici-admin", help="the command that asks the coordinators")
    args = parser.parse_args()
    settings = Settings.of_environment()
    ec2 = boto3.client("ec2")
    try:
        if args.what == "inventory":
            return inventory(ec2, settings, args)
        if args.what == "up":
            print(up(ec2, settings, read_scale_up(event_of_step())))
        else:
            print(down(ec2, settings, read_scale_down(event_of_step()).agent_id))
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        print(f"ec2: {error}", file=sys.stderr)
        return NO_CAPACITY_EXIT if "Capacity" in code or "LimitExceeded" in code else 1
    except (BotoCoreError, OSError, ValueError) as error:
        print(f"ec2: {error}", file=sys.stderr)
        return 1
    return 0


def _placement(settings: Settings) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if settings.subnet is not None:
        chosen["SubnetId"] = settings.subnet
    if settings.security_groups:
        chosen["SecurityGroupIds"] = list(settings.security_groups)
    if settings.instance_profile is not None:
        chosen["IamInstanceProfile"] = {"Name": settings.instance_profile}
    return chosen


if __name__ == "__main__":
    sys.exit(main())
