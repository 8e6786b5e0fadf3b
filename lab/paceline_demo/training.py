"""Starting the reference trainer on a cluster of this machine."""

from __future__ import annotations

import subprocess
import sys

import click

from paceline_demo.cluster import Cluster


def start_training(
    cluster: Cluster,
    axes: tuple[int, int, int],
    mode: str,
    *arguments: str,
    checkpoints_name: str = "checkpoints",
) -> str:
    """`paceline run` of the reference trainer at dp x pp x tp; returns the job's id.

    A job resumes from what an earlier one left under the same `checkpoints_name`. Raises
    click.ClickException with what `paceline run` said if it does not start.
    """
    dp, pp, tp = (str(axis) for axis in axes)
    checkpoints = cluster.directory / checkpoints_name
    checkpoints.mkdir(exist_ok=True)
    started = subprocess.run(
        [
            *(sys.executable, "-m", "paceline_cli", "run", "--server", cluster.url, "--detach"),
            *("--dp", dp, "--pp", pp, "--tp", tp, "--mode", mode, "--name", "reference trainer"),
            *("--preload", "paceline_trainer.train"),
            *("--checkpoint-directory", str(checkpoints), "--"),
            *(sys.executable, "-m", "paceline_trainer", "--steps", "1000000"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if started.returncode:
        raise click.ClickException(started.stderr.strip())
    return started.stdout.strip()
