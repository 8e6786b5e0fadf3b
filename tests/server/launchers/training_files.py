"""The files in which the ranks of a job count their steps and starts, for them and for its test."""

from __future__ import annotations

import os
from pathlib import Path


class TrainingFiles:
    """They are in a directory that all ranks share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._step, self._starts = directory / "step", directory / "starts"

    def step(self) -> int:
        """Return the number of completed steps."""
        return int(self._step.read_text() or 0) if self._step.exists() else 0

    def save(self, step: int) -> None:
        temporary = self._step.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.rename(self._step)

    def add_start(self, run: str, rank: int, node: str, *more: int) -> None:
        """Note that this process is a start of a rank."""
        with self._starts.open("a") as starts:
            starts.write(" ".join(map(str, (run, rank, node, os.getpid(), *more))) + "\n")

    def starts(self) -> list[list[str]]:
        """Return (run, rank, node, pid, ...) of each start of a rank."""
        exists = self._starts.exists()
        return [line.split() for line in self._starts.read_text().splitlines()] if exists else []

    def pid(self, rank: int) -> int:
        return int(self._newest(rank)[3])

    def node(self, rank: int) -> str:
        return self._newest(rank)[2]

    def _newest(self, rank: int) -> list[str]:
        return [start for start in self.starts() if start[1] == str(rank)][-1]
