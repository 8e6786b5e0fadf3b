"""The what-if analysis of a job's last steps."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from paceline_cli import whatif
from paceline_cli.client import Client
from paceline_cli.trace import fetch_trace


def show(
    job: str, steps: int, server: str, token: str | None, timeline: Path | None, as_json: bool
) -> None:
    with Client(server, token) as client:
        fetched = fetch_trace(client, job, steps)
    with TemporaryDirectory() as folder:
        trace = Path(folder, "trace.parquet")
        trace.write_bytes(fetched.parquet)
        metadata = trace.with_suffix(".yaml")
        metadata.write_text(fetched.metadata)
        whatif.show(trace, metadata, timeline, as_json)
