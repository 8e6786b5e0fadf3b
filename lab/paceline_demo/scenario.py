"""The sequence of the demo: wait until training is steady, inject a fault, wait for its repair."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from paceline_cli import render
from paceline_cli.client import Client
from paceline_demo import faults
from paceline_demo.cluster import Cluster
from paceline_demo.report import DemoReport, FaultReport, seconds_between
from paceline_demo.startup import describe_startup

POLL_SECONDS = 0.2
WARM_UP_STEPS = 12  # before the next fault: detectors compare with earlier steps
START_SECONDS = 120.0
DETECT_SECONDS = 60.0
REPAIR_SECONDS = 120.0
APPROVAL_SECONDS = 2.0  # between the proposal of an action and the demo's approval


class ScenarioError(Exception):
    """The job did not reach the expected state; the message has the reason."""


@dataclass
class Scenario:
    """One job and the faults injected into it, one after another.

    `show` prints a line; `progress` replaces the progress line.
    """

    client: Client
    cluster: Cluster
    mode: str
    approve: bool  # approve proposed actions, as an operator would
    chance: random.Random
    start_job: Callable[[], str]
    show: Callable[[str], None]
    progress: Callable[[str], None]
    report: DemoReport
    job_id: str = ""
    job: dict[str, Any] = field(default_factory=dict)
    _incidents: dict[str, dict[str, Any]] = field(default_factory=dict)
    _phases_shown: set[tuple[str, str, str]] = field(default_factory=set)
    _proposed: dict[str, float] = field(default_factory=dict)
    _expected: set[str] = field(default_factory=set)  # incidents caused by an injected fault
    _fault_active: bool = False
    _steady_from: int = 0  # step at which the last fault was removed
    _healthy_findings: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Start the job and wait for its first step. Raises ScenarioError if there is none."""
        self.job_id = self.start_job()
        self.show(f"job {self.job_id} is starting: {self.url}")
        self._wait_until(
            self._is_training,
            START_SECONDS,
            f"the job did not finish its first step within {START_SECONDS:.0f} s",
        )
        self.show(
            f"training: {render.topology(self.job['topology'])}, "
            f"{self.job['metadata'].get('schedule', 'unknown schedule')}, "
            f"{render.seconds(self.job['step_seconds']) or 'timing'} per step"
        )

    @property
    def url(self) -> str:
        return f"{self.cluster.url}/jobs/{self.job_id}"

    def stay_healthy(self, seconds: float) -> None:
        """Train without faults; each warning in this time counts as a false alarm."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            time.sleep(POLL_SECONDS)

    def play(self, request: faults.FaultRequest) -> None:
        """Inject one fault, wait for its verdict and repair, and add both to the report."""
        entry = FaultReport(request.kind, request.target)
        self.report.faults.append(entry)
        try:
            self._wait_until(
                self._is_steady,
                START_SECONDS,
                f"training did not become steady within {START_SECONDS:.0f} s",
            )
            fault = faults.aim(request, self.cluster, self._ranks(), self.chance)
        except (ScenarioError, faults.NotInjectableError) as error:
            entry.error = str(error)
            self.show(f"{request.kind} was not injected: {error}")
            return
        entry.target = fault.target
        try:
            self._play(fault, entry)
        except ScenarioError as error:
            entry.error = str(error)
            self.show(str(error))
        finally:
            self._fault_active = False
            self._remove(fault)
            if self.job["state"] == "running":
                self._steady_from = self.job["step"] or 0

    def _play(self, fault: faults.PlannedFault, entry: FaultReport) -> None:
        earlier = set(self._incidents)
        generation = self.job["generation"]
        self._fault_active = True
        entry.injected_step = self.job["step"]
        entry.injected_at = datetime.now(UTC).isoformat()
        self.show(f"fault: {faults.inject(fault)}")

        self._wait_until(
            lambda: bool(self._warnings_since(earlier)),
            DETECT_SECONDS,
            f"{fault.kind} was not detected within {DETECT_SECONDS:.0f} s",
        )
        self._add_verdict(fault, entry, earlier)
        if self.mode == "observe":
            self._restart_manually(fault)
            return
        self._wait_until(
            lambda: self._restarted(entry, generation),
            REPAIR_SECONDS,
            lambda: self._why_not_repaired(fault.kind),
        )
        # The verdict may have become more precise since the incident was opened.
        self._add_verdict(fault, entry, earlier)
        lost = "no steps lost" if not entry.lost_steps else f"{entry.lost_steps} steps lost"
        self.show(
            f"repaired: training again {entry.recovery_seconds:.1f} s after detection, {lost}"
        )

    def _add_verdict(
        self, fault: faults.PlannedFault, entry: FaultReport, earlier: set[str]
    ) -> None:
        """Add the first warning since the injection to the report, as the verdict."""
        new = self._warnings_since(earlier)
        first = min(new, key=lambda incident: incident["detected_at"])
        self._expected.update(incident["id"] for incident in new)
        node = first["node"]
        entry.verdict = {
            "kind": first["kind"],
            "rank": first["rank"],
            "node": int(node.removeprefix("node-")) if node else None,
            "cause": first["cause"],
            "slowdown": first["slowdown"],
        }
        assert entry.injected_at is not None
        entry.detected_at = first["detected_at"]
        entry.detection_seconds = round(seconds_between(entry.injected_at, first["detected_at"]), 3)
        if first["detected_step"] is not None and entry.injected_step is not None:
            entry.detection_steps = first["detected_step"] - entry.injected_step
        entry.correct = faults.correct(fault, entry.verdict)

    def _warnings_since(self, earlier: set[str]) -> list[dict[str, Any]]:
        """Return the warnings whose ids are not in `earlier`."""
        return [
            incident
            for key, incident in self._incidents.items()
            if key not in earlier and _is_warning(incident)
        ]

    def _restarted(self, entry: FaultReport, generation: int) -> bool:
        """Return whether a restart of `generation` is done; if so, add it to the report."""
        for action in self.client.items("/actions", job=self.job_id):
            if action["kind"] != "restart" or action["generation"] < generation:
                continue
            if action["state"] == "done":
                assert entry.detected_at is not None
                entry.action = action["phases"][0]["name"] if action["phases"] else "restart"
                entry.action = "checkpoint-restart" if entry.action == "checkpoint" else "restart"
                entry.resumed_at = action["finished_at"]
                entry.recovery_seconds = round(
                    seconds_between(entry.detected_at, action["finished_at"]), 3
                )
                entry.lost_steps = action["lost_steps"]
                return True
        if self.job["state"] in ("failed", "finished", "stopped"):
            raise ScenarioError(f"the job is {self.job['state']}: {self.job['verdict']['text']}")
        return False

    def _why_not_repaired(self, kind: str) -> str:
        waiting = [
            action["id"]
            for action in self.client.items("/actions", job=self.job_id)
            if action["state"] == "proposed" and action["kind"] != "start"
        ]
        if waiting:
            return (
                f"{kind}: nobody approved the repair within {REPAIR_SECONDS:.0f} s "
                f"(paceline actions approve {waiting[0]})"
            )
        return f"{kind} was not repaired within {REPAIR_SECONDS:.0f} s"

    def _restart_manually(self, fault: faults.PlannedFault) -> None:
        """Restart the job as an operator would in mode observe."""
        if not fault.expected.fatal:
            return
        self.show("mode observe: the demo stops the job and starts it again")
        self.client.post(f"/jobs/{self.job_id}/stop")
        self._wait_until(
            lambda: self.job["state"] in ("stopped", "failed", "finished"),
            REPAIR_SECONDS,
            f"the job did not stop within {REPAIR_SECONDS:.0f} s",
        )
        self.begin()

    def _remove(self, fault: faults.PlannedFault) -> None:
        """Remove the fault and release the node, as a technician would."""
        repair = faults.remove(fault, self.cluster)
        if repair is None:
            return
        self.client.post(f"/nodes/{fault.node.agent_id}/release")
        self.show(f"maintenance: {repair} and is released for new ranks")

    def poll(self) -> None:
        """Read the job, its incidents and actions; show what is new."""
        self.job = self.client.get(f"/jobs/{self.job_id}")
        loss = self.job["evaluation_loss"]
        if loss is not None:
            if self.report.losses["first"] is None:
                self.report.losses["first"] = loss
            self.report.losses["last"] = loss
        for incident in reversed(self.client.items("/incidents", job=self.job_id)):
            if incident["id"] not in self._incidents:
                self.show(f"detected: {incident['summary']}")
                for item in incident["evidence"][:3]:
                    self.show(f"          - {item['text']}")
                if not self._fault_active and _is_warning(incident):
                    self._healthy_findings.add(incident["id"])
            self._incidents[incident["id"]] = incident
        for action in reversed(self.client.items("/actions", job=self.job_id)):
            self._show_action(action)
        self.report.findings_while_healthy = len(self._healthy_findings - self._expected)
        self.report.ledger = self.job["ledger"]
        self.report.restarts = self.job["restarts"]
        self.progress(self._progress_line())

    def _show_action(self, action: dict[str, Any]) -> None:
        if action["state"] == "proposed" and action["kind"] != "start":
            since = self._proposed.setdefault(action["id"], time.monotonic())
            if self._is_new(action["id"], "proposed", ""):
                self.show(f"proposed: {action['reason']}")
                self.show(f"          paceline actions approve {action['id']}")
            is_due = time.monotonic() - since >= APPROVAL_SECONDS
            if self.approve and is_due and self._is_new(action["id"], "approved", ""):
                self.client.post(f"/actions/{action['id']}/approve")
                self.show("approved by the demo")
            return
        for phase in action["phases"]:
            if self._is_new(action["id"], phase["name"], phase["started_at"]):
                self.show(f"{action['kind']}: {phase['detail'] or phase['name']}")

    def _is_new(self, action: str, phase: str, started_at: str) -> bool:
        """Return whether this phase has not been shown yet; mark it as shown."""
        key = (action, phase, started_at)
        if key in self._phases_shown:
            return False
        self._phases_shown.add(key)
        return True

    def _progress_line(self) -> str:
        job = self.job
        parts = [f"[{job['state']}]", f"generation {job['generation']}"]
        if job["step"] is not None:
            parts.append(f"step {job['step']}")
        if job["step_seconds"] is not None:
            parts.append(f"{render.seconds(job['step_seconds'])} per step")
        if job["loss"] is not None:
            parts.append(f"loss {job['loss']:.3f}")
        if job["evaluation_loss"] is not None:
            parts.append(f"held-out loss {job['evaluation_loss']:.3f}")
        if job["state"] in ("starting", "recovering") and (startup := self._startup()):
            parts.append(startup)
        return "  ".join(parts)

    def _startup(self) -> str:
        """Return what the ranks do before their first step; "" while there are none."""
        return describe_startup(self._ranks())

    def _ranks(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/ranks")

    def _is_training(self) -> bool:
        return self.job["state"] == "running" and self.job["step"] is not None

    def _is_steady(self) -> bool:
        """Return whether the generation has done WARM_UP_STEPS steps since the last fault was
        removed."""
        if (
            self.job["state"] != "running"
            or (self.job["step"] or 0) < self._steady_from + WARM_UP_STEPS
        ):
            return False
        steps = self.client.get(f"/jobs/{self.job_id}/steps", limit=WARM_UP_STEPS)["items"]
        return len(steps) == WARM_UP_STEPS and all(
            step["generation"] == self.job["generation"] for step in steps
        )

    def _wait_until(
        self, condition: Callable[[], bool], seconds: float, message: str | Callable[[], str]
    ) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if condition():
                return
            if self.job["state"] in ("failed", "stopped") and not self._fault_active:
                raise ScenarioError(
                    f"the job is {self.job['state']}: {self.job['verdict']['text']}"
                )
            if time.monotonic() > deadline:
                raise ScenarioError(message() if callable(message) else message)
            time.sleep(POLL_SECONDS)


def _is_warning(incident: dict[str, Any]) -> bool:
    """Return whether an incident is a verdict: an `info`, such as busy CPUs, asks for nothing."""
    return bool(incident["severity"] != "info")
