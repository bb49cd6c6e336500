"""The programs `kici` and `kici-admin`: which commands there are and where they live."""

from typing import Final

from kici.cli.lazy import Lazy, LazyGroup

COMMANDS: Final = {
    "up": Lazy("kici.cli.up:up", "Run a coordinator on this machine."),
    "worker": Lazy("kici.cli.worker:worker", "Make this machine one that spawns agents for coordinators elsewhere."),
    "run": Lazy("kici.cli.run:run", "Run one command as a job and show its output."),
    "submit": Lazy("kici.cli.submit:submit", "Submit a run file and follow its jobs."),
    "jobs": Lazy("kici.cli.jobs:jobs", "List jobs, newest first."),
    "job": Lazy("kici.cli.jobs:job", "Show one job."),
    "logs": Lazy("kici.cli.logs:logs", "Print the output of a job."),
    "cancel": Lazy("kici.cli.jobs:cancel", "Cancel a job or a whole run."),
    "explain": Lazy("kici.cli.jobs:explain", "Say why a job is where it is."),
    "dashboard": Lazy("kici.cli.dashboard:dashboard", "Print a link that signs a browser in."),
    "demo": Lazy("kici.cli.demo:demo", "Watch a coordinator run a dozen sample jobs."),
    "workflow": Lazy("kici.cli.workflow:workflow", "Say what happens when an event comes."),
    "doctor": Lazy("kici.cli.doctor:doctor", "Check whether this machine can do its part."),
    "config": Lazy("kici.cli.config:config", "Check and explain a scalers file, without a coordinator."),
    "agent": Lazy("kici.cli.agent:command", "Run an agent."),
    "admin": Lazy("kici.cli.main:admin", "Operate a coordinator; the same as kici-admin."),
    "completion": Lazy("kici.cli.completion:completion", "Print the completion script of your shell."),
}
ADMIN_COMMANDS: Final = {
    "diagnose": Lazy("kici.cli.admin_scaler:diagnose", "Is everything well?"),
    "scaler": Lazy("kici.cli.admin_scaler:scaler", "Look at scalers and reload their configuration."),
    "agents": Lazy("kici.cli.admin_agents:agents", "List agents; show or drain one."),
    "queue": Lazy("kici.cli.admin_queue:queue", "List waiting jobs; show one or clear all."),
    "peers": Lazy("kici.cli.admin_coordinator:peers", "List the coordinators that share the store, and their workers."),
    "peer": Lazy("kici.cli.admin_peer:peer", "Forget a coordinator or worker that is gone for good."),
    "join-token": Lazy("kici.cli.admin_join:join_token", "Make, list and revoke tokens that make hosts workers."),
    "worker": Lazy("kici.cli.admin_join:worker", "Revoke a worker."),
    "drain": Lazy("kici.cli.admin_coordinator:drain", "Start nothing new; let running jobs finish."),
    "resume": Lazy("kici.cli.admin_coordinator:resume", "Work again after a drain."),
    "stop": Lazy("kici.cli.admin_coordinator:stop", "Shut the coordinator down in order."),
    "settings": Lazy("kici.cli.admin_settings:settings", "Show and change live settings."),
    "token": Lazy("kici.cli.admin_tokens:token", "Make, list and revoke tokens of people and programs."),
    "agent-token": Lazy("kici.cli.admin_tokens:agent_token", "Make, list and revoke credentials of agents."),
    "secrets": Lazy("kici.cli.admin_secrets:secrets", "Store, list, reveal and delete secrets of jobs."),
    "events": Lazy("kici.cli.admin_events:events", "List events; retry those that were given up."),
    "firecracker": Lazy("kici.cli.admin_firecracker:firecracker", "Prepare and check this host for microVMs."),
    "provisions": Lazy("kici.cli.admin_events:provisions", "List machines that event scalers asked for."),
    "access-log": Lazy("kici.cli.admin_log:access_log", "Who changed what, newest first."),
}
_START_HERE: Final = (
    "New here?  `kici demo` shows it all.  `kici up` starts a coordinator, `kici run -- CMD` runs a job."
)

kici: Final = LazyGroup(
    name="kici",
    commands=COMMANDS,
    summary="Run CI jobs on agents that are made when they are needed.",
    epilog=_START_HERE,
)
admin: Final = LazyGroup(name="admin", commands=ADMIN_COMMANDS, summary="Operate a coordinator.")


def main() -> None:
    kici.main(prog_name="kici")


def admin_main() -> None:
    admin.main(prog_name="kici-admin")
