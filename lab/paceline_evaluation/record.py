"""The record of one trial, of either arm: its faults and the findings. The input of scoring."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_evaluation.faults import CommonChange, TrialFault
from paceline_server.detect.finding import Finding

WARMUP_STEPS = 5  # at the start of a generation; not counted as clean steps


@dataclass(frozen=True, slots=True)
class ReportedFinding:
    """A finding with the latest step the engine had received, and the time."""

    finding: Finding
    step: int
    seconds: float  # since the job's start


@dataclass(slots=True)
class TrialRecord:
    """The record of one trial; `faults` is empty for the kind `none` (see `faults.KINDS`)."""

    kind: str
    faults: tuple[TrialFault, ...]
    steps: int  # steps in the trial
    arm: str = "synthetic"
    number: int = 0  # position among the trials of its kind
    job: str = ""  # description of the job, for the user
    trainer: str = ""  # the trainer of the foreign arm
    clean_seconds: float = 0.0  # before the fault, without warm-up; 0: not measured
    onset_seconds: tuple[float, ...] = ()  # one per fault
    change: CommonChange | None = None
    findings: list[ReportedFinding] = field(default_factory=list)

    @property
    def clean_steps(self) -> int:
        """Number of steps after warm-up and before the first fault."""
        onset = min((fault.onset_step for fault in self.faults), default=self.steps)
        return max(0, min(onset, self.steps) - WARMUP_STEPS)
