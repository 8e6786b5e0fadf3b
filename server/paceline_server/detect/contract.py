"""The contract of a detector.

A detector is a folder beside this file whose `detector.py` contains one subclass of `Detector`; it
is registered automatically. An instance lives for one generation, receives one `Observation` per
tick, and returns only what is new: a finding when a problem begins, again when the verdict changes,
and once with `cleared=True` when it is over. It must be pure: no clock, no I/O, no logging, no
global state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, TypeVar, Unpack

from paceline_server.detect.finding import Finding, FindingDetails
from paceline_server.detect.kinds import Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy
from paceline_server.steps.first_steps import WARMUP_STEPS

Step = TypeVar("Step")


class Detector(ABC):
    """Base class of all detectors.

    Args:
        generation: which rank runs on which node and GPU; fixed for the detector's life.
        policy: what an operator may change. A detector's own thresholds are in the `settings.py`
            beside it; its constructor takes them as a third argument.

    `kinds`: kinds of the findings it emits, the most common first. `order`: detectors run in
    ascending order, so that findings that explain others come first. `warmup_steps`: first steps of
    a generation, which are skipped.
    """

    kinds: ClassVar[tuple[Kind, ...]]
    order: ClassVar[int] = 50
    warmup_steps: ClassVar[int] = WARMUP_STEPS

    def __init__(self, generation: Generation, policy: Policy) -> None:
        self.generation = generation
        self.policy = policy
        self._skipped = 0

    @property
    def hidden_slowdown(self) -> float:
        """The largest slowdown of a rank that the detector cannot distinguish from chance.

        Infinite while too few steps are known.
        """
        return 1.0

    @abstractmethod
    def update(self, observation: Observation) -> list[Finding]:
        """Return the findings that are new or changed in this tick."""

    def after_warmup(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Return `steps` without the first `warmup_steps` of the generation."""
        for step in steps:
            if self._skipped < self.warmup_steps:
                self._skipped += 1
            else:
                yield step

    def finding(
        self,
        fingerprint: str,
        *,
        cause: str,
        summary: str,
        now_ns: int,
        kind: Kind | None = None,
        **details: Unpack[FindingDetails],
    ) -> Finding:
        """Return a finding of this generation.

        Defaults: the detector's first kind, the severity of the kind, and the node and stage of
        `rank`.
        """
        kind = kind or self.kinds[0]
        rank = details.get("rank")
        details.setdefault("severity", kind.severity)
        details.setdefault("node", self.generation.node(rank))
        details.setdefault("stage", self.generation.stage(rank))
        return Finding(
            kind=kind.name,
            cause=cause,
            fingerprint=fingerprint,
            summary=summary,
            detected_ns=now_ns,
            generation=self.generation.number,
            **details,
        )
