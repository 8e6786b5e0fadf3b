"""The contract of a detector.

A detector is one folder beside this file, whose `detector.py` has one subclass of `Detector`;
being there registers it.
It is made anew for each generation, sees one `Observation` per tick, and returns what is new to
say: a finding when trouble begins, again when the verdict changes, and once with `cleared=True`
when it is over. It must be pure: no clock, no I/O, no logging, no global state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeVar

from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.settings import DetectionSettings

Each = TypeVar("Each")


class Detector(ABC):
    """`order`: those that explain others come first (the bubble asks who straggles).

    `warmup_steps`: how many of its first steps a detector leaves out.
    """

    order: ClassVar[int] = 50
    warmup_steps: ClassVar[int | None] = None  # None: as the settings say

    def __init__(self, settings: DetectionSettings, generation: Generation) -> None:
        self.settings = settings
        self.generation = generation
        self._skipped = 0

    def after_warmup(self, steps: Iterable[Each]) -> Iterator[Each]:
        """Without the first `warmup_steps` that were ever asked about."""
        skipped = self.settings.warmup_steps if self.warmup_steps is None else self.warmup_steps
        for step in steps:
            if self._skipped < skipped:
                self._skipped += 1
            else:
                yield step

    @abstractmethod
    def update(self, seen: Observation) -> list[Finding]: ...
