"""The what-if analysis of a job's last steps, as the server computes it for the job page."""

from __future__ import annotations

import importlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec

from paceline_cli.client import Client
from paceline_cli.extras import load
from paceline_cli.render import show_json, topology
from paceline_cli.trace import fetch_trace
from paceline_wire.topology import Topology


def show(
    job: str, steps: int, server: str, token: str | None, timeline: Path | None, as_json: bool
) -> None:
    with Client(server, token) as client:
        found = client.parse(client.download(f"/jobs/{job}/what-if", steps=steps))
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
    """Return the ranks that share the microbatches of `rank` on its stage, and their place."""
    job = msgspec.convert(axes, Topology)
    own = job.coordinates(rank)
    ranks = sorted(
        job.rank(own.dp_rank, own.pp_rank, tp_rank, cp_rank, own.ep_rank)
        for tp_rank in range(job.tp)
        for cp_rank in range(job.cp)
    )
    is_row = ranks[-1] - ranks[0] == len(ranks) - 1
    several = f"{ranks[0]}-{ranks[-1]}" if is_row else ", ".join(map(str, ranks))
    name = f"rank {rank}" if len(ranks) == 1 else f"ranks {several}"
    return f"{name} (dp {own.dp_rank * job.ep + own.ep_rank}, stage {own.pp_rank})"


def _write_timeline(client: Client, job: str, steps: int, timeline: Path) -> None:
    whatif = load("paceline_cli.whatif", "analyze --timeline", "server")
    fetched = fetch_trace(client, job, steps)
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.parquet")
        path.write_bytes(fetched.parquet)
        path.with_suffix(".yaml").write_text(fetched.metadata)
        whatif.show_timeline(path, path.with_suffix(".yaml"), timeline)
