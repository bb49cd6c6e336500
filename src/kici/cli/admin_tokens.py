"""Operators: tokens of people and programs, and credentials of agents."""

import click

from kici.cli.client import Client, admin_path
from kici.cli.connection import with_client
from kici.cli.jobs import as_json
from kici.cli.output import local, print_json, print_table
from kici.cli.values import DURATION

ROLES = ("owner", "admin", "auditor", "submitter")
expires_option = click.option(
    "--expires", type=DURATION, metavar="TIME", help="Lifetime, such as 30d; for ever by default."
)


def _print_new(client_answer: dict[str, object], *, as_json: bool, hint: str) -> None:
    if as_json:
        print_json(client_answer)
        return
    click.echo(client_answer["token"])
    click.echo(f"Keep it now: it is not shown again.  {hint}", err=True)


@click.group()
def token() -> None:
    """Tokens of the HTTP API."""


@token.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), required=True)
@click.option("--context", "contexts", multiple=True, help="A secret context its jobs may use; repeat for more.")
@expires_option
@as_json
@with_client
def create_token(
    client: Client, /, *, name: str, role: str, contexts: tuple[str, ...], expires: float | None, as_json: bool
) -> None:
    """Make a token; its plain text is printed once."""
    body: dict[str, object] = {"name": name, "role": role}
    if contexts:
        body["secretContexts"] = list(contexts)
    if expires is not None:
        body["expiresInSeconds"] = max(1, round(expires))
    _print_new(client.post(admin_path("tokens"), body), as_json=as_json, hint="Use it as KICI_TOKEN.")


@token.command("list")
@as_json
@with_client
def list_tokens(client: Client, /, *, as_json: bool) -> None:
    """List tokens."""
    found = client.get(admin_path("tokens"))["items"]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each["id"],
            each["name"],
            each["role"],
            each["prefix"],
            local(each["createdAt"]),
            local(each["expiresAt"]) or "never",
            local(each["revokedAt"]),
        )
        for each in found
    ]
    print_table(("ID", "NAME", "ROLE", "BEGINS", "CREATED", "EXPIRES", "REVOKED"), rows, empty="There are no tokens.")


@token.command("revoke")
@click.argument("token_id", metavar="ID")
@with_client
def revoke_token(client: Client, /, *, token_id: str) -> None:
    """Revoke a token at once."""
    client.request("DELETE", admin_path("tokens", token_id))
    click.echo(f"{token_id} revoked")


@click.group("agent-token")
def agent_token() -> None:
    """Credentials of agents that are started by hand."""


@agent_token.command("create")
@click.argument("name", default="agent")
@click.option("-l", "--label", "labels", multiple=True, help="A label its agents may carry; any by default.")
@click.option("--mandatory-label", "mandatory", multiple=True, help="A label that jobs must name to land there.")
@expires_option
@as_json
@with_client
def create_agent_token(  # one for each option
    client: Client,
    /,
    *,
    name: str,
    labels: tuple[str, ...],
    mandatory: tuple[str, ...],
    expires: float | None,
    as_json: bool,
) -> None:
    """Make a credential; its plain text is printed once."""
    body: dict[str, object] = {"name": name, "mandatoryLabels": list(mandatory)}
    if labels:
        body["labels"] = list(labels)
    if expires is not None:
        body["expiresInSeconds"] = max(1, round(expires))
    hint = "Give it to the agent as KICI_AGENT_TOKEN."
    _print_new(client.post(admin_path("agent-tokens"), body), as_json=as_json, hint=hint)


@agent_token.command("list")
@as_json
@with_client
def list_agent_tokens(client: Client, /, *, as_json: bool) -> None:
    """List credentials of agents."""
    found = client.get(admin_path("agent-tokens"))["items"]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each["id"],
            each["kind"],
            each["name"] or each["agentId"],
            each["prefix"],
            "any" if each["labels"] is None else each["labels"],
            local(each["expiresAt"]) or "never",
            local(each["revokedAt"]),
        )
        for each in found
    ]
    head = ("ID", "KIND", "NAME", "BEGINS", "LABELS", "EXPIRES", "REVOKED")
    print_table(head, rows, empty="There are no agent tokens.")


@agent_token.command("revoke")
@click.argument("token_id", metavar="ID")
@with_client
def revoke_agent_token(client: Client, /, *, token_id: str) -> None:
    """Revoke a credential; connections of its agents are closed."""
    client.request("DELETE", admin_path("agent-tokens", token_id))
    click.echo(f"{token_id} revoked")
