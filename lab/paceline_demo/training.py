"""Start the reference trainer on the demo's cluster, and stop it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from paceline_cli.client import Client
from paceline_demo.cluster import Cluster

STOP_SECONDS = 8.0
_ENDED = ("finished", "failed", "stopped")


def start_training(
    cluster: Cluster,
    axes: tuple[int, int, int],
    mode: str,
    *arguments: str,
    checkpoints_name: str = "checkpoints",
) -> str:
    """Start the reference trainer with `paceline run`. Return the job's id; see `start_job`."""
    trainer = (sys.executable, "-m", "paceline_trainer", "--steps", "1000000", *arguments)
    options = ("--name", "reference trainer", "--preload", "paceline_trainer.train")
    return start_job(
        cluster, axes, mode, trainer, options=options, checkpoints_name=checkpoints_name
    )


def start_job(
    cluster: Cluster,
    axes: tuple[int, int, int],
    mode: str,
    command: Sequence[str],
    *,
    options: Sequence[str] = (),
    checkpoints_name: str = "checkpoints",
) -> str:
    """Start a job with `paceline run`. Return its id.

    Args:
        cluster: where to run; its server must respond.
        axes: sizes of data, pipeline and tensor parallelism.
        mode: auto, approve or observe.
        command: what each rank runs.
        options: further options of `paceline run`.
        checkpoints_name: directory of the checkpoints within the cluster's. A job resumes from
            those that an earlier job saved there.

    Raises:
        click.ClickException: the job did not start; has the error output of `paceline run`.
    """
    dp, pp, tp = (str(axis) for axis in axes)
    checkpoints = cluster.directory / checkpoints_name
    checkpoints.mkdir(exist_ok=True)
    started = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "paceline_cli", "run"),
            *("--server", cluster.url, "--detach"),
            *("--dp", dp, "--pp", pp, "--tp", tp, "--mode", mode, *options),
            *("--checkpoint-directory", str(checkpoints), "--", *command),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if started.returncode:
        raise click.ClickException(started.stderr.strip())
    return started.stdout.strip()


def stop_jobs(url: str, token: str | None = None) -> None:
    """Stop all jobs on request, so that the end of the demo is not recorded as a failure.

    Jobs that do not end in time, and those of a server that does not respond, are left to the end
    of their agents.
    """
    deadline = time.monotonic() + STOP_SECONDS
    try:
        with Client(url, token) as client:
            for job in _unfinished(client):
                client.post(f"/jobs/{job['id']}/stop")
            while _unfinished(client) and time.monotonic() < deadline:
                time.sleep(0.1)
    except click.ClickException:
        return


def _unfinished(client: Client) -> list[dict[str, Any]]:
    return [job for job in client.items("/jobs") if job["state"] not in _ENDED]
