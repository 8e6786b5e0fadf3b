"""`paceline actions`: repairs, done and waiting for approval."""

from __future__ import annotations

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup
from paceline_cli.options import json_option, server_options


@click.group(cls=ClientGroup, invoke_without_command=True)
@click.option("--job", help="Of one job only.")
@click.option("--state", help="proposed, running, done, failed, ...")
@server_options
@json_option
@click.pass_context
def actions(
    ctx: click.Context,
    job: str | None,
    state: str | None,
    server: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List actions; approve or reject those that wait for it.

    \b
    paceline actions --state proposed
    paceline actions approve ACTION
    paceline actions reject ACTION --comment "known, node is being drained"
    """
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is not None:
        return
    found = ctx.obj.items("/actions", job=job, state=state)
    if as_json:
        render.show_json(found)
        return
    render.show_table(
        ("ACTION", "JOB", "KIND", "STATE", "GEN", "CREATED", "LOST STEPS", "REASON"),
        [
            (
                action["id"],
                action["job_id"],
                action["kind"],
                action["state"],
                action["generation"],
                render.clock(action["created_at"]),
                action["lost_steps"],
                action["error"] or action["reason"],
            )
            for action in found
        ],
        "No action yet: nothing had to be repaired.",
    )


@actions.command()
@click.argument("action")
@json_option
@click.pass_obj
def show(client: Client, action: str, as_json: bool) -> None:
    """One action and what it went through."""
    found = client.get(f"/actions/{action}")
    if as_json:
        render.show_json(found)
        return
    click.echo(found["reason"])
    click.echo(f"{found['kind']} of generation {found['generation']}: {found['state']}")
    for phase in found["phases"]:
        click.echo(f"  {render.clock(phase['started_at'])}  {phase['name']:<12} {phase['detail']}")
    if found["error"]:
        click.echo(f"Error: {found['error']}")


@actions.command()
@click.argument("action")
@click.option("--comment", default="", help="For the audit log.")
@click.pass_obj
def approve(client: Client, action: str, comment: str) -> None:
    """Let a proposed action run."""
    client.post(f"/actions/{action}/approve", {"comment": comment})
    click.echo(f"{action} is approved")


@actions.command()
@click.argument("action")
@click.option("--comment", default="", help="For the audit log.")
@click.pass_obj
def reject(client: Client, action: str, comment: str) -> None:
    """Refuse a proposed action."""
    client.post(f"/actions/{action}/reject", {"comment": comment})
    click.echo(f"{action} is rejected")
