"""The what-if analysis of a trace.

The report for people is imported where it is wanted: JSON comes a fifth sooner without.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from paceline_cli.commands.analyze import BadRecording
from paceline_server.whatif.analysis import Analysis, analyze, prepare
from paceline_server.whatif.errors import WhatIfError
from paceline_server.whatif.reader import read_metadata, read_trace
from paceline_server.whatif.timeline import ideal_timeline
from paceline_server.whatif.trace import Trace
from paceline_server.whatif.verdict import Verdict, judge


def show(path: Path, metadata: Path | None, timeline: Path | None, as_json: bool) -> None:
    try:
        trace = read_trace(path, read_metadata(metadata) if metadata else None)
        step = prepare(trace)
        analysis = analyze(trace, step)
    except WhatIfError as error:
        raise BadRecording(str(error)) from error
    if metadata is None:
        click.echo(f"No --meta, so the sizes are the trace's: {_sizes(trace)}.", err=True)
    for note in trace.notes:
        click.echo(f"Note: {note}.", err=True)
    if timeline is not None:
        try:
            timeline.write_text(json.dumps(ideal_timeline(step, trace)))
        except OSError as error:
            raise BadRecording(f"cannot write {timeline}: {error.strerror}") from error
    verdict = judge(analysis)
    if as_json:
        click.echo(json.dumps(as_resource(analysis, verdict), indent=2))
    else:
        report = importlib.import_module("paceline_cli.whatif_report")
        report.show(trace, _sizes(trace), analysis, verdict)


def as_resource(analysis: Analysis, verdict: Verdict) -> dict[str, Any]:
    return {
        "slowdown": analysis.slowdown,
        "slowdown_by_step": analysis.slowdown_by_step,
        "slowdown_by_optype": analysis.slowdown_by_optype,
        "slowdown_by_dp_rank": analysis.slowdown_by_dp_rank,
        "slowdown_by_stage": analysis.slowdown_by_stage,
        "slowdown_by_worker": analysis.slowdown_by_worker,
        "m_s": analysis.m_s,
        "m_w": analysis.m_w,
        "launch_slowdown": analysis.launch_slowdown,
        "verdict": {"kind": verdict.kind, "target": verdict.target, "text": verdict.text},
    }


def _sizes(trace: Trace) -> str:
    chunks = int(trace.operations.chunk.max()) + 1
    virtual = f" with {chunks} chunks each" if chunks > 1 else ""
    return f"{len(trace.dp_ranks)} dp ranks, {trace.stage_count} stages{virtual}"
