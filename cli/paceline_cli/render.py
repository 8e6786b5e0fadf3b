"""Output of resources in a terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, overload

import click
from rich.cells import cell_len, set_cell_size

_BELOW = "    "
STATE_COLOURS = {
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


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str, *, sentence: bool = False
) -> None:
    """Print a table, or the sentence `empty` if there are no rows.

    Each row is one line, so that the output can be piped to grep. On a terminal that is too
    narrow, the last column of a table with a `sentence` is printed below each row.
    """
    if not rows:
        click.echo(empty)
        return
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed
    width = shutil.get_terminal_size().columns if is_terminal else None
    for line in table_lines(columns, rows, width if sentence else None):
        click.echo(line)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], width: int | None
) -> list[str]:
    """Print rows; if one is wider than `width` characters, its last column is below it."""
    texts = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        return [_line(row, widths, header=row is texts[0]) for row in texts]
    lines = [_line(texts[0][:-1], widths, header=True)]
    for *row, last in texts[1:]:
        lines.append(_line(row, widths))
        lines += textwrap.wrap(last, width, initial_indent=_BELOW, subsequent_indent=_BELOW)
    return lines


def _line(texts: Sequence[str], widths: Sequence[int], *, header: bool = False) -> str:
    padded = [set_cell_size(text, size) for text, size in zip(texts, widths, strict=False)]
    padded[-1] = padded[-1].rstrip()
    return "  ".join(_styled(text, header) for text in padded)


def _styled(text: str, header: bool) -> str:
    if header:
        return click.style(text, bold=True)
    color = STATE_COLOURS.get(text.rstrip())
    return click.style(text, fg=color) if color else text


def cell(value: Any) -> str:
    """Return the text on one line, without control characters."""
    if value is None:
        return "-"
    return " ".join(_printable(str(value)).split())


def show_line(text: str, *, err: bool = False) -> None:
    """Print one line without control characters; a text may quote the log of a job.

    `err`: to standard error.
    """
    click.echo(_printable(text), err=err)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def ranges(numbers: Iterable[int]) -> str | None:
    """Return ranges such as `0-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or None


def show_next(commands: Mapping[str, str]) -> None:
    """Print commands that can follow, with their purpose."""
    if not commands:
        return
    width = max(map(len, commands))
    click.echo("Next:")
    for command, text in commands.items():
        click.echo(f"  {command:<{width}}  {text}")


def clock(timestamp: str | None) -> str | None:
    """Return an RFC 3339 time as local time of day, with the date if it is not today."""
    if timestamp is None:
        return None
    moment = datetime.fromisoformat(timestamp).astimezone()
    today = moment.date() == datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def rank_state(rank: dict[str, Any]) -> str:
    """Return the reported activity of a live process."""
    if rank.get("condition") in ("hung", "dead", "blocked", "unknown"):
        return str(rank["condition"])
    return str(rank["state"] if rank["state"] == "exited" else rank["status"] or rank["state"])


def seconds(value: float | None) -> str | None:
    """Return a duration such as `340 ms`, `12.3 s`, `4 min 05 s` or `3 h 20 min`."""
    if value is None:
        return None
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 59.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes:02d} min"


@overload
def percent(ratio: float, digits: int = 1) -> str: ...
@overload
def percent(ratio: float | None, digits: int = 1) -> str | None: ...
def percent(ratio: float | None, digits: int = 1) -> str | None:
    """Return a share such as `39.0%`."""
    return None if ratio is None else f"{ratio * 100:.{digits}f}%"


def number(value: float) -> str:
    """Return three significant digits, from 1,000 on all before the point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def size(value: int) -> str:
    """Return a number of bytes such as `54 GiB`."""
    power = min(max(value.bit_length() - 1, 0) // 10, 4)
    number = value / 1024**power
    # three significant digits, without the exponent that `g` writes from 1000 on
    text = f"{number:.3g}" if number < 999.5 else f"{round(number, -1):,.0f}"
    return f"{text} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def likelihood(ratio: float) -> str:
    """Return a likelihood; it is never shown as 0% or 100%."""
    if ratio > 0.99:
        return ">99%"
    return "<1%" if ratio < 0.01 else percent(ratio, 0)


def topology(axes: dict[str, int]) -> str:
    further = "".join(f" x {axis}{axes[axis]}" for axis in ("cp", "ep") if axes.get(axis, 1) > 1)
    return f"dp{axes['dp']} x pp{axes['pp']} x tp{axes['tp']}{further}"


def sizes(axes: dict[str, int]) -> str:
    """Return the sizes in the form of the column `DPxPPxTP`."""
    return f"{axes['dp']}x{axes['pp']}x{axes['tp']}"


def show_stacks(stacks: dict[str, Any]) -> None:
    """Print a stack like a traceback of Python, the innermost frame first."""
    for thread in stacks["threads"]:
        holds = ", holds the GIL" if thread["holds_gil"] else ""
        show_line(f"Rank {stacks['rank']}, thread {thread['name']}{holds}:")
        for frame in thread["frames"]:
            show_line(f"    {frame['function']}  {frame['file']}:{frame['line']}")


def job_state(job: dict[str, Any]) -> str:
    """Return the condition of a job that does not train although it should, else its state."""
    condition = str(job.get("condition"))  # older servers do not send it
    is_active = job["state"] in ("running", "starting")
    return condition if is_active and condition in ("hung", "dead", "unknown") else job["state"]
