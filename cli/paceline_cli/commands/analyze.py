"""`paceline analyze`: analyze a recording on this machine.

Each kind of recording has its own module, imported on use, so a trace does not load the
dependencies of the others.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from paceline_cli.extras import load
from paceline_cli.options import OutputFile, server_options, steps_option

TRACE_SUFFIX = ".parquet"
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("trace", metavar="[TRACE | JOB]", type=FILE, required=False)
@click.option("--meta", type=FILE, help="Metadata of TRACE (YAML); its sizes are checked.")
@click.option(
    "--timeline",
    type=OutputFile(),
    metavar="OUT",
    help="Write the ideal step as a timeline for Perfetto.",
)
@click.option(
    "--flight-recorder",
    "dumps",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Instead of a TRACE: PyTorch Flight Recorder dumps of a hang, one file per rank.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a report.")
@steps_option
@server_options
def analyze(
    trace: Path | None,
    meta: Path | None,
    timeline: Path | None,
    dumps: Path | None,
    as_json: bool,
    steps: int,
    server: str,
    token: str | None,
) -> None:
    """Report what slowed a recorded run, by how much, and the gain of each fix.

    TRACE is a Parquet file with a row per operation: see docs/what-if.md. JOB is a job of the
    server: its last steps are fetched. With --flight-recorder, report which ranks caused a hang:
    see docs/flight-recorder.md.
    """
    if dumps is not None:
        if trace is not None or meta is not None or timeline is not None:
            raise click.UsageError("--flight-recorder takes no TRACE, --meta or --timeline")
        load("paceline_cli.flight_recorder", "analyze", "server").show(dumps, as_json)
        return
    if trace is None:
        raise click.UsageError("name a TRACE or a JOB to analyze, or --flight-recorder DIR")
    if not _is_job(trace):
        # Threads for linear algebra, which nothing here needs, cost as much as the analysis.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        load("paceline_cli.whatif", "analyze", "server").show(trace, meta, timeline, as_json)
        return
    if meta is not None:
        raise click.UsageError("--meta goes with a TRACE: the server knows the sizes of its jobs")
    of_job = load("paceline_cli.recorded_job", "analyze", "server")
    of_job.show(str(trace), steps, server, token, timeline, as_json)


def _is_job(trace: Path) -> bool:
    """Return whether the argument is a job: no file, without a folder and a suffix of traces."""
    return not os.path.exists(trace) and trace.suffix != TRACE_SUFFIX and trace.parent == Path()
