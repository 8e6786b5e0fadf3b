"""The trainings that `paceline watch` recorded with a local server, kept in a file of the node.

The process beside the commands (`companions.py`) writes it while the server runs, and once more
when all data are stored. So the result of a training can be read without a server: by `paceline
watch` without a command, and by the first process of the command that imports torch, which prints
`problems` at its end.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from paceline_cli.client import Client
from paceline_cli.watch_directory import RESULT

# For the process that prints the lines: path of the file, or the address of another server.
VARIABLE = "PACELINE_WATCH_RESULT"
_MOST_JOBS = 20
_MOST_INCIDENTS = 20  # per job, the worst first
_MOST_LINES = 3


def write(logs: Path, server: str, since: datetime) -> bool:
    """Write the newest jobs of the local server. As long as it has none, the earlier ones stay.

    Returns whether the server responds and all of them have ended.

    Args:
        logs: the node's directory, as `watch_directory` returns it.
        server: address of the local server. If it does not respond, the file stays as it is.
        since: only of jobs that had not ended before this time.
    """
    with suppress(click.ClickException, OSError, ValueError), Client(server) as client:
        jobs = [
            {
                **job,
                "incidents": client.get("/incidents", job=job["id"], limit=_MOST_INCIDENTS)[
                    "items"
                ],
            }
            for job in client.get("/jobs", limit=_MOST_JOBS)["items"]
            if job["finished_at"] is None or _time(job["finished_at"]) >= since
        ]
        result = {
            "server": server,
            "updated_at": datetime.now(UTC).isoformat(),
            "jobs": jobs or read(logs)["jobs"],
            "problems": [
                {
                    "job": job["name"],
                    "created": _time(job["created_at"]).timestamp(),
                    "ended": job["finished_at"] is not None,
                    "lines": problems(job)[:_MOST_LINES],
                }
                for job in jobs
            ],
        }
        new = logs / f"{RESULT}.new"
        new.write_text(json.dumps(result), encoding="utf-8")
        os.replace(new, logs / RESULT)
        return all(job["finished_at"] is not None for job in jobs)
    return False


def problems(job: dict[str, Any]) -> list[str]:
    """Return a sentence on each problem that a job has now."""
    verdict = job["verdict"]
    return [verdict["text"]] * (verdict["kind"] == "standstill") + [
        incident["summary"]
        for incident in job["incidents"]
        if incident["state"] != "resolved" and incident["severity"] != "info"
    ]


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def read(logs: Path) -> dict[str, Any]:
    """Return `jobs`, newest first, each with its `incidents`, and the `server` and time
    (`updated_at`) that they are from. Without such a file there are no jobs, and nothing else."""
    with suppress(OSError, ValueError):
        result = json.loads((logs / RESULT).read_text(encoding="utf-8"))
        if isinstance(result, dict) and isinstance(result.get("jobs"), list):
            return result
    return {"jobs": []}
