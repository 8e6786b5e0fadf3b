"""Download of the trace of a job's last steps."""

from __future__ import annotations

import json
from typing import NamedTuple

from paceline_cli.client import Client

SIZES_HEADER = "Paceline-Sizes"


class JobTrace(NamedTuple):
    parquet: bytes
    metadata: str  # YAML


def fetch_trace(client: Client, job: str, steps: int) -> JobTrace:
    response = client.download(f"/jobs/{job}/trace", steps=steps)
    try:
        sizes = json.loads(response.headers[SIZES_HEADER])
    except (KeyError, ValueError) as error:
        raise client.unexpected(response) from error
    return JobTrace(response.content, "".join(f"{name}: {sizes[name]}\n" for name in sizes))
