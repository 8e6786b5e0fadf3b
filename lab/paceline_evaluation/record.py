"""What a trial was and what was found in it: all that scoring needs, whichever arm it is from."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_evaluation.faults import TrialFault
from paceline_server.detect.finding import Finding

WARMUP_STEPS = 5  # of a generation: neither clean nor judged


@dataclass(frozen=True, slots=True)
class Seen:
    """A finding, and when it was given: the newest step known by then, and the time."""

    finding: Finding
    step: int
    seconds: float  # since the job's start


@dataclass(slots=True)
class TrialRecord:
    """`kind` is one of `faults.KINDS`; `faults` is empty for `none`."""

    kind: str
    faults: tuple[TrialFault, ...]
    steps: int  # played
    arm: str = "synthetic"
    number: int = 0  # among the trials of its kind
    job: str = ""  # what it was played on, for people
    onset_seconds: tuple[float, ...] = ()  # of each fault
    seen: list[Seen] = field(default_factory=list)

    @property
    def clean_steps(self) -> int:
        """Steps after warm-up with no fault present."""
        onset = min((fault.onset_step for fault in self.faults), default=self.steps)
        return max(0, min(onset, self.steps) - WARMUP_STEPS)
