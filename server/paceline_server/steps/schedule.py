"""The theoretical bubble of a pipeline schedule: a stage's idle share if all are equally fast."""

from __future__ import annotations

from collections.abc import Mapping

# (p - 1) / (m + p - 1): one microbatch in flight per stage on the way in and on the way out.
# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, 2.2.
_FLUSHING = frozenset({"gpipe", "1f1b", "interleaved", "interleaved_1f1b", "looped_bfs"})


def bubble_theory(metadata: Mapping[str, str], stages: int) -> float | None:
    """Return the idle share of the pipeline phase; None if the schedule is unknown.

    Reads `schedule`, `microbatches` and, for interleaved schedules, `virtual_stages` (chunks per
    rank, v): (p - 1) / (v * m + p - 1).
    """
    if stages == 1:
        return 0.0
    microbatches = _positive(metadata.get("microbatches"))
    if microbatches is None or metadata.get("schedule", "").lower() not in _FLUSHING:
        return None
    chunks = _positive(metadata.get("virtual_stages", "1"))
    if chunks is None:
        return None
    return (stages - 1) / (chunks * microbatches + stages - 1)


def _positive(text: str | None) -> int | None:
    try:
        value = int(text or "")
    except ValueError:
        return None
    return value if value > 0 else None
