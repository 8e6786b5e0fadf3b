"""Resources as people read them in a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_UNLIMITED = 100_000  # characters
STATE_STYLES = {
    "running": "green",
    "finished": "green",
    "done": "green",
    "ready": "green",
    "resolved": "green",
    "starting": "cyan",
    "recovering": "yellow",
    "mitigating": "yellow",
    "proposed": "yellow",
    "open": "red",
    "failed": "red",
    "lost": "red",
    "quarantined": "red",
}


def show_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """A table, or the sentence `empty` that says what to do when there is nothing.

    One line per row, however long, so that it can be piped to grep.
    """
    if not rows:
        click.echo(empty)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    console = Console()
    unlimited = console.options.update(width=_UNLIMITED)
    console.width = console.measure(table, options=unlimited).maximum
    console.print(table)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    text = escape(str(value))
    style = STATE_STYLES.get(text)
    return f"[{style}]{text}[/]" if style else text


def clock(timestamp: str | None) -> str | None:
    """RFC 3339 to local time of day, with the date when it is not today."""
    if timestamp is None:
        return None
    moment = datetime.fromisoformat(timestamp).astimezone()
    today = moment.date() == datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def seconds(value: float | None) -> str | None:
    """`340 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`."""
    if value is None:
        return None
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def percent(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio * 100:.1f} %"


def likelihood(ratio: float) -> str:
    """Nothing is certain, and nothing impossible."""
    if ratio > 0.99:
        return ">99%"
    return "<1%" if ratio < 0.01 else f"{ratio:.0%}"


def topology(axes: dict[str, int]) -> str:
    return f"dp{axes['dp']} x pp{axes['pp']} x tp{axes['tp']}"


def show_stacks(stacks: dict[str, Any]) -> None:
    """As Python prints a traceback, but innermost first."""
    for thread in stacks["threads"]:
        holds = ", holds the GIL" if thread["holds_gil"] else ""
        click.echo(f"Rank {stacks['rank']}, thread {thread['name']}{holds}:")
        for frame in thread["frames"]:
            click.echo(f"    {frame['function']}  {frame['file']}:{frame['line']}")
