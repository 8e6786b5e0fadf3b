"""The Flight Recorder analysis of a hang."""

from __future__ import annotations

from pathlib import Path

import click

from paceline_cli.errors import BadRecording
from paceline_cli.render import show_json, show_table
from paceline_server.flight_recorder import FlightRecorderError, HangReport, report

RANKS_LISTED = 8  # most ranks listed among those that a rank waits for; --json lists all


def show(directory: Path, as_json: bool) -> None:
    try:
        found = report(directory)
    except FlightRecorderError as error:
        raise BadRecording(str(error)) from error
    for note in found.notes:
        click.echo(f"Note: {note}.", err=True)
    if as_json:
        show_json(found.as_json())
    else:
        _show_text(found)


def _show_text(found: HangReport) -> None:
    click.echo(found.verdict)
    click.echo()
    rows = [
        (standing.rank, standing.state, standing.waits_in, _few(standing.waits_for))
        for standing in found.ranks
    ]
    show_table(("RANK", "STATE", "WAITS IN", "WAITS FOR RANK"), rows, "No ranks.")


def _few(ranks: tuple[int, ...]) -> str | None:
    if not ranks:
        return None
    more = f" and {len(ranks) - RANKS_LISTED} more" if len(ranks) > RANKS_LISTED else ""
    return ", ".join(map(str, ranks[:RANKS_LISTED])) + more
