"""`paceline incidents`: problems, with their causes and evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup, server_option
from paceline_cli.options import ResourceId, json_option, server_options


@click.group(cls=ClientGroup, invoke_without_command=True)
@click.option("--job", type=ResourceId(), help="Only of this job.")
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
    paceline incidents                       all: of running jobs first, the worst first
    paceline incidents --job JOB --state open
    paceline incidents show INCIDENT         causes, evidence and counter-evidence
    paceline incidents recoveries            how long repairs took
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
    empty = "No incident: nothing was found to be wrong."
    show_incidents(found, empty if state is None else f"No incident is {state}.")


def show_incidents(found: Sequence[dict[str, Any]], empty: str) -> None:
    """Print a table of incidents; without any, the sentence `empty`."""
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
        empty,
        sentence=True,
    )


PARTS = ("detect", "decide", "approve", "save", "stop", "place", "launch", "start", "resume")


def show_recovery(found: dict[str, Any] | None) -> None:
    """Print one line on how long each part of the repair took, if one was begun."""
    if found is None:
        return
    seconds = {part: found[f"{part}_seconds"] for part in (*PARTS, "total")}
    total = seconds.pop("total")
    parts = [
        f"{part} {render.seconds(value)}" for part, value in seconds.items() if value is not None
    ]
    whole = "not recovered" if total is None else f"recovered in {render.seconds(total)}"
    click.echo(f"{whole}: {', '.join(parts)}")


@incidents.command()
@click.option(
    "--days",
    type=click.IntRange(1, 3660),
    default=28,
    show_default=True,
    help="Only recoveries of the last days.",
)
@click.option("--job", type=ResourceId(), help="Only recoveries of this job.")
@json_option
@click.pass_obj
def recoveries(client: Client, days: int, job: str | None, as_json: bool) -> None:
    """Show how long repairs took: p50, p90 and p99 by kind, launcher and week."""
    if job is not None:
        client.get(f"/jobs/{job}")  # fails with a message if there is no such job
    found = client.get("/recoveries", days=days, job=job)
    if as_json:
        render.show_json(found)
        return
    render.show_table(
        ("KIND", "LAUNCHER", "WEEK", "COUNT", *(part.upper() for part in (*PARTS, "total"))),
        [
            (
                group["kind"],
                group["launcher"],
                group["week"] or "all",
                group["count"],
                *(_quantiles(group["parts"].get(part)) for part in (*PARTS, "total")),
            )
            for group in found["groups"]
        ],
        f"No job was repaired in the last {days} days.",
    )
    if found["groups"]:
        click.echo("Seconds: p50/p90/p99.")
    if not found["is_complete"]:
        click.echo("Only the newest recoveries were counted.")


def _quantiles(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return "/".join(render.number(found[f"{name}_seconds"]) for name in ("p50", "p90", "p99"))


@incidents.command()
@click.argument("incident", type=ResourceId())
@json_option
@click.pass_context
def show(ctx: click.Context, incident: str, as_json: bool) -> None:
    """Show one incident: its causes, evidence, counter-evidence and repairs."""
    client: Client = ctx.obj
    found = client.get(f"/incidents/{incident}")
    if as_json:
        render.show_json(found)
        return
    render.show_line(found["summary"])
    click.echo(f"{found['kind']}, {found['state']}, detected {render.clock(found['detected_at'])}")
    show_recovery(found.get("recovery"))  # an earlier server has none
    if found["speedup"] is not None:
        click.echo(f"Fixing it gives {found['speedup']:.2f}x (what-if replay).")
    if found["advice"]:
        render.show_line(f"Advice: {found['advice']}")
    if found["causes"]:
        click.echo("Likely causes:")
        for cause in found["causes"]:
            render.show_line(f"  {render.likelihood(cause['likelihood']):>6}  {cause['name']}")
    for title, key in (("Evidence", "evidence"), ("Against it", "counter_evidence")):
        if found[key]:
            click.echo(f"{title}:")
            for item in found[key]:
                render.show_line(f"  - {item['text']}")
    for stacks in found["stacks"]:
        render.show_stacks(stacks)
    for symptom in found["symptoms"]:
        render.show_line(f"Symptom: {symptom}")
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
