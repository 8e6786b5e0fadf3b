"""`paceline nodes`: list nodes, and end a quarantine."""

from __future__ import annotations

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup
from paceline_cli.options import ResourceId, json_option, server_options


@click.group(cls=ClientGroup, invoke_without_command=True)
@server_options
@json_option
@click.pass_context
def nodes(ctx: click.Context, server: str, token: str | None, as_json: bool) -> None:
    """List nodes; `paceline nodes release NODE` ends the quarantine of one."""
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is not None:
        return
    found = ctx.obj.items("/nodes")
    if as_json:
        render.show_json(found)
        return
    render.show_table(
        ("NODE", "HOST", "STATE", "SLOTS", "JOB", "RANKS", "GPUS", "LAST SEEN", "REASON"),
        [
            (
                node["id"],
                node["hostname"],
                node["state"],
                node["slots"],
                ", ".join(node["ranks_by_job"]) or node["job_id"],
                "; ".join(map(str, map(render.ranges, node["ranks_by_job"].values()))) or None,
                len(node["gpus"]) or None,
                render.clock(node["last_seen_at"]),
                node["reason"],
            )
            for node in found
        ],
        "No node yet. On each one: paceline agent --server URL",
        sentence=True,
    )


@nodes.command()
@click.argument("node", type=ResourceId())
@click.pass_obj
def release(client: Client, node: str) -> None:
    """End the quarantine of a node."""
    client.post(f"/nodes/{node}/release")
    click.echo(f"{node} may hold ranks again")
