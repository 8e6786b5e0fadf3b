"""The text report of a what-if analysis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline_cli import render

WORST = 5  # rows per kind that are listed; --json lists all


def show(found: Mapping[str, Any], sizes: str, worker: Callable[[int], str]) -> None:
    """Print the report. `found`: the JSON output; `worker`: a worker's name by its rank."""
    console = Console(highlight=False)
    by_step = found["slowdown_by_step"]
    console.print(found["verdict"]["text"], style="bold", markup=False)
    console.print(
        f"\n{_count(len(by_step), 'step')} ({min(map(int, by_step))}-{max(map(int, by_step))}), "
        f"{sizes}. Ideal step {found['ideal_step_seconds']:.4g} s, as it ran "
        f"{found['step_seconds']:.4g} s: slowdown S = {found['slowdown']:.3f} "
        f"(launch delays, not counted in it: {found['launch_slowdown']:.3f})."
    )
    workers = len(found["slowest_workers"])
    slowest = "worker explains" if workers == 1 else f"{workers} workers explain"
    line = f"The slowest {slowest} {_share(found['m_w'])} of it (M_W)"
    if len(found["slowdown_by_stage"]) > 1:
        line += f", the last stage {_share(found['m_s'])} (M_S)"
    console.print(f"{line}.")
    if found.get("fixes"):
        console.print()
        console.print(_fixes(found["fixes"]))
    if found.get("advice"):
        console.print()
        console.print(_advice(found["advice"]))
    for title, slowdowns in (
        ("operation type", found["slowdown_by_optype"]),
        ("stage", found["slowdown_by_stage"]),
        ("dp rank", found["slowdown_by_dp_rank"]),
        (
            "worker",
            {worker(int(rank)): value for rank, value in found["slowdown_by_worker"].items()},
        ),
        ("step", by_step),
    ):
        console.print()
        console.print(_table(title, {str(key): value for key, value in slowdowns.items()}))


def _fixes(fixes: list[Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("IF ONLY THIS WERE AS FAST AS ITS PEERS", min_width=32)
    table.add_column("STEPS", justify="right")
    for fix in fixes:
        table.add_row(fix["target"], f"{fix['speedup']:.2f}x as fast")
    return table


def _advice(advice: list[Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ANOTHER WAY THROUGH THE PIPELINE", min_width=32)
    for title in ("STEPS", "BUBBLE", "ACTIVATION MEMORY"):
        table.add_column(title, justify="right")
    for each in advice:
        now, then = (render.percent(each[f"bubble_ratio{key}"], 0) for key in ("_now", ""))
        table.add_row(
            each["change"],
            f"{each['speedup']:.2f}x as fast",
            f"{now} to {then}",
            f"{each['memory_ratio']:.2f}x",
        )
    return table


def _table(title: str, slowdowns: dict[str, float]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"by {title}".upper(), min_width=32)
    table.add_column("SLOWDOWN", justify="right")
    shown = len(slowdowns) if title == "operation type" else WORST
    worst = sorted(slowdowns.items(), key=lambda item: -item[1])
    for name, slowdown in worst[:shown]:
        table.add_row(name, f"{slowdown:.3f}", style="red" if slowdown >= 1.1 else None)
    if len(worst) > shown:
        table.add_row(f"{len(worst) - shown} more, up to {worst[shown][1]:.3f}", "", style="dim")
    return table


def _share(ratio: float | None) -> str:
    return render.percent(ratio, 0) or "none"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
