"""Communication of the ranks that run on this node: what records it, and what cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from paceline_agent.collect.processes import process_status
from paceline_agent.expose.check.report import NO, PARTLY, YES, CheckRow
from paceline_agent.printable import printable
from paceline_agent.settings import AgentSettings
from paceline_wire.coverage import (
    NEWEST_TORCH,
    NOT_RECORDED,
    OLDEST_TORCH,
    RECORDER,
    TORCH,
    release_of,
)
from paceline_wire.node_directory import RINGS
from paceline_wire.ring import SUFFIX, RingError, RingReader

_WHAT = "communication of ranks"
_RANGE = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST_TORCH, NEWEST_TORCH))
_FASTER = "python -m paceline.collectives in the ranks' environment: a lower cost, on the CPU"


def of_ranks(settings: AgentSettings) -> Iterator[CheckRow]:
    """Check the running ranks; those of a job with the same result share a row."""
    ranks: dict[tuple[str, str, str, str], list[int]] = {}
    for path in _rings(settings.directory / RINGS):
        found = _metadata(path, settings.procfs_root)
        if found is not None:
            job, rank, metadata = found
            reported = (metadata.get(key, "") for key in (TORCH, RECORDER, NOT_RECORDED))
            ranks.setdefault((job, *map(printable, reported)), []).append(rank)  # type: ignore[arg-type]
    if not ranks:
        yield CheckRow(_WHAT, YES, f"no rank runs here; recorded with torch {_RANGE}")
    for (job, torch, recorder, reason), numbers in ranks.items():
        which = f"{job}, rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        yield _row(which, torch, recorder, reason)


def _rings(directory: Path) -> list[Path]:
    """Return the paths of the rings; a directory that cannot be read has a row of its own."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except OSError:
        return []


def _row(which: str, torch: str, recorder: str, reason: str) -> CheckRow:
    if reason:
        remedy = f"torch {_RANGE} with gloo or nccl; see docs/integrations.md"
        return CheckRow(_WHAT, NO, f"{which}: {reason}; waits count as compute", remedy)
    if not recorder:
        remedy = "communicate through torch.distributed"
        return CheckRow(_WHAT, NO, f"{which}: torch.distributed is not in use", remedy)
    release = release_of(torch)
    evidence = f"{which}: torch {torch}, recorded by {recorder}"
    if release is None or not OLDEST_TORCH <= release <= NEWEST_TORCH:
        return CheckRow(_WHAT, PARTLY, f"{evidence}; tested with torch {_RANGE}")
    return CheckRow(_WHAT, YES, evidence, _FASTER if recorder == "Python" else "")


def _metadata(path: Path, procfs: Path) -> tuple[str, int, dict[str, str]] | None:
    """Return job, rank and metadata of a ring; None if its process has ended."""
    try:
        with closing(RingReader(path)) as reader:
            identity = reader.identity
            if process_status(procfs, identity.pid) is None:
                return None
            metadata = dict(identity.metadata)
            for description in reader.new_descriptions():
                metadata |= description.metadata
            return identity.job, identity.rank, metadata
    except RingError:
        return None
