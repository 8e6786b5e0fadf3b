"""Jobs that do not start because a rank has not called `init_process_group`."""

import pytest
from simulated_job import JOB, WORLD, SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_wire.batch import RankDefined, RankStackTraces, RankState
from paceline_wire.ring import Frame
from paceline_wire.spans import Op
from paceline_wire.stacks import StackFrame, ThreadStack

STORE_TIMEOUT = "torch.distributed.DistStoreError: wait timeout after 60000ms, keys: /0//cpu//0/2"


class StartingJob:
    """Eight ranks that start: all of them load, until a test sets another status."""

    def __init__(self) -> None:
        self.job = SimulatedJob(seed=1)  # a start may take 120 s
        self.states: dict[int, RankState] = {}
        self.set("loading", *self.job.ranks)

    def set(self, status: str, *ranks: int, frames: list[Frame] | None = None) -> None:
        for rank in ranks:
            self.states[rank] = self.job.state(
                rank, frames=frames or [], groups=[], status=status, loss=None, head=0
            )

    def wait(self, seconds: float) -> list[Finding]:
        outcomes = self.job.wait(seconds, self.states)
        return [finding for outcome in outcomes for finding in outcome.findings]

    def define_groups(self) -> None:
        for rank in self.job.ranks:
            event = RankDefined(
                time_ns=self.job.now_ns,
                job=JOB,
                generation=0,
                rank=rank,
                definitions=self.job.definitions(rank),
            )
            batch = self.job.batch(self.job.node(rank), events=[event])
            self.job.engine.feed(batch, self.job.now_ns)

    def stacks(self, rank: int) -> list[Finding]:
        frames = [StackFrame("load_vocabulary", "train.py", 17)]
        event = RankStackTraces(
            time_ns=self.job.now_ns,
            job=JOB,
            generation=0,
            rank=rank,
            pid=1,
            threads=[ThreadStack("MainThread", frames, holds_gil=False, is_running=False)],
        )
        batch = self.job.batch(self.job.node(rank), events=[event])
        self.job.engine.feed(batch, self.job.now_ns)
        return self.wait(0.5)


@pytest.fixture
def start() -> StartingJob:
    return StartingJob()


def all_but(start: StartingJob, *late: int) -> list[int]:
    return [rank for rank in start.job.ranks if rank not in late]


def test_a_rank_that_the_others_wait_for_is_a_warning_with_its_line(start: StartingJob) -> None:
    start.set("joining", *all_but(start, 2))
    assert start.wait(60) == []
    [found] = start.wait(1)
    assert (found.kind, found.severity, found.rank) == ("hang", "warning", 2)
    assert found.cause == "stuck before init_process_group"
    assert found.summary == (
        "Rank 2 (node-1) is stuck before init_process_group: 7 ranks have waited for it for 60 s."
    )
    assert found.stacks_wanted == [2, 0]
    assert not found.dumps_wanted
    [located] = start.stacks(2)
    assert "init_process_group (train.py:17 load_vocabulary): 7 ranks" in located.summary
    assert start.wait(30) == []


def test_it_is_a_hang_once_a_start_may_not_take_longer(start: StartingJob) -> None:
    start.set("joining", *all_but(start, 2))
    start.wait(61)
    start.stacks(2)
    [found] = start.wait(60)
    assert (found.severity, found.rank) == ("critical", 2)
    assert found.summary == (
        "Rank 2 (node-1) is stuck before init_process_group (train.py:17 load_vocabulary): "
        "7 ranks have waited for it for 120 s."
    )


def test_it_is_over_when_the_rank_arrives(start: StartingJob) -> None:
    start.set("joining", *all_but(start, 2))
    start.wait(61)
    start.set("joining", 2)
    [found] = start.wait(0.5)
    assert found.cleared
    start.set("starting", *start.job.ranks)
    assert start.wait(60) == []


def test_several_late_ranks_are_named_together(start: StartingJob) -> None:
    start.set("joining", *all_but(start, 4, 5))
    [found] = start.wait(61)
    assert (found.rank, found.ranks) == (None, [4, 5])
    assert found.summary.startswith("Ranks 4, 5 are stuck before init_process_group: 6 ranks have")
    start.stacks(4)
    [located] = start.stacks(5)
    assert located.summary.startswith(
        "Ranks 4, 5 are stuck before init_process_group (train.py:17 load_vocabulary): 6 ranks"
    )


def test_ranks_that_load_equally_long_are_no_problem(start: StartingJob) -> None:
    assert start.wait(100) == []
    start.set("joining", *start.job.ranks)
    assert start.wait(20) == []
    start.set("starting", *start.job.ranks)
    assert start.wait(60) == []


def test_ranks_that_arrive_one_after_the_other_are_no_problem(start: StartingJob) -> None:
    for rank in start.job.ranks:
        start.set("joining", rank)
        assert start.wait(20) == []
    start.set("starting", *start.job.ranks)
    assert start.wait(60) == []


def test_a_rank_that_does_not_take_part_in_what_others_wait_for_is_not_blamed(
    start: StartingJob,
) -> None:
    """A process that the launcher started may have no part in the training."""
    start.set("starting", *all_but(start, 7))
    assert start.wait(100) == []


def test_a_first_collective_also_waits_for_a_late_rank(start: StartingJob) -> None:
    """NCCL connects in the first communication, not in `init_process_group`."""
    start.define_groups()
    frame = Frame(Op.BROADCAST, start.job.now_ns - start.job.offset_ns(0), WORLD, None, 1)
    start.set("starting", *all_but(start, 2), frames=[frame])
    assert start.wait(60) == []
    [found] = start.wait(1)
    assert (found.severity, found.rank) == ("warning", 2)


def test_a_call_that_returns_on_no_rank_is_reported_later(start: StartingJob) -> None:
    start.set("joining", *start.job.ranks)
    assert start.wait(119) == []
    [found] = start.wait(2)
    assert (found.rank, found.cause) == (None, "stuck in init_process_group")
    assert found.summary == (
        "The job is stuck in init_process_group: all 8 ranks have called it, and it has not "
        "returned for 120 s."
    )


def test_a_timeout_of_the_call_names_the_missing_rank(start: StartingJob) -> None:
    start.set("joining", *all_but(start, 2))
    start.wait(40)
    start.set("failed", 0, 1, 3)
    start.wait(0.5)
    for rank in (0, 1, 3):
        start.job.exit(rank, exit_code=1, log_tail=STORE_TIMEOUT)
    for rank in (2, 4, 5, 6, 7):
        start.job.exit(rank, exit_code=None)
    found = start.wait(5)[-1]
    assert (found.kind, found.rank, found.node) == ("failure", 2, "node-1")
    assert found.summary == (
        "Rank 2 (node-1) had not called init_process_group; ranks 0, 1, 3-7 waited there for up "
        f"to 41 s. Rank 0 (node-0) exited with code 1: {STORE_TIMEOUT}."
    )


def test_an_error_of_its_own_in_the_call_is_no_fault_of_a_late_rank(start: StartingJob) -> None:
    start.set("joining", *all_but(start, 2))
    start.wait(5)
    start.set("failed", 0)
    start.wait(0.5)
    start.job.exit(0, exit_code=1, log_tail="ValueError: no backend of this name")
    found = start.wait(5)[-1]
    assert found.rank == 0
