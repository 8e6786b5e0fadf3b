"""Ranks that may work in code that records nothing, as an evaluation does, are no hang at first."""

from __future__ import annotations

import msgspec
import pytest
from simulated_job import JOB, TP, SimulatedJob
from stuck_job import StuckJob, make_all_wait_for, resume

from paceline_server.detect.finding import Finding
from paceline_wire.batch import RankStackTraces, Sample
from paceline_wire.metric_names import (
    RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL as RUN_QUEUE_WAIT,
)
from paceline_wire.spans import Op
from paceline_wire.stacks import StackFrame, ThreadStack

CULPRIT = 2


def wait(stuck: StuckJob, seconds: float, cpu_share: float) -> list[Finding]:
    """Let time pass while the culprit uses this share of a CPU."""
    found = []
    for _ in range(round(2 * seconds)):
        state = stuck.states[CULPRIT]
        used = (state.cpu_seconds or 0.0) + 0.5 * cpu_share
        stuck.states[CULPRIT] = msgspec.structs.replace(state, cpu_seconds=used)
        found += stuck.wait(0.5)
    return found


def read_stack(stuck: StuckJob, rank: int, gil_holder: str = "MainThread") -> RankStackTraces:
    frames = [StackFrame(function="score", file="train.py", line=7)]
    names = dict.fromkeys(("MainThread", gil_holder))
    threads = [ThreadStack(name, frames, name == gil_holder, is_running=True) for name in names]
    return RankStackTraces(
        time_ns=stuck.job.now_ns,
        job="job-simulated",
        generation=0,
        rank=rank,
        pid=9,
        threads=threads,
    )


@pytest.fixture
def working() -> StuckJob:
    """A job in which all others wait for a rank that runs the script's own code."""
    stuck = StuckJob()
    make_all_wait_for(stuck, CULPRIT)
    stuck.inside(CULPRIT, Op.STEP)
    return stuck


def test_a_rank_that_uses_a_cpu_is_hung_only_after_two_minutes(working: StuckJob) -> None:
    [found] = wait(working, 3, 0.9)
    assert (found.kind, found.severity, found.rank) == ("hang", "info", CULPRIT)
    working.job.engine.feed(
        working.job.batch("node-1", events=[read_stack(working, CULPRIT)]), working.job.now_ns
    )
    [found] = wait(working, 1, 0.9)
    assert found.summary == (
        "Rank 2 (node-1) keeps the job waiting (between operations, train.py:7 score), as in an "
        "evaluation. After 120 s it counts as hung."
    )
    assert "hang_busy_seconds" in (found.advice or "")
    assert wait(working, 114, 0.9) == []
    [found] = wait(working, 4, 0.9)
    assert (found.severity, found.advice) == ("critical", None)
    assert found.summary == (
        "Rank 2 (node-1) is hung and blocks the job: it is stuck in host code (between "
        "operations, train.py:7 score)."
    )
    assert found.evidence[0].text.startswith("no rank has made progress for 120")


def test_a_thread_that_keeps_the_gil_for_a_while_is_named(working: StuckJob) -> None:
    wait(working, 3, 0.9)
    stack = read_stack(working, CULPRIT, gil_holder="tokenizer")
    working.job.engine.feed(working.job.batch("node-1", events=[stack]), working.job.now_ns)
    [found] = wait(working, 1, 0.9)
    assert (found.severity, found.summary) == (
        "info",
        "Rank 2 (node-1) keeps the job waiting: its thread tokenizer holds the GIL (train.py:7 "
        "score). After 120 s it counts as hung.",
    )


def test_a_rank_that_sleeps_in_the_scripts_own_code_is_hung_after_a_minute(
    working: StuckJob,
) -> None:
    [found] = wait(working, 3, 0.1)
    assert (found.severity, found.rank) == ("info", CULPRIT)
    assert found.summary.endswith("After 60 s it counts as hung.")
    assert wait(working, 56, 0.1) == []
    [found] = wait(working, 2, 0.1)
    assert (found.severity, found.rank) == ("critical", CULPRIT)


def test_a_rank_that_sleeps_in_an_operation_is_hung_within_seconds() -> None:
    stuck = StuckJob()
    make_all_wait_for(stuck, CULPRIT)
    [found] = wait(stuck, 3, 0.1)
    assert (found.severity, found.rank) == ("critical", CULPRIT)


def test_a_rank_that_begins_to_work_has_two_minutes(working: StuckJob) -> None:
    wait(working, 5, 0.1)
    [found] = wait(working, 14, 0.9)
    assert (found.severity, found.rank) == ("info", CULPRIT)
    assert found.summary.endswith("After 120 s it counts as hung.")
    assert wait(working, 90, 0.9) == []


def test_a_rank_that_stops_while_it_works_is_hung_within_seconds(working: StuckJob) -> None:
    [found] = wait(working, 3, 0.9)
    state = working.states[CULPRIT]
    working.states[CULPRIT] = msgspec.structs.replace(state, process_state="T")
    [found] = working.wait(2)
    assert (found.severity, found.cause) == ("critical", "process stopped (SIGSTOP)")


def test_a_pause_of_all_ranks_is_a_hang_after_two_minutes() -> None:
    stuck = StuckJob()
    for rank in stuck.job.ranks:
        stuck.inside(rank, Op.STEP)
    assert stuck.wait(19) == []
    [found] = stuck.wait(2)
    assert found.severity == "info"
    assert found.summary == (
        "The job pauses on all ranks (between operations), as in an evaluation. "
        "After 120 s it counts as hung."
    )
    assert stuck.wait(97) == []
    [found] = stuck.wait(4)
    assert found.severity == "critical"
    [found] = resume(stuck)
    assert found.cleared


