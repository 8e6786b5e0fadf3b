"""`paceline incidents`: problems, with their causes and evidence."""

from __future__ import annotations

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup, server_option
from paceline_cli.options import json_option, server_options


@click.group(cls=ClientGroup, invoke_without_command=True)
@click.option("--job", help="Only of this job.")
@click.option(
    "--state", type=click.Choice(["open", "mitigating", "resolved"]), help="Only in this state."
)
@server_options
@json_option
@click.pass_context
def incidents(
    ctx: click.Context,
    job: str | None,
    state: str | None,
    server: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List incidents, or show one.

    \b
    paceline incidents                       all, the worst first
    paceline incidents --job JOB --state open
    paceline incidents show INCIDENT         causes, evidence and counter-evidence
    """
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is not None:
        return
    if job is not None:
        ctx.obj.get(f"/jobs/{job}")  # fails with a message if there is no such job
    found = ctx.obj.items("/incidents", job=job, state=state)
    if as_json:
        render.show_json(found)
        return
    render.show_table(
        ("INCIDENT", "JOB", "STATE", "DETECTED", "KIND", "SUMMARY"),
        [
            (
                incident["id"],
                incident["job_id"],
                incident["state"],
                render.clock(incident["detected_at"]),
                incident["kind"],
                incident["summary"],
            )
            for incident in found
        ],
        "No incident: nothing was found to be wrong."
        if state is None
        else f"No incident is {state}.",
        sentence=True,
    )


@incidents.command()
@click.argument("incident")
@json_option
@click.pass_context
def show(ctx: click.Context, incident: str, as_json: bool) -> None:
    """Show one incident: its causes, evidence, counter-evidence and repairs."""
    client: Client = ctx.obj
    found = client.get(f"/incidents/{incident}")
    if as_json:
        render.show_json(found)
        return
    click.echo(found["summary"])
    click.echo(f"{found['kind']}, {found['state']}, detected {render.clock(found['detected_at'])}")
    if found["speedup"] is not None:
        click.echo(f"Fixing it gives {found['speedup']:.2f}x (what-if replay).")
    if found["advice"]:
        click.echo(f"Advice: {found['advice']}")
    if found["causes"]:
        click.echo("Likely causes:")
        for cause in found["causes"]:
            click.echo(f"  {render.likelihood(cause['likelihood']):>6}  {cause['name']}")
    for title, key in (("Evidence", "evidence"), ("Against it", "counter_evidence")):
        if found[key]:
            click.echo(f"{title}:")
            for item in found[key]:
                click.echo(f"  - {item['text']}")
    for stacks in found["stacks"]:
        render.show_stacks(stacks)
    for symptom in found["symptoms"]:
        click.echo(f"Symptom: {symptom}")
    server = server_option(ctx, client)
    proposed = [
        action["id"]
        for action in client.items("/actions", job=found["job_id"], state="proposed")
        if action["id"] in found["action_ids"]
    ]
    commands = {f"paceline actions approve {one}{server}": "let the repair run" for one in proposed}
    for action in found["action_ids"]:
        commands[f"paceline actions show {action}{server}"] = "what is done about it"
    render.show_next(commands)
