"""`paceline jobs`: list, show, restart, stop and export jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.client_group import ClientGroup, server_option
from paceline_cli.options import (
    OutputFile,
    ResourceId,
    Seconds,
    json_option,
    server_options,
    steps_option,
)
from paceline_cli.trace import fetch_trace

# py-spy takes up to 5 s on a busy machine; PyTorch polls its pipe once a second.
ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.2
ENDED = ("finished", "failed", "stopped")  # states of a job
LEDGER_PARTS = (
    "compute",
    "communication",
    "bubble",
    "straggler",
    "imbalance",
    "slow_link",
    "peer_wait",
    "bubble_excess",
    "data_wait",
    "optimizer",
    "evaluation",
    "checkpoint",
    "lost",
    "restart",
    "startup",
    "idle",
)
MEMORY_PARTS = (
    *("peak", "reserved", "allocated"),
    *("parameters", "gradients", "optimizer", "activations"),
)


def timeout_option(
    help_text: str = "How long to wait for the answers of the nodes.",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--timeout",
        type=Seconds(min=0),
        default=ANSWER_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help=help_text,
    )


@click.group(cls=ClientGroup, invoke_without_command=True)
@server_options
@json_option
@click.pass_context
def jobs(ctx: click.Context, server: str, token: str | None, as_json: bool) -> None:
    """List jobs, or show, restart or stop one.

    \b
    paceline jobs                 all jobs, newest first
    paceline jobs show JOB        verdict, ranks, and how the time was spent
    paceline jobs restart JOB     save a checkpoint and restart it
    paceline jobs stop JOB        stop its ranks and end it
    paceline jobs stacks JOB      Python stacks of its ranks
    paceline jobs flight-recorder JOB
                                  which ranks its collectives wait for
    paceline jobs export JOB -o FILE
                                  its last steps as a trace, for `paceline analyze`
    """
    ctx.obj = ctx.with_resource(Client(server, token))
    if ctx.invoked_subcommand is not None:
        return
    found = ctx.obj.items("/jobs")
    if as_json:
        render.show_json(found)
        return
    show_jobs(found)


def show_jobs(found: Sequence[dict[str, Any]]) -> None:
    """Print a table of jobs."""
    render.show_table(
        ("JOB", "NAME", "STATE", "DPxPPxTP", "STEP", "STEP TIME", "GOODPUT", "VERDICT"),
        [
            (
                job["id"],
                job["name"],
                render.job_state(job),
                render.sizes(job["topology"]),
                job["step"],
                render.seconds(job["step_seconds"]),
                render.percent(job["ledger"]["goodput_ratio"]),
                job["verdict"]["text"],
            )
            for job in found
        ],
        "No job yet. Start one: paceline run -- python train.py\n"
        "One that torchrun or Slurm starts is here once all its ranks have begun: see README.",
        sentence=True,
    )


@jobs.command()
@click.argument("job", type=ResourceId())
@json_option
@click.pass_context
def show(ctx: click.Context, job: str, as_json: bool) -> None:
    """Show one job: its verdict, its ranks, and how its time was spent."""
    client: Client = ctx.obj
    found = client.get(f"/jobs/{job}")
    ranks = client.items(f"/jobs/{job}/ranks")
    if as_json:
        render.show_json({**found, "ranks": ranks})
        return
    show_job(found)
    render.show_table(
        ("RANK", "DP", "PP", "TP", "NODE", "PID", "STATE", "STEP", "IN FLIGHT", "FOR"),
        [
            (
                rank["rank"],
                rank["dp_rank"],
                rank["pp_rank"],
                rank["tp_rank"],
                rank["node"],
                rank["pid"],
                render.rank_state(rank),
                rank["step"],
                rank["operation"],
                render.seconds(rank["operation_seconds"]),
            )
            for rank in ranks
        ],
        "No rank has been placed yet: `paceline nodes` shows which nodes are ready.",
    )
    render.show_next(_next(found, server_option(ctx, client)))


def show_job(found: dict[str, Any]) -> None:
    """Print what is known of a job as a whole, its verdict first."""
    render.show_line(found["verdict"]["text"])
    render.show_line(_summary(found))
    show_checkpoints(found)
    unrecorded = found.get("unrecorded_communication")  # a server of an earlier release has none
    if unrecorded and unrecorded not in found["verdict"]["text"]:
        render.show_line(unrecorded)
    show_ledger(found["ledger"])
    show_efficiency(found.get("efficiency"))


def _summary(job: dict[str, Any]) -> str:
    parts = [f"{job['name']} ({job['id']}): {job['state']}", render.topology(job["topology"])]
    if job["generation"]:
        parts.append(f"generation {job['generation']}")
    if job["step"] is not None:
        parts.append(f"step {job['step']}")
    if job["step_seconds"] is not None:
        parts.append(f"{render.seconds(job['step_seconds'])} per step")
    if job["watched"]:
        acts = job["mode"] != "observe"
        parts.append(
            "external: repaired through its launcher"
            if acts
            else "external: observed, never acted on"
        )
    return ", ".join(parts)


def _next(job: dict[str, Any], server: str) -> dict[str, str]:
    """Return commands that show more, the most urgent first. `server`: an option they need."""
    name, incident = job["id"], job["verdict"]["incident_id"]
    commands = {}
    if job["pending_actions"]:
        count = job["pending_actions"]
        waits = "1 repair waits" if count == 1 else f"{count} repairs wait"
        commands[f"paceline actions --job {name} --state proposed{server}"] = f"{waits} for you"
    if incident is not None:
        commands[f"paceline incidents show {incident}{server}"] = "causes and evidence"
    if job["step"] is not None:
        commands[f"paceline analyze {name}{server}"] = "what would make it faster"
    if job["state"] == "running":
        commands[f"paceline jobs stacks {name}{server}"] = "Python stacks of its ranks"
    return commands


def show_checkpoints(job: dict[str, Any]) -> None:
    """Print one line on the job's checkpoints, if one is known."""
    step = job.get("checkpoint_step")  # an earlier server has none
    if step is None:
        return
    parts = [f"newest checkpoint: step {step}"]
    if job["checkpoint_interval_steps"]:
        parts.append(f"one every {job['checkpoint_interval_steps']} steps")
    if job["checkpoint_path"]:
        parts.append(job["checkpoint_path"])
    if job["resumes"] is not None:
        resumed = "continued" if job["resumes"] else "did not continue"
        parts.append(f"the last restart {resumed} from the newest one")
    render.show_line(", ".join(parts))
    if job.get("checkpoint_advice"):
        click.echo(job["checkpoint_advice"]["text"])


