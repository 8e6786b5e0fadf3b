"""The report of a what-if analysis, as people read it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from paceline_server.whatif.analysis import Analysis
from paceline_server.whatif.trace import Trace
from paceline_server.whatif.verdict import Verdict

WORST = 5  # of each kind are listed; --json has all


def show(trace: Trace, sizes: str, analysis: Analysis, verdict: Verdict) -> None:
    console = Console(highlight=False)
    console.print(verdict.text, style="bold", markup=False)
    console.print(
        f"\n{len(trace.steps)} steps, {sizes}. Ideal step {analysis.ideal_seconds:.4g} s, "
        f"as it ran {analysis.original_seconds:.4g} s: slowdown S = {analysis.slowdown:.3f} "
        f"(launch delays, not counted in it: {analysis.launch_slowdown:.3f})."
    )
    console.print(
        f"The last stage explains {_share(analysis.m_s)} of it (M_S), the slowest "
        f"{_count(len(analysis.slowest_workers), 'worker')} {_share(analysis.m_w)} (M_W)."
    )
    places = analysis.places
    for title, slowdowns in (
        ("operation type", analysis.slowdown_by_optype),
        ("stage", analysis.slowdown_by_stage),
        ("dp rank", analysis.slowdown_by_dp_rank),
        (
            "worker",
            {
                f"rank {rank} (dp {places[rank][0]}, stage {places[rank][1]})": slowdown
                for rank, slowdown in analysis.slowdown_by_worker.items()
            },
        ),
        ("step", analysis.slowdown_by_step),
    ):
        console.print()
        console.print(_table(title, {str(key): value for key, value in slowdowns.items()}))


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
    return "none" if ratio is None else f"{ratio:.0%}"


def _count(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"
