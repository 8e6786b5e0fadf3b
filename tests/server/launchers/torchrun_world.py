"""Two nodes with torchrun and their agents, played on the rows of a real database.

The agents carry out commands as `end_ranks` does, torchrun starts the ranks again, and the worker
takes the new generation up.
"""

from __future__ import annotations

import itertools
import time

import msgspec
from committed_requests import CommittedRequests
from sqlalchemy import select, update

from paceline_server.engine.types import Launch, Placement
from paceline_server.launchers.torchrun import TorchrunLauncher
from paceline_server.store.commands import finish_command
from paceline_server.store.models import (
    AttachmentRow,
    CommandRow,
    GenerationRow,
    JobRow,
    RankRow,
)
from paceline_wire.batch import CommandResult
from paceline_wire.commands import EndRanks
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology

JOB = "torchrun-test"
PAIR = Topology(dp=2)


class TorchrunWorld:
    """Rank 0 on n0, rank 1 on n1; each start of a rank is a process of its own."""

    def __init__(
        self, requests: CommittedRequests, max_restarts: int = 1000, least_nodes: str | None = None
    ) -> None:
        self.requests = requests
        self.database = requests.database
        self.max_restarts, self.least_nodes = max_restarts, least_nodes
        self.shares_store = False
        self.generation = 0
        self.ended: list[int] = []  # processes that a command ended
        self.left: list[str] = []  # nodes whose torchrun was ended
        self.processes: dict[int, int] = {}  # rank -> start of its process
        self._clock = itertools.count(1)
        self.start()

    def metadata(self) -> dict[str, str]:
        found = {
            "torchrun_run": JOB,
            "torchrun_restarts": str(self.generation),
            "torchrun_max_restarts": str(self.max_restarts),
        }
        if self.shares_store:
            found["torchrun_shares_store"] = "1"
        return found | ({"torchrun_least_nodes": self.least_nodes} if self.least_nodes else {})

    def launch(self) -> Launch:
        found = TorchrunLauncher.recognize({"n0": self.metadata(), "n1": self.metadata()})
        assert found is not None
        return found

    def start(self) -> None:
        """Start both ranks, which are found and taken up at once."""
        self.processes = {rank: next(self._clock) for rank in range(2)}
        placement = Placement(
            generation=self.generation,
            topology=PAIR,
            nodes={0: "n0", 1: "n1"},
            gpus={0: None, 1: None},
            started_ns=time.time_ns(),
            launch=self.launch(),
        )
        with self.database.write() as session:
            session.execute(
                update(JobRow).where(JobRow.id == JOB).values(generation=self.generation)
            )
            session.add(
                GenerationRow(job_id=JOB, generation=self.generation, cursor=0, placement=placement)
            )
            for rank, started_ns in self.processes.items():
                identity = Identity(
                    job=JOB,
                    generation=self.generation,
                    rank=rank,
                    local_rank=0,
                    world_size=2,
                    topology=PAIR,
                    coordinates=Coordinates(),
                    pid=started_ns,
                    host=f"n{rank}",
                    clock_offset_ns=0,
                    started_ns=started_ns,
                    metadata=self.metadata(),
                )
                session.add(
                    AttachmentRow(
                        job_id=JOB,
                        generation=self.generation,
                        rank=rank,
                        agent_id=f"n{rank}",
                        started_ns=started_ns,
                        world_size=2,
                        received_ns=time.time_ns(),
                        placed=True,
                        identity=identity,
                    )
                )
                session.merge(
                    RankRow(
                        job_id=JOB,
                        rank=rank,
                        generation=self.generation,
                        agent_id=f"n{rank}",
                        local_rank=0,
                        state="running",
                        commanded=False,
                    )
                )

    def commands(self) -> list[EndRanks]:
        """Return all commands that were ever issued."""
        with self.database.read() as session:
            bodies = session.scalars(select(CommandRow.body).order_by(CommandRow.id))
            return [msgspec.json.decode(body, type=EndRanks) for body in bodies]

    def play(self) -> None:
        """Have the agents carry out what is unfinished; torchrun reacts to ended ranks."""
        with self.database.read() as session:
            query = select(CommandRow.agent_id, CommandRow.body)
            rows = session.execute(query.where(CommandRow.finished_ns.is_(None))).all()
        before = len(self.ended)
        for agent_id, body in rows:
            self.carry_out(agent_id, msgspec.json.decode(body, type=EndRanks))
        if len(self.ended) == before:
            return
        with self.database.write() as session:
            session.execute(update(RankRow).values(state="exited"))
        if self.generation < self.max_restarts:
            self.generation += 1
            self.start()

    def carry_out(self, agent_id: str, command: EndRanks) -> None:
        """End the processes of a command that still run, and send its result."""
        ended = [
            started_ns
            for rank, started_ns in command.started_ns.items()
            if self.processes.get(rank) == started_ns and command.generation == self.generation
        ]
        self.ended += ended
        self.left += [agent_id] if command.leave and ended else []
        result = CommandResult(time_ns=1, command_id=command.command_id, ok=bool(ended), detail="")
        with self.database.write() as session:
            finish_command(session, agent_id, result, time.time_ns())
