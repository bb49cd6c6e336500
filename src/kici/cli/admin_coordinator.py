"""Operators: draining and stopping a coordinator, and its peers."""

import click

from kici.cli.client import Client, Json, admin_path
from kici.cli.connection import with_client
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table
from kici.cli.pausing import monotonic, pause
from kici.cli.values import DURATION

STILL_RUNNING = 2
PASS_SECONDS = 1.0


def _say(state: Json) -> None:
    click.echo(f"draining={str(state['draining']).lower()} jobsRunning={state['jobsRunning']}")


@click.command()
@click.option("--wait", "is_waiting", is_flag=True, help="Return when no job runs any more.")
@click.option("--timeout", type=DURATION, default=300.0, metavar="TIME", help="Longest wait; 5m by default.")
@click.option("--status", "is_question", is_flag=True, help="Only say whether it drains.")
@with_client
@click.pass_context
def drain(ctx: click.Context, client: Client, /, *, is_waiting: bool, timeout: float, is_question: bool) -> None:
    """Start nothing new; let running jobs finish.  Exits with 2 when jobs still run after the timeout."""
    path = admin_path("drain")
    state = client.get(path) if is_question else client.post(path, {"action": "drain"})
    _say(state)
    until = monotonic() + timeout
    told = state["jobsRunning"]
    while is_waiting and state["jobsRunning"]:
        if monotonic() >= until:
            click.echo(f"{state['jobsRunning']} jobs still run", err=True)
            ctx.exit(STILL_RUNNING)
        pause(PASS_SECONDS)
        state = client.get(path)
        if state["jobsRunning"] != told:
            _say(state)
            told = state["jobsRunning"]


@click.command()
@with_client
def resume(client: Client, /) -> None:
    """Work again after a drain."""
    _say(client.post(admin_path("drain"), {"action": "resume"}))


@click.command()
@click.option("--keep-agents", is_flag=True, help="Leave agents and their jobs running for the next start.")
@with_client
def stop(client: Client, /, *, keep_agents: bool) -> None:
    """Shut the coordinator down in order.

    Without --keep-agents, running jobs on agents of this machine fail, and waiting ones stay in the queue.
    """
    state = client.post(admin_path("stop"), {"keepAgents": keep_agents})
    what = "keep running" if keep_agents else "are ended"
    click.echo(f"stopping; {state['jobsRunning']} running jobs {what}")


@click.command()
@as_json
@with_client
def peers(client: Client, /, *, as_json: bool) -> None:
    """List the coordinators that share the store, and their workers."""
    found = client.get(admin_path("instances"))["items"]
    workers = client.get(admin_path("workers"))["items"]
    if as_json:
        print_json([*found, *({**each, "role": "worker"} for each in workers)])
        return
    rows = [
        (
            f"{each['id']}{' (this one)' if each['isSelf'] else ''}",
            each["role"],
            each["version"],
            each["address"],
            f"{'draining' if each['draining'] else 'working'}{', leads' if each['leads'] else ''}",
            local(each["lastBeatAt"]),
        )
        for each in found
    ]
    rows += [
        (each["id"], "worker", each["version"], each["name"], _worker_state(each), local(each["lastSeenAt"]))
        for each in workers
    ]
    print_table(("ID", "ROLE", "VERSION", "ADDRESS", "STATE", "LAST SEEN"), rows, empty="There are no instances.")


def _worker_state(worker: Json) -> str:
    return f"linked to {', '.join(worker['linkedTo'])}" if worker["linkedTo"] else str(worker["state"])
