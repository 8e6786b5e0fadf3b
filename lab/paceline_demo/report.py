"""The demo's result, as `--report` writes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass
class FaultReport:
    """The result of one fault. Times are RFC 3339; `recovery_seconds` count from the detection."""

    kind: str
    target: int | None
    injected_at: str | None = None
    injected_step: int | None = None
    detected_at: str | None = None
    detection_seconds: float | None = None
    detection_steps: int | None = None
    verdict: dict[str, Any] | None = None  # kind, rank, node, cause, slowdown
    correct: bool = False
    action: str | None = None
    resumed_at: str | None = None
    recovery_seconds: float | None = None
    lost_steps: int | None = None
    error: str | None = None  # why it was not injected, detected or repaired

    def line(self) -> str:
        """Return the result in one line."""
        name = self.kind if self.target is None else f"{self.kind}:{self.target}"
        if self.injected_at is None:
            return f"{name}  not injected: {self.error}"
        if self.verdict is None:
            result = "NOT detected"
        else:
            result = "correct verdict" if self.correct else "WRONG verdict"
        if self.detection_seconds is not None:
            result += f" after {self.detection_seconds:.1f} s ({(self.verdict or {}).get('cause')})"
        if self.recovery_seconds is not None:
            result += f", training again {self.recovery_seconds:.1f} s later"
        return f"{name}  {result}" + (f": {self.error}" if self.error else "")


@dataclass
class DemoReport:
    """The result of the whole run. `failure` is the error that ended the demo early, if any."""

    faults: list[FaultReport] = field(default_factory=list)
    findings_while_healthy: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, float | None] = field(default_factory=lambda: {"first": None, "last": None})
    restarts: int = 0
    orphans: int = 0
    seconds: float = 0.0
    mode: str = "auto"
    failure: str | None = None

    def succeeded(self) -> bool:
        """Return whether the demo succeeded.

        Every fault has a correct verdict and is repaired (in mode observe: a correct verdict),
        there is no false alarm, and no process is left behind.
        """
        repaired = all(
            fault.correct and (fault.resumed_at is not None or self.mode == "observe")
            for fault in self.faults
        )
        return (
            repaired
            and self.failure is None
            and not self.findings_while_healthy
            and not self.orphans
        )

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def seconds_between(start: str, end: str) -> float:
    """Return the seconds from one RFC 3339 time to another."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