def show_ledger(ledger: dict[str, Any]) -> None:
    """Print one line on how the wall time was spent."""
    wall = ledger["wall_seconds"]
    if not wall:
        return
    parts = [
        f"{part.replace('_', ' ')} {render.percent(ledger[f'{part}_seconds'] / wall)}"
        for part in LEDGER_PARTS
        if ledger.get(f"{part}_seconds", 0.0) >= wall / 1000  # an earlier server lacks some
    ]
    click.echo(f"{render.seconds(wall)} of wall time: " + ", ".join(parts))
    if ledger.get("ettr_ratio") is not None:
        click.echo(f"ETTR {render.percent(ledger['ettr_ratio'])}: time in steps that count")


def show_efficiency(found: dict[str, Any] | None) -> None:
    """Print the known efficiency figures of the recent steps; None: an earlier server has none."""
    if not found or not found["steps"]:
        return
    parts = [
        f"{render.number(found[f'{work}_per_second'])} {work}/s"
        for work in ("tokens", "samples")
        if found[f"{work}_per_second"] is not None
    ]
    parts += [
        f"{name} {render.percent(found[key])}"
        for name, key in (
            ("MFU", "mfu_ratio"),
            ("exposed communication", "exposed_communication_ratio"),
            ("overlapped communication", "overlapped_communication_ratio"),
        )
        if found[key] is not None
    ]
    scaling = found["scaling"]
    if scaling is not None:
        ranks = scaling["base_ranks"]
        base = f"{ranks} rank{'s' if ranks > 1 else ''} ({scaling['base_job_id']})"
        parts.append(f"scaling {render.percent(scaling['efficiency_ratio'])} of {base}")
    render.show_line(f"last {found['steps']} steps: " + ", ".join(parts))
    if found["mfu_unknown"] is not None:
        render.show_line(f"MFU unknown: {found['mfu_unknown']}")
    memory = found["memory"]
    sizes = [
        f"{name} {render.size(memory[f'{name}_bytes'])}"
        for name in MEMORY_PARTS
        if memory is not None and memory[f"{name}_bytes"] is not None
    ]
    if sizes:
        click.echo(f"memory of rank {memory['rank']}: " + ", ".join(sizes))


