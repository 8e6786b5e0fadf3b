"""Runs the plain trainers of the foreign arm on an emulated cluster of two nodes and returns what
Paceline reports about them.

    python -m tests.lab.trainers.jobs [TRAINER ...]

prints, for each trainer and fault, the incident and the seconds from the fault to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from paceline_cli.client import Client
from paceline_demo.cluster import Cluster, free_port
from paceline_evaluation.foreign.cluster import TRAINERS
from tests.lab.trainers.expected import CASES, FAULTY_RANK, ONSET, Case

WITH_LINES = Path(__file__).with_name("with_lines.py")
UNCHANGED = TRAINERS / "train.py"
# A step takes about 40 ms, most of it a sleep, so that four ranks fit on two cores.
ARGUMENTS = (
    "--width",
    "128",
    "--batch",
    "32",
    "--bucket-mb",
    "0.2",
    "--accelerator-seconds",
    "0.03",
)
# Less compute and longer sleeps: without its slow rank the job competes for the CPUs as with it.
UNCONTENDED = (
    "--width",
    "32",
    "--batch",
    "8",
    "--bucket-mb",
    "0.2",
    "--accelerator-seconds",
    "0.1",
)
# In a pipeline, the later stage sleeps while it waits for its first microbatch: a short one.
UNCONTENDED_STAGES = (*UNCONTENDED[:-1], "0.02")
EVERYDAY = ("--evaluate-every", "200", "--checkpoint-every", "250", "--collect-every", "97")
FAULT_SECONDS = 0.03
SIZES = {
    "fsdp2_tp": {"dp": 2, "pp": 1, "tp": 2},
    "gpipe": {"dp": 2, "pp": 2, "tp": 1},
    "1f1b": {"dp": 2, "pp": 2, "tp": 1},
}
START_SECONDS = 120.0
DETECTION_SECONDS = 30.0
STACKS_SECONDS = 5.0  # the line of the script arrives after the first report


@dataclass
class Outcome:
    """The reports about one job."""

    job: dict[str, Any]
    incidents: list[dict[str, Any]] = field(default_factory=list)  # warnings and worse
    incident: dict[str, Any] | None = None  # the expected one
    seconds: float | None = None  # time from the fault to its report


class TrainingCluster:
    """A server and two agents on which jobs run one after another."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client = cluster, client

    @staticmethod
    @contextlib.contextmanager
    def running() -> Iterator[TrainingCluster]:
        cluster = Cluster(node_count=2, port=0)
        try:
            cluster.start()
            with Client(cluster.url) as client:
                yield TrainingCluster(cluster, client)
        finally:
            cluster.close()
            cluster.remove_logs()

    # Jobs

    def _command(
        self,
        trainer: str,
        fault: str,
        script: Path,
        options: tuple[str, ...] = ARGUMENTS,
        onset: int = ONSET,
    ) -> list[str]:
        """Return script and arguments; what the fault does is written to the file of orders."""
        order = {"fault": fault, "rank": FAULTY_RANK, "after_step": onset, "seconds": FAULT_SECONDS}
        self.orders.write_text(json.dumps([order]))
        command = [str(script), "--trainer", trainer, *options]
        if fault == "healthy":
            command += EVERYDAY
        return command + ["--pairs"] * (fault == "skip_subgroup")

    @property
    def orders(self) -> Path:
        return self.cluster.directory / "orders.json"

    def start(
        self,
        trainer: str,
        fault: str,
        script: Path = UNCHANGED,
        options: tuple[str, ...] = ARGUMENTS,
        onset: int = ONSET,
    ) -> str:
        """Start a job through the server; return its id."""
        job = {
            "name": f"{trainer}-{fault}",
            "argv": [sys.executable, *self._command(trainer, fault, script, options, onset)],
            "topology": SIZES.get(trainer, {"dp": 4, "pp": 1, "tp": 1}),
            "mode": "observe",
            "environment": {"ORDERS": str(self.orders)},
        }
        return str(self.client.post("/jobs", job)["id"])

    @contextlib.contextmanager
    def torchrun(self, trainer: str, fault: str) -> Iterator[str]:
        """Start the job with torchrun on both nodes, without the server; yield its id."""
        name, port = f"external-{trainer}-{fault}", free_port(0)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "2", "--master-addr", "127.0.0.1"),
            *("--master-port", str(port)),
        ]
        script = self._command(trainer, fault, WITH_LINES)
        nodes = [
            subprocess.Popen(
                [*command, "--node-rank", str(node.number), *script],
                env={
                    **self.cluster.environment(),
                    "PACELINE_RING_DIRECTORY": str(node.directory / "rings"),
                    "PACELINE_JOB": name,
                    "ORDERS": str(self.orders),
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for node in self.cluster.nodes
        ]
        try:
            yield name
        finally:
            for process in nodes:
                process.terminate()
            for process in nodes:
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:  # a rank is stopped or holds the GIL
                    process.kill()
                    process.wait()

    def job(self, job_id: str) -> dict[str, Any] | None:
        with contextlib.suppress(click.ClickException):
            found: dict[str, Any] = self.client.get(f"/jobs/{job_id}")
            return found
        return None

    def stop(self, job_id: str) -> None:
        with contextlib.suppress(click.ClickException):  # it has ended already
            self.client.post(f"/jobs/{job_id}/stop")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            job = self.job(job_id)
            if job is None or job["state"] in ("failed", "finished", "stopped"):
                return
            time.sleep(0.2)

    # Reports

    def watch(self, job_id: str, case: Case, seconds: float = DETECTION_SECONDS) -> Outcome:
        """Return once the expected incident names its line, or after `seconds` with the fault."""
        outcome = Outcome(self._wait_for_onset(job_id))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.2)
            outcome.incidents = [
                self.client.get(f"/incidents/{incident['id']}")
                for incident in self.client.items("/incidents", job=job_id)
                if incident["severity"] != "info"
            ]
            found = [one for one in outcome.incidents if one["kind"] == case.kind]
            if found and outcome.incident is None:
                deadline = min(deadline, time.monotonic() + STACKS_SECONDS)
            outcome.incident = found[0] if found else None
            if outcome.incident is not None and case.is_named(outcome.incident):
                break
        outcome.job = self.job(job_id) or outcome.job
        if outcome.incident is not None:
            outcome.seconds = self._seconds_since_onset(job_id, outcome.incident)
        return outcome

    def _wait_for_onset(self, job_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            job = self.job(job_id)
            if job is not None and (job["step"] or 0) >= ONSET:
                return job
            time.sleep(0.2)
        raise AssertionError(f"{job_id} did not reach step {ONSET}: {self.job(job_id)}")

    def steps(self, job_id: str) -> list[dict[str, Any]]:
        return self.client.items(f"/jobs/{job_id}/steps")

    def _seconds_since_onset(self, job_id: str, incident: dict[str, Any]) -> float | None:
        for step in self.steps(job_id):
            if step["step"] == ONSET:
                began = datetime.fromisoformat(step["started_at"]).timestamp()
                detected = datetime.fromisoformat(incident["detected_at"]).timestamp()
                return detected - began - float(step["duration_seconds"])
        return None

    def step_seconds(self, job_id: str, first: int, last: int) -> float:
        """Return the median duration of these steps."""
        return statistics.median(
            step["duration_seconds"] for step in self.steps(job_id) if first <= step["step"] <= last
        )

    def run(self, case: Case, script: Path = UNCHANGED) -> Outcome:
        job_id = self.start(case.trainer, case.fault, script)
        try:
            return self.watch(job_id, case)
        finally:
            self.stop(job_id)


def main(trainers: list[str]) -> None:
    print("| trainer | fault | rank | side | seconds | verdict |")
    print("|---|---|---|---|---|---|")
    script = WITH_LINES if os.environ.get("WITH_LINES") else UNCHANGED
    right = 0
    cases = [case for case in CASES if not trainers or case.trainer in trainers]
    with TrainingCluster.running() as cluster:
        for case in cases:
            outcome = cluster.run(case, script)
            incident = outcome.incident or {}
            is_right = bool(incident) and case.is_named(incident)
            right += is_right
            seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
            print(
                f"| {case.trainer} | {case.fault} | {incident.get('rank')} "
                f"| {incident.get('side') or ''} | {seconds} "
                f"| {'' if is_right else '**wrong** '}{incident.get('summary')} |",
                flush=True,
            )
    print(f"\n{right} of {len(cases)} right; the faulty rank is {FAULTY_RANK}.")


if __name__ == "__main__":
    main(sys.argv[1:])
