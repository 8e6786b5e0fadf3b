"""`paceline actions`: repairs, done and waiting for approval."""

from __future__ import annotations

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup, server_option
from paceline_cli.options import ResourceId, json_option, server_options

STATES = ("proposed", "approved", "running", "done", "failed", "rejected", "superseded")


@click.group(cls=ClientGroup, invoke_without_command=True)
@click.option("--job", type=ResourceId(), help="Only of this job.")
@click.option("--state", type=click.Choice(STATES), help="Only in this state.")
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
    """List repairs; approve or reject those that wait for approval.

    \b
    paceline actions --state proposed        those that wait for you
    paceline actions show ACTION             its reason and phases
    paceline actions approve ACTION
    paceline actions reject ACTION --comment "known, node is being drained"
    """
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is not None:
        return
    if job is not None:
        ctx.obj.get(f"/jobs/{job}")  # fails with a message if there is no such job
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
        "No action yet: nothing had to be repaired." if state is None else f"No action is {state}.",
        sentence=True,
    )


@actions.command()
@click.argument("action", type=ResourceId())
@json_option
@click.pass_context
def show(ctx: click.Context, action: str, as_json: bool) -> None:
    """Show one action: its reason and its phases."""
    client: Client = ctx.obj
    found = client.get(f"/actions/{action}")
    if as_json:
        render.show_json(found)
        return
    render.show_line(found["reason"])
    click.echo(f"{found['kind']} of generation {found['generation']}: {found['state']}")
    for phase in found["phases"]:
        render.show_line(
            f"  {render.clock(phase['started_at'])}  {phase['name']:<12} {phase['detail']}"
        )
    if found["error"]:
        render.show_line(f"Error: {found['error']}")
    server = server_option(ctx, client)
    reject = f"paceline actions reject {action}{server}"
    if found["state"] == "proposed":
        approve = f"paceline actions approve {action}{server}"
        render.show_next({approve: "let it run", reject: "refuse it"})
    elif found.get("can_be_rejected"):  # an earlier server has none
        render.show_next({reject: "do not restart after all"})


@actions.command()
@click.argument("action", type=ResourceId())
@click.option("--comment", default="", help="For the audit log.")
@json_option
@click.pass_obj
def approve(client: Client, action: str, comment: str, as_json: bool) -> None:
    """Approve a proposed action."""
    _decide(client, action, "approve", comment, as_json)


@actions.command()
@click.argument("action", type=ResourceId())
@click.option("--comment", default="", help="For the audit log.")
@json_option
@click.pass_obj
def reject(client: Client, action: str, comment: str, as_json: bool) -> None:
    """Reject an action that is proposed or waits for the script's own checkpoint."""
    _decide(client, action, "reject", comment, as_json)


def _decide(client: Client, action: str, verb: str, comment: str, as_json: bool) -> None:
    decided = client.post(f"/actions/{action}/{verb}", {"comment": comment})
    if as_json:
        render.show_json(decided)
    else:
        click.echo(f"{action} is {decided['state']}")
