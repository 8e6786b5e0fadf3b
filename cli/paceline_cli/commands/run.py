"""`paceline run`: start a training job on the nodes whose agents are connected."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from paceline_cli import render
from paceline_cli.client import Client, ServerUnavailable
from paceline_cli.client_group import server_option
from paceline_cli.commands.jobs import ENDED
from paceline_cli.options import Seconds, json_option, server_options
from paceline_wire.commands import PRELOAD


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--dp", default=1, type=click.IntRange(1), show_default=True, help="Data-parallel replicas."
)
@click.option("--pp", default=1, type=click.IntRange(1), show_default=True, help="Pipeline stages.")
@click.option(
    "--tp", default=1, type=click.IntRange(1), show_default=True, help="Tensor-parallel ranks."
)
@click.option("--name", help="Display name.  [default: the script's name]")
@click.option(
    "--mode",
    type=click.Choice(["default", "observe", "dry-run", "approve", "auto"]),
    help="Who decides on repairs. observe only reports, dry-run says what it would do, approve "
    "waits for you, auto lets Paceline decide. default is auto for a script that can save a "
    "checkpoint on command, else approve.  [default: the server's policy]",
)
@click.option(
    "--start-timeout",
    type=Seconds(1, 86_400),
    metavar="SECONDS",
    help="Time for the first step of all ranks: loading, compiling, setting up NCCL. After it the "
    "start has failed.  [default: the server's policy, 900]",
)
@click.option(
    "--policy",
    "policy",
    multiple=True,
    metavar="KEY=VALUE",
    help="A field of the job's policy, such as hang_patience_seconds=60 (docs/policy.md); may be "
    "repeated.",
)
@click.option(
    "--checkpoint-directory",
    type=click.Path(path_type=Path),
    help="Directory shared by all nodes; ranks get it as PACELINE_CHECKPOINT_DIRECTORY.",
)
@click.option(
    "--environment",
    "-e",
    multiple=True,
    metavar="NAME=VALUE",
    help="Environment variable of every rank; may be repeated.",
)
@click.option(
    "--preload",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Module to import once per node, such as torch: after a restart, ranks are forked from "
    "that process and start without importing it. May be repeated. The import must neither start "
    "threads nor set up CUDA.",
)
@click.option("--detach", is_flag=True, help="Print the job's id and return immediately.")
@server_options
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def run(
    ctx: click.Context,
    dp: int,
    pp: int,
    tp: int,
    name: str | None,
    mode: str | None,
    start_timeout: float | None,
    policy: tuple[str, ...],
    checkpoint_directory: Path | None,
    environment: tuple[str, ...],
    modules: tuple[str, ...],
    detach: bool,
    server: str,
    token: str | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND once per rank, as torchrun does; observe and repair the job.

    \b
    paceline run --dp 2 --pp 2 --tp 2 -- python -m paceline_trainer --schedule 1f1b

    Each rank has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.
    Ctrl-C stops following; the job continues (`paceline jobs stop JOB` ends it). Exit status 0 only
    if the job has finished.
    """
    variables = dict(_pair(item, "NAME", "--environment") for item in environment)
    if modules:
        variables[PRELOAD] = _preloaded(modules, command)
    body = {
        "name": name or _default_name(command),
        "argv": list(command),
        "topology": {"dp": dp, "pp": pp, "tp": tp},
        "policy": _policy(policy, mode, start_timeout),
        "environment": variables,
        "directory": os.getcwd(),
        "checkpoint_directory": str(checkpoint_directory.resolve())
        if checkpoint_directory
        else None,
    }
    with Client(server, token) as client:
        job = client.create("/jobs", body)
        if detach:
            if as_json:
                render.show_json(job)
            else:
                click.echo(job["id"])
            return
        click.echo(f"{job['id']}: {client.server}/jobs/{job['id']}", err=True)
        try:
            ended = _follow(client, job["id"])
        except KeyboardInterrupt:
            stop = f"paceline jobs stop {job['id']}{server_option(ctx, client)}"
            click.echo(f"\nThe job continues; end it with: {stop}", err=True)
            sys.exit(1)
    if as_json:
        render.show_json(ended)
    if ended["state"] != "finished":
        sys.exit(1)


def _default_name(command: tuple[str, ...]) -> str:
    words = [word for word in command if not word.startswith("-")]
    return Path(words[1] if len(words) > 1 else words[0]).name


def _policy(
    items: tuple[str, ...], mode: str | None, start_timeout: float | None
) -> dict[str, str | float]:
    """Return the policy fields that were given; the server validates them."""
    fields: dict[str, str | float] = dict(_pair(item, "KEY", "--policy") for item in items)
    for name, option, value in (
        ("mode", "--mode", mode),
        ("start_timeout_seconds", "--start-timeout", start_timeout),
    ):
        if value is not None and name in fields:
            raise click.BadParameter(f"{name} is also given by {option}", param_hint="--policy")
        if value is not None:
            fields[name] = value
    return fields


def _pair(item: str, key: str, option: str) -> tuple[str, str]:
    name, sign, value = item.partition("=")
    if not sign or not name:
        raise click.BadParameter(f"expected {key}=VALUE, got {item!r}", param_hint=option)
    return name, value


def _preloaded(modules: tuple[str, ...], command: tuple[str, ...]) -> str:
    from paceline_agent.supervise.guard import split_command  # noqa: PLC0415 - of Linux alone

    for module in modules:
        if not all(word.isidentifier() for word in module.split(".")):
            raise click.BadParameter(
                f"expected a module's name such as torch, got {module!r}", param_hint="--preload"
            )
    if split_command(command) is None:
        raise click.BadParameter(
            f"expected a command like python train.py or python -m train, got {' '.join(command)}",
            param_hint="--preload",
        )
    return ",".join(modules)


def _follow(client: Client, job_id: str) -> dict[str, object]:
    """Print the job's changes until it has ended. Return its last state.

    The job continues without the server, so one that is unavailable is asked again.
    """
    shown = ""
    while True:
        job: dict[str, object] = {"state": None}
        try:
            job = client.get(f"/jobs/{job_id}")
            line = describe(job)
        except ServerUnavailable as error:
            line = f"The state of the job is not known, trying again: {error.message}"
        if line != shown:
            render.show_line(line, err=True)
            shown = line
        if job["state"] in ENDED:
            return job
        time.sleep(1.0)


def describe(job: dict[str, object]) -> str:
    """Return one line: the job's state, step and verdict."""
    verdict = job["verdict"]
    assert isinstance(verdict, dict)
    step = "" if job["step"] is None else f"step {job['step']}"
    loss = job["loss"]
    shown = f"loss {loss:.4f}" if isinstance(loss, float) else ""
    parts = [f"[{job['state']}]", step, shown, str(verdict["text"])]
    return "  ".join(part for part in parts if part)
