"""The what-if analysis of a job's last steps, as the server computes it for the job page."""

from __future__ import annotations

import importlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from paceline_cli.client import Client
from paceline_cli.extras import load
from paceline_cli.render import show_json, topology
from paceline_cli.trace import fetch_trace


def show(
    job: str, steps: int, server: str, token: str | None, timeline: Path | None, as_json: bool
) -> None:
    with Client(server, token) as client:
        found = client.download(f"/jobs/{job}/what-if", steps=steps).json()
        if timeline is not None:
            _write_timeline(client, job, steps, timeline)
    if found["slowdown"] is None:
        raise click.ClickException(found["verdict"]["text"])
    if as_json:
        show_json(found)
        return
    axes = found["topology"]
    report = importlib.import_module("paceline_cli.whatif_report")
    report.show(found, topology(axes), lambda rank: _worker(axes, rank))


def _worker(axes: dict[str, Any], rank: int) -> str:
    """Return the name of a worker.

    Rank order is tensor parallel (innermost), data parallel, pipeline.
    """
    rest, width = rank // axes["tp"], axes["tp"]
    ranks = f"rank {rank}" if width == 1 else f"ranks {rank}-{rank + width - 1}"
    return f"{ranks} (dp {rest % axes['dp']}, stage {rest // axes['dp']})"


def _write_timeline(client: Client, job: str, steps: int, timeline: Path) -> None:
    whatif = load("paceline_cli.whatif", "analyze --timeline", "server")
    fetched = fetch_trace(client, job, steps)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.parquet")
        path.write_bytes(fetched.parquet)
        path.with_suffix(".yaml").write_text(fetched.metadata)
        whatif.show_timeline(path, path.with_suffix(".yaml"), timeline)
