"""The what-if analysis of a trace.

The text report is imported on use: without it, JSON is printed in four fifths of the time.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from paceline_cli.errors import BadRecording
from paceline_server.whatif.analysis import Analysis, PreparedTrace, analyze, prepare
from paceline_server.whatif.errors import WhatIfError
from paceline_server.whatif.reader import read_metadata, read_trace
from paceline_server.whatif.timeline import ideal_timeline
from paceline_server.whatif.trace import Trace
from paceline_server.whatif.verdict import ReplayVerdict, judge


def show(path: Path, metadata: Path | None, timeline: Path | None, as_json: bool) -> None:
    trace, step = _read(path, metadata)
    try:
        analysis = analyze(trace, step)
    except WhatIfError as error:
        raise BadRecording(str(error)) from error
    if metadata is None:
        click.echo(f"No --meta, so the sizes are the trace's: {_sizes(trace)}.", err=True)
    for note in trace.notes:
        click.echo(f"Note: {note}.", err=True)
    if timeline is not None:
        _write_timeline(timeline, step, trace)
    found = as_resource(analysis, judge(analysis))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    report = importlib.import_module("paceline_cli.whatif_report")
    places = analysis.places
    report.show(
        found,
        _sizes(trace),
        lambda rank: f"rank {rank} (dp {places[rank][0]}, stage {places[rank][1]})",
    )


def show_timeline(path: Path, metadata: Path, timeline: Path) -> None:
    """Write the ideal step as a timeline for Perfetto."""
    trace, step = _read(path, metadata)
    _write_timeline(timeline, step, trace)


def _read(path: Path, metadata: Path | None) -> tuple[Trace, PreparedTrace]:
    try:
        trace = read_trace(path, read_metadata(metadata) if metadata else None)
        return trace, prepare(trace)
    except WhatIfError as error:
        raise BadRecording(str(error)) from error


def _write_timeline(path: Path, step: PreparedTrace, trace: Trace) -> None:
    try:
        path.write_text(json.dumps(ideal_timeline(step, trace)))
    except OSError as error:
        raise BadRecording(f"cannot write {path}: {error.strerror}") from error


def as_resource(analysis: Analysis, verdict: ReplayVerdict) -> dict[str, Any]:
    return {
        "step_seconds": analysis.original_seconds,
        "ideal_step_seconds": analysis.ideal_seconds,
        "slowdown": analysis.slowdown,
        "slowdown_by_step": analysis.slowdown_by_step,
        "slowdown_by_optype": analysis.slowdown_by_optype,
        "slowdown_by_dp_rank": analysis.slowdown_by_dp_rank,
        "slowdown_by_stage": analysis.slowdown_by_stage,
        "slowdown_by_worker": analysis.slowdown_by_worker,
        "m_s": analysis.m_s,
        "m_w": analysis.m_w,
        "launch_slowdown": analysis.launch_slowdown,
        "slowest_workers": list(analysis.slowest_workers),
        "verdict": {"kind": verdict.kind, "target": verdict.target, "text": verdict.text},
    }


def _sizes(trace: Trace) -> str:
    chunks = int(trace.operations.chunk.max()) + 1
    virtual = f" with {chunks} chunks each" if chunks > 1 else ""
    return f"{len(trace.dp_ranks)} dp ranks, {trace.stage_count} stages{virtual}"