def test_a_long_pause_that_ended_is_not_reported_again() -> None:
    stuck = StuckJob()
    for seconds, reports in ((40, 2), (40, 0), (70, 0)):
        for rank in stuck.job.ranks:
            stuck.inside(rank, Op.STEP)
        assert len(stuck.wait(seconds) + resume(stuck)) == reports


def test_pauses_of_a_job_with_long_steps_may_be_longer() -> None:
    job = SimulatedJob(forward_seconds=1.5, backward_seconds=3.0, seed=1)  # steps of 40 s
    stuck = StuckJob(job=job)
    for rank in job.ranks:
        stuck.inside(rank, Op.STEP)
    assert stuck.wait(115) == []
    [found] = stuck.wait(15)
    assert found.severity == "info"
    assert stuck.wait(100) == []
    [found] = stuck.wait(30)
    assert found.severity == "critical"


def test_a_rank_that_is_killed_while_another_works_follows_no_hang(working: StuckJob) -> None:
    wait(working, 3, 0.9)
    working.job.exit(5, signal=9)
    working.job.wait(3.0, working.states)
    [failure] = [found for found in working.job.findings if found.kind == "failure"]
    assert failure.follows is None


def test_a_rank_that_works_until_the_collective_of_the_others_times_out_is_hung(
    working: StuckJob,
) -> None:
    wait(working, 3, 0.1)
    stack = read_stack(working, CULPRIT)
    working.job.engine.feed(working.job.batch("node-1", events=[stack]), working.job.now_ns)
    wait(working, 1, 0.1)
    for rank in (4, 5):  # to fail is no progress of the job
        working.states[rank] = working.job.state(rank, head=9_000_000, status="failed")
    assert wait(working, 1, 0.1) == []
    timeout = "RuntimeError: [gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
    for rank in (4, 5):
        working.job.exit(rank, exit_code=1, log_tail=timeout)
    hang, failure = wait(working, 5, 0.1)
    assert (hang.kind, hang.severity, hang.rank) == ("hang", "critical", CULPRIT)
    assert hang.summary == (
        "Rank 2 (node-1) is hung and blocks the job: it is stuck in host code (between "
        "operations, train.py:7 score)."
    )
    assert hang.evidence[-1].text == "ranks 4, 5 ended because a collective timed out"
    assert (failure.kind, failure.follows) == ("failure", "hang")


def test_a_rank_that_works_while_another_fails_by_itself_is_not_hung(working: StuckJob) -> None:
    wait(working, 3, 0.1)
    working.job.exit(5, exit_code=1, log_tail="ValueError: no such token")
    [failure] = wait(working, 5, 0.1)
    assert (failure.kind, failure.rank, failure.follows) == ("failure", 5, None)


def fail(stuck: StuckJob) -> None:
    stuck.states[CULPRIT] = stuck.job.state(CULPRIT, head=9_000_000, status="failed")


def test_a_pause_that_ctrl_c_ends_has_lasted_to_the_end(working: StuckJob) -> None:
    wait(working, 3, 0.1)
    fail(working)
    assert wait(working, 1, 0.9) == []
    for rank in range(working.job.topology.world_size):
        working.job.exit(rank, exit_code=1, log_tail="KeyboardInterrupt")
    [failure] = wait(working, 5, 0.1)
    assert (failure.kind, failure.cause) == ("failure", "stopped on request")


def test_a_pause_that_an_error_of_the_rank_ends_is_over(working: StuckJob) -> None:
    wait(working, 3, 0.1)
    fail(working)
    assert wait(working, 1, 0.1) == []
    working.job.exit(CULPRIT, exit_code=1, log_tail="ValueError: no such token")
    found = {one.kind: one for one in wait(working, 5, 0.1)}
    assert (found["failure"].rank, found["failure"].follows) == (CULPRIT, None)
    assert found["hang"].cleared
    assert found["hang"].summary == "An error of a rank that kept the job waiting has ended it."


def test_a_rank_that_hangs_after_its_error_is_reported_for_that(working: StuckJob) -> None:
    wait(working, 3, 0.1)
    fail(working)
    pause, hang = wait(working, 40, 0.1)
    assert (pause.cleared, hang.cleared, hang.rank) == (True, False, CULPRIT)


def seconds_until_reported(share: float, *, all_entered: bool) -> float:
    """Return when a hang is reported on a host whose ranks wait for CPUs for this share."""
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    if all_entered:
        stuck.in_collective(2, TP)
    job = stuck.job
    for rank in job.ranks:
        labels = {"job": JOB, "rank": str(rank)}
        samples = [
            Sample(RUN_QUEUE_WAIT, labels, share * second, job.now_ns + (second - 40) * 10**9)
            for second in range(0, 41, 2)
        ]
        job.engine.feed(job.batch(job.node(rank), samples=samples), job.now_ns)
    return next(half / 2 for half in range(1, 60) if stuck.wait(0.5))


def test_a_transfer_whose_threads_wait_for_cpus_is_not_hung_after_three_seconds():
    """Two healthy ranks were in one for five seconds, at 56% of waiting."""
    assert seconds_until_reported(0.0, all_entered=True) <= 3.0
    assert seconds_until_reported(0.0, all_entered=False) <= 3.0
    assert 4.0 <= seconds_until_reported(0.56, all_entered=False) <= 7.0
    assert 10.0 <= seconds_until_reported(0.56, all_entered=True) <= 14.0
