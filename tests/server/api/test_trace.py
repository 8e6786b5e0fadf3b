"""A job's last steps as a trace: from what the agents sent, through a running server, analysed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from simulated_job import JOB, SimulatedJob
from sqlalchemy import delete, select

from paceline_cli.main import main
from paceline_server.decide.types import JobSpec, Policy
from paceline_server.engine.engine import Engine
from paceline_server.steps.types import Ledger, StepSummary
from paceline_server.store.log import append
from paceline_server.store.models import Boot, Generation, HotLog, Job, Step
from paceline_wire.batch import encode
from paceline_wire.topology import Topology

TOPOLOGY = Topology(2, 2, 2)
SLOW_RANK = 5
STEPS = 12


class Recorded:
    """A server that holds what the agents of a simulated job sent. Nobody works on the job."""

    def __init__(self, server: Any, steps: int = STEPS) -> None:
        self.server = server
        self.job = SimulatedJob(TOPOLOGY, engine=Engine(JOB), microbatches=4, jitter=0.02)
        self.job.faults.slow = {SLOW_RANK: 1.5}
        placement = self.job.placement()
        with server.program.database.write() as session:
            session.add(self._job_row(placement.started_ns))
            session.flush()
            session.add(
                Generation(job_id=JOB, generation=0, cursor=0, placement=placement, restarted=None)
            )
            for node in self.job.nodes:
                session.add(Boot(agent_id=node, boot_id="boot", first_seen_ns=0))
            for step in range(steps):
                self._play(session, step)

    def _play(self, session: Any, step: int) -> None:
        began_ns = self.job.now_ns
        rows = self.job.play()
        for batch in self.job.batches(rows):
            append(session, batch, encode(batch), self.job.now_ns + 100_000_000)
        seconds = (self.job.now_ns - began_ns) / 1e9
        summary = StepSummary(
            generation=0, step=step, started_ns=began_ns, duration_seconds=seconds
        )
        session.add(Step(job_id=JOB, step=step, generation=0, summary=summary))

    def _job_row(self, created_ns: int) -> Job:
        spec = JobSpec(name="simulated", argv=["train"], topology=TOPOLOGY)
        return Job(
            id=JOB,
            name="simulated",
            spec=spec,
            policy=Policy(),
            state="running",
            generation=0,
            topology=TOPOLOGY,
            created_ns=created_ns,
            stop_requested=False,
            cursor=0,
            ledger=Ledger(),
        )

    def paceline(self, command: str, *arguments: str) -> Result:
        return CliRunner().invoke(main, [command, "--server", self.server.url, *arguments])


@pytest.fixture
def recorded(run_server: Callable[..., Any]) -> Recorded:
    return Recorded(run_server(role="api"))


def test_the_trace_holds_the_operations_of_the_last_steps(recorded: Recorded) -> None:
    answer = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace", params={"steps": 3})
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    assert json.loads(answer.headers["Paceline-Sizes"])["world_size"] == 8
    table = pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pydict()
    assert set(table["step"]) == {STEPS - 3, STEPS - 2, STEPS - 1}
    forwards = [
        row
        for row in zip(table["optype"], table["step"], table["rank"], table["mb_id"], strict=True)
        if row[:2] == ("forward-compute", STEPS - 1)
    ]
    # One per worker and microbatch: a worker is written down under the lowest of its tp ranks.
    assert len(forwards) == len(set(forwards)) == 2 * 2 * 4
    assert {row[2] for row in forwards} == {0, 2, 4, 6}


def test_a_running_job_is_analysed_by_its_id(recorded: Recorded) -> None:
    shown = recorded.paceline("analyze", JOB, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["verdict"]["kind"] == "slow_worker"
    assert found["verdict"]["target"] == "rank 4"  # with rank 5 one worker: its tp peer
    assert found["slowdown"] > 1.1
    assert len(found["slowdown_by_step"]) == 8
    assert found["launch_slowdown"] == pytest.approx(1.0, abs=0.01)


def test_an_export_says_the_same(recorded: Recorded, tmp_path: Path) -> None:
    written = recorded.paceline("jobs", "export", JOB, "-o", str(tmp_path / "trace.parquet"))
    assert written.exit_code == 0, written.output
    by_file = CliRunner().invoke(
        main,
        ["analyze", str(tmp_path / "trace.parquet"), "--json", "--meta", f"{tmp_path}/trace.yaml"],
    )
    assert by_file.exit_code == 0, by_file.output
    assert by_file.stdout == recorded.paceline("analyze", JOB, "--json").stdout


def test_a_job_that_did_no_step_has_no_trace(run_server: Callable[..., Any]) -> None:
    recorded = Recorded(run_server(role="api"), steps=0)
    answer = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace")
    assert answer.status_code == 409
    assert "No step" in answer.json()["detail"]
    shown = recorded.paceline("analyze", JOB)
    assert shown.exit_code == 1
    assert "No step of the current generation is finished yet." in shown.output


def test_a_job_that_is_not_there_is_told(recorded: Recorded) -> None:
    assert recorded.server.client.get("/api/v1/jobs/nope/trace").status_code == 404
    assert "There is no job 'nope'" in recorded.paceline("analyze", "nope").output


def test_what_was_pruned_is_told(recorded: Recorded) -> None:
    with recorded.server.program.database.write() as session:
        session.execute(delete(HotLog))
    answer = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace")
    assert answer.status_code == 409
    assert "too little" in answer.json()["detail"]


def test_a_damaged_batch_costs_no_more_than_itself(recorded: Recorded) -> None:
    with recorded.server.program.database.write() as session:
        last = session.scalars(select(HotLog).order_by(HotLog.id.desc()).limit(1)).one()
        last.payload = b"no batch"
    assert recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace").status_code == 200
