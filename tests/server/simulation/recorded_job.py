"""A job whose batches a server has stored without a worker that processes them."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result
from simulated_job import JOB, SimulatedJob

from paceline_cli.main import main
from paceline_server.decide.types import JobSpec
from paceline_server.engine.engine import Engine
from paceline_server.policy import Policy
from paceline_server.steps.types import Ledger, StepSummary
from paceline_server.store.log import append
from paceline_server.store.models import BootRow, GenerationRow, JobRow, StepRow
from paceline_wire.batch import encode
from paceline_wire.topology import Topology

TOPOLOGY = Topology(2, 2, 2)
SLOW_RANK = 5
STEPS = 12


class Recorded:
    """A server with the batches of a simulated job in which one rank is slow."""

    def __init__(self, server: Any, steps: int = STEPS) -> None:
        self.server = server
        self.job = SimulatedJob(TOPOLOGY, engine=Engine(JOB), microbatches=4, jitter=0.02)
        self.job.faults.slow = {SLOW_RANK: 1.5}
        placement = self.job.placement()
        with server.program.database.write() as session:
            session.add(self._job_row(placement.started_ns))
            session.flush()
            session.add(
                GenerationRow(
                    job_id=JOB, generation=0, cursor=0, placement=placement, restarted=None
                )
            )
            for node in self.job.nodes:
                session.add(BootRow(agent_id=node, boot_id="boot", first_seen_ns=0))
            for step in range(steps):
                self._play(session, step)

    def play(self, step: int) -> None:
        with self.server.program.database.write() as session:
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
        session.add(StepRow(job_id=JOB, step=step, generation=0, summary=summary))

    def _job_row(self, created_ns: int) -> JobRow:
        spec = JobSpec(name="simulated", argv=["train"], topology=TOPOLOGY)
        return JobRow(
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