@jobs.command()
@click.argument("job", type=ResourceId())
@click.option(
    "--exclude",
    "nodes",
    type=ResourceId(),
    multiple=True,
    metavar="NODE",
    help="Not on this node, which becomes quarantined; may be repeated.",
)
@click.option(
    "--now",
    is_flag=True,
    help="Without a checkpoint first: the steps since the newest one are repeated.",
)
@click.option("--comment", default="", help="Why, for those who read about it later.")
@timeout_option("How long to wait until it begins.")
@json_option
@click.pass_context
def restart(
    ctx: click.Context,
    job: str,
    nodes: tuple[str, ...],
    now: bool,
    comment: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Save a checkpoint and restart a job, through the launcher that owns it.

    It is carried out in every mode of the policy. If the script cannot save on
    command, it waits for the script's own next checkpoint.

    \b
    paceline jobs restart JOB
    paceline jobs restart JOB --exclude node-3 --comment "its NIC flaps"
    """
    client: Client = ctx.obj
    body = {"exclude_nodes": list(nodes), "checkpoint": not now, "comment": comment}
    found = client.post(f"/jobs/{job}/restart", body)
    deadline = time.monotonic() + timeout
    found = _await_change(client, f"/actions/{found['id']}", "approved", deadline)
    if as_json:
        render.show_json(found)
    elif found["state"] in ("approved", "running", "done"):
        render.show_line(found["reason"])
        click.echo(f"{found['id']} is {found['state']}")
        follow = f"paceline actions show {found['id']}{server_option(ctx, client)}"
        render.show_next({follow: "how far it is"})
    if found["state"] in ("failed", "superseded"):
        raise click.ClickException(f"{found['id']} {found['state']}: {found['error']}")


@jobs.command()
@click.argument("job", type=ResourceId())
@json_option
@click.pass_obj
def stop(client: Client, job: str, as_json: bool) -> None:
    """Stop the ranks of a job on all nodes, and end it."""
    found = client.post(f"/jobs/{job}/stop")
    if as_json:
        render.show_json(found)
    else:
        click.echo(f"{job} is being stopped")


@jobs.command()
@click.argument("job", type=ResourceId())
@click.option(
    "--rank",
    "ranks",
    type=int,
    multiple=True,
    help="Only this rank; may be repeated. [default: all that run]",
)
@timeout_option()
@json_option
@click.pass_obj
def stacks(client: Client, job: str, ranks: tuple[int, ...], timeout: float, as_json: bool) -> None:
    """Read the Python stacks of a job's ranks without pausing them.

    \b
    paceline jobs stacks JOB --rank 3 --rank 7
    """
    chosen = ranks or _running(client, job)
    for rank in chosen:
        client.post(f"/jobs/{job}/ranks/{rank}/stacks")
    deadline = time.monotonic() + timeout
    found = [
        _await_change(client, f"/jobs/{job}/ranks/{rank}/stacks", "asked", deadline)
        for rank in chosen
    ]
    if as_json:
        render.show_json(found)
        return
    for answer in found:
        if answer["state"] == "taken" and answer["stacks"] is not None:
            render.show_stacks(answer["stacks"])
        else:
            why = answer["error"] or f"no answer within {timeout:g} s"
            render.show_line(f"Rank {answer['rank']}: {why}")


def _running(client: Client, job: str) -> tuple[int, ...]:
    """Return the ranks that run: the server has no process to read for the others."""
    found = client.items(f"/jobs/{job}/ranks")
    running = tuple(rank["rank"] for rank in found if rank["state"] != "exited")
    if not running:
        raise click.ClickException(f"no rank of {job} runs: there is no process to read")
    return running


def _await_change(client: Client, path: str, state: str, deadline: float) -> Any:
    """Return what is at the path once it is no longer in this state, or as it is then."""
    while (answer := client.get(path))["state"] == state and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return answer


@jobs.command("flight-recorder")
@click.argument("job", type=ResourceId())
@timeout_option()
@json_option
@click.pass_obj
def flight_recorder(client: Client, job: str, timeout: float, as_json: bool) -> None:
    """Read the Flight Recorder dumps of a job's ranks: which rank waits for which.

    Exit status 1 if no rank wrote one; enable recording in PyTorch first, see
    docs/flight-recorder.md.
    """
    path = f"/jobs/{job}/flight-recorder"
    before = {dump["rank"]: dump["received_at"] for dump in client.post(path)["dumps"]}
    alive = [one for one in client.items(f"/jobs/{job}/ranks") if one["state"] != "exited"]
    deadline = time.monotonic() + timeout
    while True:
        found = client.get(path)
        new = [one for one in found["dumps"] if one["received_at"] != before.get(one["rank"])]
        if len(new) >= len(alive) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if as_json:
        render.show_json(found)
    else:
        _show_dumps(found)
    if all(dump["error"] for dump in found["dumps"]):
        sys.exit(1)


def _show_dumps(found: dict[str, Any]) -> None:
    render.show_line(found["text"])
    without: dict[str, list[int]] = {}
    for dump in found["dumps"]:
        if dump["error"]:
            without.setdefault(dump["error"], []).append(dump["rank"])
    for error, ranks in without.items():
        render.show_line(f"  rank{'s' if len(ranks) > 1 else ''} {render.ranges(ranks)}: {error}")


@jobs.command()
@click.argument("job", type=ResourceId())
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    required=True,
    metavar="FILE",
    help="Parquet file to write; metadata is written beside it as YAML.",
)
@steps_option
@click.pass_obj
def export(client: Client, job: str, output: Path, steps: int) -> None:
    """Write the last steps of a job as a trace, for `paceline analyze`.

    \b
    paceline jobs export JOB -o trace.parquet
    paceline analyze trace.parquet --meta trace.yaml
    """
    metadata = output.with_suffix(".yaml")
    if metadata == output:
        raise click.BadParameter(
            f"{output} is the name of the metadata; expected one such as trace.parquet",
            param_hint="--output",
        )
    if metadata.exists() and not output.exists():  # it is not of an earlier export
        raise click.UsageError(
            f"{metadata} exists, and would be replaced by the metadata of the trace"
        )
    trace = fetch_trace(client, job, steps)
    try:
        output.write_bytes(trace.parquet)
        metadata.write_text(trace.metadata)
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from error
    click.echo(f"wrote {output} and {metadata}")
