"""`paceline policy`: show and change policies, and the versions that they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup
from paceline_cli.extras import load
from paceline_cli.options import ResourceId, json_option, server_options

_HASH_CHARACTERS = 12


@click.group(cls=ClientGroup, invoke_without_command=True)
@server_options
@json_option
@click.pass_context
def policy(ctx: click.Context, server: str, token: str | None, as_json: bool) -> None:
    """Show the policy for new jobs, or show and change that of a job.

    \b
    paceline policy                          the policy for new jobs
    paceline policy show JOB                 that of a job
    paceline policy set JOB FIELD=VALUE ...  change that of a job
    paceline policy history [JOB]            its versions: who changed what, and when
    paceline policy check FILE               check a policy file before the server reads it
    """
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is None:
        found = ctx.obj.get("/policies", limit=1)["items"]
        _show(found[0] if found else None, as_json)


@policy.command()
@click.argument("job", type=ResourceId())
@json_option
@click.pass_obj
def show(client: Client, job: str, as_json: bool) -> None:
    """Show the policy of a job."""
    found = client.get(f"/jobs/{job}")
    version = found["policy_version"]
    if version is None:  # an earlier release created the job
        _show({"values": found["policy"]}, as_json)
    else:
        _show(client.get(f"/policies/{version}"), as_json)


@policy.command("set")
@click.argument("job", type=ResourceId())
@click.argument("values", nargs=-1, required=True, metavar="FIELD=VALUE...")
@click.option("--comment", default="", help="For the audit log.")
@json_option
@click.pass_obj
def set_policy(
    client: Client, job: str, values: tuple[str, ...], comment: str, as_json: bool
) -> None:
    """Change fields of a job's policy.

    \b
    paceline policy set JOB hang_patience_seconds=120 mode=approve
    paceline policy set JOB maintenance_windows="Sat 22:00-06:00 Europe/Berlin"
    """
    given = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"expected FIELD=VALUE, got {text!r}")
        given[name] = value
    body = {"values": given, "comment": comment}
    changed = client.patch(f"/jobs/{job}/policy", body)
    if as_json:
        render.show_json(changed)
    else:
        click.echo(f"{job} has policy version {changed['policy_version']}")


@policy.command()
@click.argument("job", type=ResourceId(), required=False)
@json_option
@click.pass_obj
def history(client: Client, job: str | None, as_json: bool) -> None:
    """List the versions of the policy for new jobs, or of a job's own, newest first."""
    found = client.items("/policies", job=job)
    if as_json:
        render.show_json(found)
        return
    render.show_table(
        ("VERSION", "HASH", "TIME", "BY", "CHANGES", "COMMENT"),
        [
            (
                one["version"],
                one["hash"][:_HASH_CHARACTERS],
                render.clock(one["at"]),
                one["actor"],
                _changes(one),
                one["comment"],
            )
            for one in found
        ],
        "The job has the policy for new jobs: `paceline policy history` lists its versions.",
        sentence=True,
    )


@policy.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check(file: Path) -> None:
    """Check a policy file; exit status 1 if the server would refuse it."""
    module = load("paceline_server.policy_file", "policy check", "server")
    try:
        module.load_policy(file)
    except ValueError as error:  # PolicyError
        raise click.ClickException(str(error)) from error
    click.echo(f"{file} is valid")


def _show(found: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        render.show_json(found)
        return
    if found is None:
        click.echo("The server has recorded no policy yet.")
        return
    if "version" in found:
        of = "new jobs" if found["job_id"] is None else found["job_id"]
        click.echo(
            f"version {found['version']} ({found['hash'][:_HASH_CHARACTERS]}) of {of}, "
            f"{render.clock(found['at'])} by {found['actor']}"
        )
    render.show_table(
        ("FIELD", "VALUE"),
        [(name, _value(value)) for name, value in found["values"].items()],
        "It has no field.",
    )


def _value(value: Any) -> str:
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def _changes(version: dict[str, Any]) -> str:
    parts = [f"{one['field']}: {one['before']} -> {one['after']}" for one in version["changes"]]
    return ", ".join(parts) or "the built-in values"
