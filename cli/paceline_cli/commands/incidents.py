"""`paceline incidents`: what went wrong, who is to blame, on what evidence."""

from __future__ import annotations

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup
from paceline_cli.options import json_option, server_options


@click.group(cls=ClientGroup, invoke_without_command=True)
@click.option("--job", help="Of one job only.")
@click.option("--state", type=click.Choice(["open", "mitigating", "resolved"]))
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
    """List incidents; `paceline incidents show ID` prints the evidence."""
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is not None:
        return
    found = ctx.obj.items("/incidents", job=job, state=state)
    if as_json:
        render.show_json(found)
        return
    render.show_table(
        ("INCIDENT", "JOB", "STATE", "DETECTED", "KIND", "RANK", "NODE", "CAUSE", "SUMMARY"),
        [
            (
                incident["id"],
                incident["job_id"],
                incident["state"],
                render.clock(incident["detected_at"]),
                incident["kind"],
                incident["rank"],
                incident["node"],
                incident["cause"],
                incident["summary"],
            )
            for incident in found
        ],
        "No incident: nothing was found to be wrong.",
    )


@incidents.command()
@click.argument("incident")
@json_option
@click.pass_obj
def show(client: Client, incident: str, as_json: bool) -> None:
    """One incident with its evidence, counter-evidence and actions."""
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
            click.echo(f"  {render.likelihood(cause['likelihood']):>5}  {cause['name']}")
    for title, key in (("Evidence", "evidence"), ("Against it", "counter_evidence")):
        if found[key]:
            click.echo(f"{title}:")
            for item in found[key]:
                click.echo(f"  - {item['text']}")
    for stacks in found["stacks"]:
        render.show_stacks(stacks)
    for symptom in found["symptoms"]:
        click.echo(f"Symptom: {symptom}")
    for action in found["action_ids"]:
        click.echo(f"Action: {action}")
