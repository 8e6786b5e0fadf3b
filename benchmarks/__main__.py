"""The command `python -m benchmarks`."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE = Path(__file__).parent
# In addition to PACELINE_BENCH_SECONDS.
LIMIT_SECONDS = 900 + int(os.environ.get("PACELINE_BENCH_SECONDS", "0"))
_END_SECONDS = 30  # for a benchmark to end its processes


def names() -> list[str]:
    return sorted(
        module.name
        for module in pkgutil.iter_modules([str(HERE)])
        if not module.ispkg and module.name != "__main__"
    )


def measure(name: str) -> list[dict[str, Any]]:
    """Return the rows of one benchmark. Raises RuntimeError with its last output if it failed."""
    command = [sys.executable, "-m", "benchmarks.harness", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=HERE.parent, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            rows, output = running.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            _end(running)
            raise RuntimeError(f"no result in {LIMIT_SECONDS} s") from None
    if running.returncode:
        raise RuntimeError((output.strip() or f"exit status {running.returncode}").splitlines()[-1])
    sys.stderr.write(output)
    return [json.loads(line) for line in rows.splitlines() if line.startswith("{")]


def _end(running: subprocess.Popen[str]) -> None:
    """End the process and all processes that it started."""
    running.terminate()
    try:
        running.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()


def show(rows: list[dict[str, Any]], failed: dict[str, str]) -> Iterator[Table | str]:
    table = Table("benchmark", box=None, header_style="bold", pad_edge=False)
    for column in ("value", "unit", "baseline", "ratio", "goal", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        unresolved = "[yellow]?[/]" if row["goal"] is not None else ""
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: unresolved}[row["met"]]
        numbers = [_number(row[key]) for key in ("baseline", "ratio", "goal")]
        table.add_row(row["name"], _number(row["value"]), row["unit"], *numbers, met)
    yield table
    for name, reason in failed.items():
        yield f"[red]{name} failed:[/] {escape(reason)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@click.command()
@click.argument("chosen", nargs=-1, metavar="[NAME]...")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the rows here.")
def main(chosen: tuple[str, ...], target: Path | None) -> None:
    """Run all benchmarks, or the given ones, and print a table."""
    known = names()
    unknown = set(chosen) - set(known)
    if unknown:
        raise click.UsageError(f"no benchmark {', '.join(sorted(unknown))}; there are: {known}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in chosen or known:
        console.print(f"[dim]{name} ...[/]")
        try:
            rows += measure(name)
        except RuntimeError as error:
            failed[name] = str(error)
    for part in show(rows, failed):
        console.print(part)
    if target is not None:
        target.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
