"""A list of ranks as text."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5` for several."""
    runs: list[list[int]] = []
    ordered = sorted(set(ranks))
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(parts)}"
