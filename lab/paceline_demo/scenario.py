"""The demo's story: wait until the run is healthy, break something, watch it being repaired."""

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

POLL_SECONDS = 0.2
WARM_STEPS = 12  # of a generation, before the next fault: the detectors need a past to compare with
START_SECONDS = 120.0
DETECT_SECONDS = 60.0
REPAIR_SECONDS = 120.0
APPROVAL_SECONDS = 2.0  # how long the demo lets a proposed action be seen before it approves it


class ScenarioError(Exception):
    """The run cannot go on; the message says why."""


@dataclass
class Scenario:
    """One job under a list of faults. `say` prints a line, `progress` replaces the last one."""

    client: Client
    cluster: Cluster
    mode: str
    approve: bool  # approve proposed actions itself, as an operator would
    chance: random.Random
    start_job: Callable[[], str]
    say: Callable[[str], None]
    progress: Callable[[str], None]
    report: DemoReport
    job_id: str = ""
    job: dict[str, Any] = field(default_factory=dict)
    _incidents: dict[str, dict[str, Any]] = field(default_factory=dict)
    _phases_said: set[tuple[str, str, str]] = field(default_factory=set)
    _proposed: dict[str, float] = field(default_factory=dict)
    _blamed: set[str] = field(default_factory=set)  # incidents that belong to an injected fault
    _at_fault: bool = False
    _steady_from: int = 0  # the step the last fault was lifted at
    _healthy_findings: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Start the job and wait for its first steps."""
        self.job_id = self.start_job()
        self.say(f"job {self.job_id} is starting; watch it at {self.url}")
        self._until(self._trains, START_SECONDS, "the job did not reach its first step")
        self.say(
            f"training: {render.topology(self.job['topology'])}, "
            f"{self.job['metadata'].get('schedule', 'unknown schedule')}, "
            f"{render.seconds(self.job['step_seconds']) or 'timing'} per step"
        )

    @property
    def url(self) -> str:
        return f"{self.cluster.url}/jobs/{self.job_id}"

    def stay_healthy(self, seconds: float) -> None:
        """Train undisturbed; whatever is found meanwhile is a false alarm."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            time.sleep(POLL_SECONDS)

    def play(self, request: faults.Request) -> None:
        """Inject one fault, wait for verdict and repair, and write both down."""
        entry = FaultReport(request.kind, request.target)
        self.report.faults.append(entry)
        try:
            self._until(self._warm, START_SECONDS, "the run did not become steady")
            fault = faults.aim(request, self.cluster, self._ranks(), self.chance)
        except (ScenarioError, faults.NotInjectableError) as error:
            entry.error = str(error)
            self.say(f"{request.kind} was not injected: {error}")
            return
        entry.target = fault.target
        try:
            self._play(fault, entry)
        except ScenarioError as error:
            entry.error = str(error)
            self.say(str(error))
        finally:
            self._at_fault = False
            self._service(fault)
            if self.job["state"] == "running":
                self._steady_from = self.job["step"] or 0

    def _play(self, fault: faults.PlannedFault, entry: FaultReport) -> None:
        known = set(self._incidents)
        generation = self.job["generation"]
        self._at_fault = True
        entry.injected_step = self.job["step"]
        entry.injected_at = datetime.now(UTC).isoformat()
        self.say(f"fault: {faults.inject(fault)}")

        self._until(
            lambda: any(incident not in known for incident in self._incidents),
            DETECT_SECONDS,
            f"{fault.kind} was not found within {DETECT_SECONDS:.0f} s",
        )
        self._judge(fault, entry, known)
        if self.mode == "observe":
            self._repair_by_hand(fault)
            return
        self._until(
            lambda: self._restarted(entry, generation),
            REPAIR_SECONDS,
            f"{fault.kind} was not repaired within {REPAIR_SECONDS:.0f} s",
        )
        # The incident may have been sharpened since it was opened (symptoms, evidence).
        self._judge(fault, entry, known)
        lost = "no step lost" if not entry.lost_steps else f"{entry.lost_steps} steps lost"
        self.say(
            f"repaired: training again {entry.recovery_seconds:.1f} s after the verdict, {lost}"
        )

    def _judge(self, fault: faults.PlannedFault, entry: FaultReport, known: set[str]) -> None:
        """Take the first incident since the injection as the verdict."""
        fresh = [incident for key, incident in self._incidents.items() if key not in known]
        first = min(fresh, key=lambda incident: incident["detected_at"])
        self._blamed.update(incident["id"] for incident in fresh)
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

    def _restarted(self, entry: FaultReport, generation: int) -> bool:
        """Whether a restart away from `generation` is done; fills in the entry if so."""
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

    def _repair_by_hand(self, fault: faults.PlannedFault) -> None:
        """Mode observe: nothing is repaired for us, so do what an operator would."""
        if not fault.expected.fatal:
            return
        self.say("mode observe: stopping the job by hand and starting it again")
        self.client.post(f"/jobs/{self.job_id}/stop")
        self._until(
            lambda: self.job["state"] in ("stopped", "failed", "finished"),
            REPAIR_SECONDS,
            "the job did not stop",
        )
        self.begin()

    def _service(self, fault: faults.PlannedFault) -> None:
        """Lift the fault and give the node back, as a technician would."""
        done = faults.lift(fault, self.cluster)
        if done is None:
            return
        self.client.post(f"/nodes/{fault.node.agent_id}/release")
        self.say(f"serviced: {done} and may be used again")

    def poll(self) -> None:
        """Take in the job, its incidents and actions; say what is new."""
        self.job = self.client.get(f"/jobs/{self.job_id}")
        loss = self.job["evaluation_loss"]
        if loss is not None:
            if self.report.losses["first"] is None:
                self.report.losses["first"] = loss
            self.report.losses["last"] = loss
        for incident in reversed(self.client.items("/incidents", job=self.job_id)):
            if incident["id"] not in self._incidents:
                self.say(f"found: {incident['summary']}")
                for item in incident["evidence"][:3]:
                    self.say(f"       - {item['text']}")
                if not self._at_fault:
                    self._healthy_findings.add(incident["id"])
            self._incidents[incident["id"]] = incident
        for action in reversed(self.client.items("/actions", job=self.job_id)):
            self._show_action(action)
        self.report.findings_while_healthy = len(self._healthy_findings - self._blamed)
        self.report.ledger = self.job["ledger"]
        self.report.restarts = self.job["restarts"]
        self.progress(self._line())

    def _show_action(self, action: dict[str, Any]) -> None:
        if action["state"] == "proposed" and action["kind"] != "start":
            since = self._proposed.setdefault(action["id"], time.monotonic())
            if self._first(action["id"], "proposed", ""):
                self.say(f"proposed: {action['reason']}")
                self.say(f"          paceline actions approve {action['id']}")
            seen = time.monotonic() - since >= APPROVAL_SECONDS
            if self.approve and seen and self._first(action["id"], "approved", ""):
                self.client.post(f"/actions/{action['id']}/approve")
                self.say("approved by the demo")
            return
        for phase in action["phases"]:
            if self._first(action["id"], phase["name"], phase["started_at"]):
                self.say(f"{action['kind']}: {phase['name']}: {phase['detail']}".rstrip(": "))

    def _first(self, *what: str) -> bool:
        key = (what[0], what[1], what[2])
        if key in self._phases_said:
            return False
        self._phases_said.add(key)
        return True

    def _line(self) -> str:
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
        return "  ".join(parts)

    def _ranks(self) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{self.job_id}/ranks")

    def _trains(self) -> bool:
        return self.job["state"] == "running" and self.job["step"] is not None

    def _warm(self) -> bool:
        """The current generation has steps enough, since the last fault, to compare with."""
        if (
            self.job["state"] != "running"
            or (self.job["step"] or 0) < self._steady_from + WARM_STEPS
        ):
            return False
        steps = self.client.get(f"/jobs/{self.job_id}/steps", limit=WARM_STEPS)["items"]
        return len(steps) == WARM_STEPS and all(
            step["generation"] == self.job["generation"] for step in steps
        )

    def _until(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if condition():
                return
            if self.job["state"] in ("failed", "stopped") and not self._at_fault:
                raise ScenarioError(
                    f"the job is {self.job['state']}: {self.job['verdict']['text']}"
                )
            if time.monotonic() > deadline:
                raise ScenarioError(otherwise)
            time.sleep(POLL_SECONDS)
