"""A job of a real server, and the record of a trial in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from paceline_cli.client import Client
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.record import ReportedFinding, TrialRecord
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import severity_rank

SERVER_SECONDS = 60.0  # until it answers: on a busy host a trial is not given up for that
_POLL_SECONDS = 0.2


@dataclass
class ObservedJob:
    """One job, as the server reports it."""

    client: Client
    job_id: str
    view: dict[str, Any] = field(default_factory=dict)
    # by id, with the highest severity so far: a warning stays one when it turns out to cost little
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)

    def is_known(self) -> bool:
        """Return whether the server has received anything about the job."""
        return any(job["id"] == self.job_id for job in self.client.items("/jobs"))

    def poll(self) -> None:
        self.view = self.client.get(f"/jobs/{self.job_id}")
        for incident in self.client.items("/incidents", job=self.job_id):
            before = self.incidents.get(incident["id"], incident)
            highest = max(incident["severity"], before["severity"], key=severity_rank)
            self.incidents[incident["id"]] = {**incident, "severity": highest}

    @property
    def step(self) -> int:
        """The latest finished step; -1 before the first."""
        newest: int | None = self.view.get("step")
        return -1 if newest is None else newest

    @property
    def is_over(self) -> bool:
        return self.view.get("state") in ("failed", "finished", "stopped")

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Poll until `condition` holds. Return whether it did within `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            if condition():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def wait_for_steps(self, steps: int) -> bool:
        """Wait for `steps` more steps. Return whether the job finished them."""
        self.poll()
        goal = self.step + steps
        return self.wait_until(lambda: self.step >= goal or self.is_over, 5.0 * steps) and (
            not self.is_over
        )

    def ranks(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/ranks")

    def steps(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/steps")

    def with_onset(self, faults: tuple[TrialFault, ...], at: datetime) -> tuple[TrialFault, ...]:
        """Return the faults with the first step that began after `at` as their onset.

        The step that the server reports lags by up to a second.
        """
        later = [
            step["step"]
            for step in self.steps()
            if datetime.fromisoformat(step["started_at"]) >= at
        ]
        onset = min(later, default=self.step + 1)
        return tuple(replace(fault, onset_step=onset) for fault in faults)

    def record(
        self, kind: str, faults: tuple[TrialFault, ...], earlier: set[str], first: int
    ) -> TrialRecord:
        """Return the record of the trial; its steps count from `first`."""
        incidents = [incident for key, incident in self.incidents.items() if key not in earlier]
        record = TrialRecord(
            kind=kind,
            faults=tuple(
                replace(fault, onset_step=max(0, fault.onset_step - first)) for fault in faults
            ),
            steps=self.step - first,
        )
        for incident in sorted(incidents, key=lambda incident: str(incident["detected_at"])):
            step = incident["detected_step"]
            record.findings.append(
                ReportedFinding(
                    finding=finding_of(incident),
                    step=(self.step if step is None else step) - first,
                    seconds=datetime.fromisoformat(incident["detected_at"]).timestamp(),
                )
            )
        return record


def finding_of(incident: dict[str, Any]) -> Finding:
    """Return the finding that opened the incident."""
    link = incident.get("link")
    return Finding(
        fingerprint=incident["id"],
        detected_ns=0,
        **{name: incident[name] for name in ("kind", "cause", "summary", "generation", "severity")},
        **{name: incident[name] for name in ("rank", "node", "stage", "onset_step")},
        ranks=incident.get("ranks") or [],
        link=None if link is None else (link[0], link[1]),
        side=incident.get("side"),
    )
