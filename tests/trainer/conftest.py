"""A pool of rank processes that run one job after another, because importing torch is slow."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline_trainer.settings import ModelSettings, RankPlacement, TrainerSettings
from paceline_trainer.train import TrainingResult
from paceline_wire.topology import Topology

WORKER = Path(__file__).with_name("worker.py")
MEMBERS = 8
TINY = TrainerSettings(
    model=ModelSettings(layers=2, width=16, heads=2, sequence_length=16),
    dtype="float64",
    steps=20,
    global_batch_size=8,
    microbatch_size=1,
    learning_rate=1e-2,
    gradient_clip=0.8,
    evaluate_every=10,
    timeout_seconds=60.0,
)


@dataclass(frozen=True)
class Member:
    orders: BinaryIO
    answers: BinaryIO


class Run:
    """A job that runs on some members of the rank pool."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members

    def outcomes(self) -> list[TrainingResult]:
        """Return one outcome per rank; fail the test with the rank's traceback if it raised."""
        answers = [pickle.load(member.answers) for member in self._members]
        for answer in answers:
            assert isinstance(answer, TrainingResult), answer
        return answers

    def failures(self) -> list[str]:
        """Return the traceback of each rank."""
        answers = [pickle.load(member.answers) for member in self._members]
        for answer in answers:
            assert isinstance(answer, str), answer
        return answers


class RankPool:
    """A pool of eight processes; a run uses as many as it has ranks, starting with `first`."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = 0
        self.members: list[Member] = []
        theirs: list[tuple[int, int]] = []
        for _ in range(MEMBERS):
            (orders_out, orders_in), (answers_out, answers_in) = os.pipe(), os.pipe()
            theirs.append((orders_out, answers_in))
            self.members.append(Member(os.fdopen(orders_in, "wb"), os.fdopen(answers_out, "rb")))
        self._process = subprocess.Popen(
            [sys.executable, WORKER, str(self._store.port), *(f"{i},{o}" for i, o in theirs)],
            pass_fds=[descriptor for pair in theirs for descriptor in pair],
            start_new_session=True,
        )
        for descriptor in (descriptor for pair in theirs for descriptor in pair):
            os.close(descriptor)

    def start(
        self,
        settings: TrainerSettings | Sequence[TrainerSettings],  # one for all, or one per rank
        topology: Topology,
        *,
        first: int = 0,
        generation: int = 0,
    ) -> Run:
        members = self.members[first : first + topology.world_size]
        self._runs += 1
        for rank, member in enumerate(members):
            place = RankPlacement(rank=rank, topology=topology, generation=generation)
            own = settings if isinstance(settings, TrainerSettings) else settings[rank]
            pickle.dump((f"run-{self._runs}", own, place), member.orders)
            member.orders.flush()
        return Run(members)

    def run(
        self, settings: TrainerSettings, topology: Topology, *, generation: int = 0
    ) -> TrainingResult:
        """Run a job; check that all ranks have the same outcome, and return it."""
        outcomes = self.start(settings, topology, generation=generation).outcomes()
        assert all(outcome == outcomes[0] for outcome in outcomes)
        return outcomes[0]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for member in self.members:
            member.orders.close()
            member.answers.close()


@pytest.fixture(scope="session", autouse=True)
def _gloo_on_loopback() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        yield


@pytest.fixture(scope="session")
def ranks_pool(_gloo_on_loopback: None) -> Iterator[RankPool]:
    ranks_pool = RankPool()
    yield ranks_pool
    ranks_pool.close()


@pytest.fixture(scope="session")
def tiny_settings() -> TrainerSettings:
    """Return the settings of a very small run."""
    return TINY
