"""Exited ranks, lost nodes, lost GPUs and non-finite losses."""

import math
from typing import Any

import pytest
from msgspec.structs import replace
from simulated_job import DP, JOB, WORLD, SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_wire.batch import RankExited, Sample
from paceline_wire.ring import Frame, GroupProgress
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:4242"


NCCL_ERROR = """Traceback (most recent call last):
  File "train.py", line 90, in <module>
    loss.backward()
torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/\
ProcessGroupNCCL.cpp:3699, {what}, NCCL version 2.27.3
{kind}
Last error:
{last}
[rank5]:[W1125 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called
"""
NCCL_CUDA = NCCL_ERROR.format(
    what="unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    kind="ncclUnhandledCudaError: Call to CUDA function failed.",
    last="Cuda failure 214 'uncorrectable ECC error encountered'",
)
NCCL_REMOTE = NCCL_ERROR.format(
    what="remote process exited or there was a network error",
    kind="ncclRemoteError: A call failed possibly due to a network error.",
    last="socketProgressOpt: Call to recv from 10.0.0.7<41337> failed : Connection reset by peer",
)
NCCL_SHARED_MEMORY = NCCL_ERROR.format(
    what="unhandled system error (run with NCCL_DEBUG=INFO for details)",
    kind="ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
    last="Error while creating shared memory segment /dev/shm/nccl-jNvlgr (size 9637888)",
)
WATCHDOG = """[rank5]:[E1125 ProcessGroupNCCL.cpp:1595] [PG ID 0 Rank 5] Process group watchdog \
thread terminated with exception: {what}
terminate called after throwing an instance of 'c10::DistBackendError'
"""
WATCHDOG_CUDA = WATCHDOG.format(what="CUDA error: an illegal memory access was encountered")
WATCHDOG_TIMEOUT = WATCHDOG.format(what="Watchdog caught collective operation timeout: WorkNCCL")


@pytest.fixture
def job() -> SimulatedJob:
    job = SimulatedJob(seed=1)
    job.advance(8)
    return job


def tick(job: SimulatedJob, seconds: float = 0.1) -> list[Finding]:
    job.now_ns += int(seconds * 1e9)
    return job.tick(job.now_ns).findings


def heartbeat(job: SimulatedJob) -> None:
    for node in job.nodes:
        if node not in job.muted_nodes:
            job.engine.feed(job.batch(node), job.now_ns)


def test_a_killed_rank_is_reported_at_once(job):
    job.exit(5, signal=9)
    [found] = tick(job)
    assert (found.kind, found.cause) == ("failure", "killed by SIGKILL")
    assert (found.rank, found.node, found.severity) == (5, "node-2", "critical")
    assert not found.can_checkpoint
    assert not found.suspects_node


def test_peers_that_exit_afterwards_are_not_blamed(job):
    job.exit(4, exit_code=1, log_tail=RESET)
    assert tick(job) == []
    job.exit(5, signal=9, at_ns=job.now_ns + 10**9)  # the node's clock runs ahead
    job.exit(6, exit_code=1, log_tail=RESET)
    [found] = tick(job)
    assert (found.rank, found.cause) == (5, "killed by SIGKILL")
    heartbeat(job)
    assert tick(job, 2) == []


@pytest.mark.parametrize(
    ("log_tail", "quote"),
    [
        (NCCL_CUDA, "Cuda failure 214 'uncorrectable ECC error encountered'"),
        (NCCL_SHARED_MEMORY, "Error while creating shared memory segment"),
    ],
)
def test_an_error_of_nccl_about_the_own_device_or_node_is_a_cause(job, log_tail, quote):
    job.exit(4, exit_code=1, log_tail=NCCL_REMOTE)
    job.exit(5, exit_code=1, log_tail=log_tail, at_ns=job.now_ns + 10**9)
    job.exit(6, exit_code=1, log_tail=RESET)
    [found] = tick(job)
    assert found.rank == 5
    assert found.cause.startswith("exit code 1: torch.distributed.DistBackendError: NCCL error: ")
    assert quote in found.cause


def test_an_abort_after_a_device_error_is_a_cause_and_one_after_a_timeout_is_not(job):
    job.exit(4, signal=6, log_tail=WATCHDOG_TIMEOUT)
    job.exit(5, signal=6, log_tail=WATCHDOG_CUDA, at_ns=job.now_ns + 10**9)
    [found] = tick(job)
    error = "CUDA error: an illegal memory access was encountered"
    assert (found.rank, found.cause) == (5, f"killed by SIGABRT: {error}")


def test_the_rank_that_exits_first_is_blamed(job):
    job.exit(4, exit_code=1, log_tail="ValueError: bad", at_ns=job.now_ns)
    job.exit(6, exit_code=1, log_tail="KeyError: 3", at_ns=job.now_ns - 10**8)
    [found] = tick(job)
    assert (found.rank, found.cause) == (6, "exit code 1: KeyError: 3")


def test_the_rank_that_raised_its_error_first_is_blamed_even_if_it_ends_later(job):
    job.exit(4, exit_code=1, log_tail="ValueError: bad", at_ns=job.now_ns - 10**8)
    job.exit(6, exit_code=1, log_tail="KeyError: 3", at_ns=job.now_ns, since_error_ns=10**9)
    [found] = tick(job)
    assert (found.rank, found.cause) == (6, "exit code 1: KeyError: 3")


RAISED = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    train()
ValueError: bad batch

During handling of the above exception, another exception occurred:

[rank4]: Traceback (most recent call last):
[rank4]:   File "train.py", line 12, in <module>
[rank4]:     dist.barrier()
[rank4]: RuntimeError: Connection closed by peer
[W1123 ProcessGroupGloo.cpp:42] Warning: destroy_process_group() was not called
"""


def all_nodes_report(job: SimulatedJob) -> list[Finding]:
    """Advance the job until the messages about the cause of an exit must have arrived."""
    heartbeat(job)
    found = tick(job, 1.0)
    heartbeat(job)
    return [*found, *tick(job, 0.1), *tick(job, 1.0)]


def test_an_exit_whose_cause_is_unknown_is_reported_also_if_the_agents_end_with_the_job(job):
    for rank in range(8):
        how = {"signal": 6} if rank == 5 else {"exit_code": 1}
        job.exit(rank, log_tail=RESET, **how)
    found = [each for _ in range(75) for each in tick(job, 0.1)]
    assert [(each.kind, each.rank) for each in found] == [("failure", 5)]


def test_a_rank_that_exits_0_early_is_the_culprit_and_not_those_that_lost_it(job):
    job.exit(3, exit_code=0, at_ns=job.now_ns + 10**8)  # the node reports it late
    for rank in (0, 1, 2, 4, 5, 6, 7):
        job.exit(rank, exit_code=1, log_tail=RESET)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.cause) == (3, "node-1", "ended early")
    assert found.summary == ("Rank 3 (node-1) exited with code 0 before the other ranks finished.")
    assert found.evidence[-1].text == "ranks 0-2, 4-7 ended afterwards"


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_finished_early_is_the_culprit_also_if_its_process_ends_last(job, ends):
    """Torch takes longer to end than its peers to fail. If it never ends, they are reported."""
    job.wait(0.5, {3: job.state(3, status="finished")})
    for rank in (0, 1, 2, 4, 5, 6, 7):
        job.exit(rank, exit_code=1, log_tail=RESET)
    assert all_nodes_report(job) == []
    if ends:
        job.exit(3, exit_code=0)
    [found] = all_nodes_report(job)
    assert (found.rank, found.cause == "ended early") == ((3, True) if ends else (None, False))


def test_an_external_rank_that_finishes_early_is_the_culprit(job):
    for rank in (0, 6):
        in_collective(job, rank)
    job.exit(3, exit_code=0)
    for rank in (0, 6):
        job.exit(rank)
    assert [(one.rank, one.cause) for one in all_nodes_report(job)] == [(3, "ended early")]


@pytest.mark.parametrize("log_tail", ["ValueError: bad", RAISED])
def test_a_rank_that_raises_after_another_has_finished_is_blamed_itself(job, log_tail):
    job.exit(3, exit_code=0)
    job.exit(4, exit_code=1, log_tail=log_tail)
    assert [found.rank for found in all_nodes_report(job)] == [4]


def test_a_connection_lost_at_the_end_of_training_is_not_blamed_on_those_that_finished(job):
    for rank in range(7):
        job.exit(rank, exit_code=0)
    job.exit(7, exit_code=1, log_tail=RESET)
    assert [found.rank for found in all_nodes_report(job)] == [7]


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (15, "SIGTERM"), (1, "SIGHUP")])
def test_nobody_is_blamed_when_all_ranks_are_killed_at_once(job, number, name):
    for rank in job.ranks:
        job.exit(rank, signal=number, at_ns=job.now_ns + rank * 10**7)
        assert tick(job, 0.01) == []
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.ranks) == (None, None, [*job.ranks])
    assert found.summary == f"All 8 ranks were killed by {name} at once."


def test_nobody_is_blamed_when_launchers_know_the_signal_of_one_rank_per_node(job):
    first_of_each_node = {job.node(rank): rank for rank in reversed(job.ranks)}
    for rank in job.ranks:
        is_known = rank in first_of_each_node.values()
        job.exit(rank, signal=9 if is_known else None)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.ranks) == (None, None, [*job.ranks])
    assert found.summary == "All 8 ranks were killed by SIGKILL at once."


def test_a_report_of_one_killed_rank_is_corrected_when_the_others_are_known_to_be_killed(job):
    killed_ns = job.now_ns
    job.exit(5, signal=9, at_ns=killed_ns)
    assert [found.rank for found in tick(job, 1.0)] == [5]
    for rank in {*job.ranks} - {5}:
        job.exit(rank, signal=9, at_ns=killed_ns - 10**7)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.ranks) == (None, None, [*job.ranks])


def test_ranks_that_lost_a_connection_while_all_were_killed_change_nothing(job):
    for rank in (0, 2, 4, 6):
        job.exit(rank, signal=15)
    for rank in (1, 3, 5, 7):
        job.exit(rank, exit_code=1, log_tail=RESET)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node) == (None, None)
    assert found.summary == "Ranks 0, 2, 4, 6 were killed by SIGTERM at once."


def test_a_node_whose_ranks_are_all_killed_stays_the_culprit(job):
    for rank in (4, 5):
        job.exit(rank, signal=9)
    for rank in (0, 1, 2, 3, 6, 7):
        job.exit(rank, exit_code=1, log_tail=RESET)
    assert [(found.rank, found.node) for found in all_nodes_report(job)] == [(4, "node-2")]


def test_nobody_is_blamed_when_all_ranks_raise_the_same_error(job):
    for rank in job.ranks:
        job.exit(rank, exit_code=1, log_tail=f"{RAISED}rank {rank}")
    [found] = all_nodes_report(job)
    assert (found.rank, found.node) == (None, None)
    assert found.summary == "All 8 ranks exited with code 1: ValueError: bad batch."


def test_external_ranks_that_all_end_at_once_name_nobody(job):
    for rank in (0, 3):
        in_collective(job, rank)
    for rank in job.ranks:
        job.exit(rank)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.cause) == (None, None, "process gone")


def test_the_first_raised_error_is_the_headline_whichever_message_arrives_first(job):
    job.exit(4, exit_code=1, log_tail="KeyError: 3", at_ns=job.now_ns)
    assert tick(job, 0.05) == []
    job.exit(6, exit_code=1, log_tail=RAISED, at_ns=job.now_ns - 10**8)
    [found] = tick(job)
    assert (found.rank, found.cause) == (6, "exit code 1: ValueError: bad batch")


def test_exits_are_ordered_by_the_clock_of_the_server():
    job = SimulatedJob(seed=1)
    job.faults.skew_ns["node-2"] = -60 * 10**9
    job.advance(8)
    job.exit(0, exit_code=1, log_tail="KeyError: 3")
    job.now_ns += 10**7
    job.exit(4, exit_code=1, log_tail="ValueError: bad")
    assert [found.rank for found in tick(job)] == [0]


def drain(job: SimulatedJob, *ranks: int, **how: Any) -> None:
    for rank in ranks:
        exited = RankExited(
            time_ns=job.now_ns,
            job=JOB,
            generation=0,
            rank=rank,
            pid=4000 + rank,
            **(how or {"signal": 15, "drained": True}),
        )
        job.engine.feed(job.batch(job.node(rank), events=[exited]), job.now_ns)


def test_ranks_whose_agents_are_shut_down_were_stopped_on_request(job):
    drain(job, *job.ranks)
    [found] = all_nodes_report(job)
    assert (found.cause, found.rank, found.node) == ("stopped on request", None, None)
    assert found.summary == (
        "All 8 ranks were stopped on request: the agents of their nodes were shut down."
    )


def test_the_only_rank_is_stopped_on_request():
    job = SimulatedJob(Topology(1, 1, 1))
    job.advance(4)
    drain(job, 0)
    [found] = all_nodes_report(job)
    assert found.summary == "Rank 0 was stopped on request: the agent of node-0 was shut down."


def test_ranks_that_lost_those_of_a_drained_node_are_not_blamed(job):
    drain(job, 4, 5)
    for rank in (0, 1, 2, 3, 6, 7):
        job.exit(rank, exit_code=1, log_tail=RESET)
    [found] = all_nodes_report(job)
    assert (found.cause, found.node) == ("stopped on request", None)
    assert found.summary == "Ranks 4, 5 were stopped on request: the agent of node-2 was shut down."


def test_ranks_whose_torchrun_was_asked_to_end_were_stopped_whatever_they_did_then(job):
    drain(job, 0, 1, 2, 3, signal=15, launcher_signal=15)
    drain(job, 4, 5, exit_code=3, log_tail="KeyError: 3", launcher_signal=15)
    drain(job, 6, 7, exit_code=0, launcher_signal=15)
    [found] = all_nodes_report(job)
    assert (found.cause, found.rank, found.node) == ("stopped on request", None, None)
    assert found.summary == "All 8 ranks were stopped on request: torchrun received SIGTERM."
    assert found.severity == "critical"


def test_ranks_that_take_longer_to_end_on_request_are_named_as_soon_as_the_last_has_ended(job):
    """Nothing is reported once they all have ended: the job ends."""
    drain(job, 3, signal=2, launcher_signal=2)
    [found] = all_nodes_report(job)
    assert found.summary == "Rank 3 was stopped on request: torchrun received SIGINT."
    drain(job, 0, 1, 2, 4, 5, 6, 7, signal=2, launcher_signal=2)
    [found] = tick(job)
    assert found.summary == "All 8 ranks were stopped on request: torchrun received SIGINT."
    assert (found.severity, found.advice) == ("info", None)


@pytest.mark.parametrize(
    "how",
    [
        {"signal": 2},
        {"exit_code": 130},
        {"exit_code": 1, "log_tail": f"{RAISED.partition('ValueError')[0]}KeyboardInterrupt"},
    ],
)
def test_ranks_that_all_end_by_ctrl_c_were_stopped(job, how):
    job.exit(3, **how)
    assert tick(job, 0.5) == []
    for rank in {*job.ranks} - {3}:
        job.exit(rank, **how)
    [found] = all_nodes_report(job)
    assert (found.cause, found.rank, found.ranks) == ("stopped on request", None, [*job.ranks])
    assert found.summary == "All 8 ranks were stopped on request: Ctrl-C (SIGINT)."
    assert (found.severity, found.advice) == ("info", None)


def test_one_rank_that_sigint_ends_is_a_failure_until_all_have_ended_so(job):
    job.exit(3, signal=2)
    assert [found.summary for found in all_nodes_report(job)] == [
        "Rank 3 (node-1) was killed by SIGINT."
    ]
    for rank in {*job.ranks} - {3}:
        job.exit(rank, signal=2)
    assert [found.cause for found in tick(job)] == ["stopped on request"]


@pytest.mark.parametrize("signal", [15, None])
@pytest.mark.parametrize(("seconds", "culprit"), [(1, None), (-0.5, None), (-60, 5)])
def test_a_rank_that_its_launcher_ends_after_a_timeout_is_not_the_cause(
    job, signal, seconds, culprit
):
    """`mp.spawn` and torchrun end the other ranks of the node, also before the process of the one
    that failed is gone. A rank that was ended a minute before is the cause."""
    late = "RuntimeError: [Rank 4]: Rank 5 failed to pass monitoredBarrier in 20000 ms"
    job.exit(4, exit_code=1, log_tail=late, since_error_ns=10**9)
    job.exit(5, signal=signal, at_ns=job.now_ns + int(seconds * 10**9))
    [found] = all_nodes_report(job)
    assert found.rank == culprit
    if culprit is None:
        what = "A collective timed out before any rank ended. Rank 4 (node-2) exited with code 1: "
        assert found.summary == f"{what}{late}."


def hang_of_rank_3(job: SimulatedJob) -> Finding:
    at_ns = job.now_ns - job.offset_ns(0)
    frames = [Frame(Op.STEP, at_ns, 0, None, 0), Frame(Op.ALL_REDUCE, at_ns, 3, None, 99)]
    groups = [GroupProgress(3, 99, 98, at_ns, Op.ALL_REDUCE)]
    states = {rank: job.state(rank, frames=frames, groups=groups) for rank in job.ranks}
    states[3] = job.state(3, process_state="T")
    job.wait(6, states)
    [found] = job.findings
    assert (found.kind, found.rank) == ("hang", 3)
    return found


@pytest.mark.parametrize("number", [9, 15])
def test_a_kill_after_a_hang_is_a_consequence_of_it(job, number):
    hang_of_rank_3(job)
    for rank in job.ranks:
        job.exit(rank, signal=number)
    assert [found.follows for found in all_nodes_report(job)] == ["hang"]


def test_an_error_of_its_own_explains_the_hang_that_preceded_it(job):
    hang_of_rank_3(job)
    job.exit(3, signal=11)
    assert [found.follows for found in tick(job)] == [None]


def in_collective(job, rank):
    at_ns = job.now_ns - job.offset_ns(0)
    frames = [Frame(Op.STEP, at_ns, 0, None, 0), Frame(Op.ALL_REDUCE, at_ns, DP, None, 3)]
    groups = [GroupProgress(DP, 3, 3, at_ns, Op.ALL_REDUCE)]
    job.wait(0.5, {rank: job.state(rank, frames=frames, groups=groups)})


def test_ranks_of_external_jobs_that_waited_in_a_collective_are_victims(job):
    """Their exit codes are unknown, and their agents poll four times a second."""
    for rank in (0, 1):
        in_collective(job, rank)
    job.exit(0, at_ns=job.now_ns - 10**8)
    job.exit(1)
    job.exit(6)
    assert tick(job) == [], "the message about the cause may not have arrived yet"
    heartbeat(job)
    tick(job, 1.0)
    heartbeat(job)
    found = [*tick(job, 0.1), *tick(job, 1.0)]
    assert [(one.rank, one.node, one.cause) for one in found] == [(6, "node-3", "process gone")]


def test_ranks_of_external_jobs_that_ended_together_are_reported_together(job):
    states = {4: job.state(4, status="failed"), 5: job.state(5)}
    late = replace(states[5].view, step=states[5].view.step - 1)
    job.wait(0.5, {**states, 5: replace(states[5], view=late)})
    job.exit(4)
    job.exit(5)
    heartbeat(job)
    tick(job, 1.0)
    heartbeat(job)
    (found,) = [*tick(job, 0.1), *tick(job, 1.0)]
    assert (found.rank, found.ranks, found.node) == (None, [4, 5], "node-2")
    assert found.summary == "Ranks 4, 5 (node-2) ended with unknown exit code."
    texts = [one.text for one in found.evidence]
    assert texts[1:3] == [
        f"rank 5 ended without raising an error in step {job.step - 1}",
        f"rank 4 raised an error in step {job.step}",
    ]


def test_an_earlier_exit_that_is_reported_later_corrects_the_finding(job):
    job.exit(4, exit_code=1, log_tail="ValueError: bad", at_ns=job.now_ns)
    [first] = tick(job)
    job.exit(6, signal=11, at_ns=job.now_ns - 10**9)
    [second] = tick(job)
    assert (first.rank, second.rank, second.cause) == (4, 6, "killed by SIGSEGV")
    assert first.fingerprint == second.fingerprint


def test_an_unexplained_broken_connection_is_reported_in_the_end(job):
    job.exit(4, exit_code=1, log_tail=RESET)
    assert tick(job) == []
    for _ in range(6):
        job.now_ns += 300_000_000
        heartbeat(job)
        job.tick(job.now_ns)
    assert [found.rank for found in job.findings] == [4]


@pytest.mark.parametrize(
    ("log_tail", "cause"),
    [
        ("Traceback\n  x\nValueError: no such batch\n\n", "exit code 3: ValueError: no such batch"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory"),
        ("", "exit code 3"),
        (
            "WARNING: cannot allocate memory for pinned buffers\n"
            'Traceback (most recent call last):\n  File "t.py", line 1, in x\nKeyError: 3\n',
            "exit code 3: KeyError: 3",
        ),
        (
            'Traceback (most recent call last):\n  File "t.py", line 1, in x\nMemoryError\n\n'
            "During handling of the above exception, another exception occurred:\n\n"
            'Traceback (most recent call last):\n  File "t.py", line 9, in x\nKeyError: 3\n',
            "out of memory",
        ),
    ],
)
def test_the_last_log_line_names_the_cause(job, log_tail, cause):
    job.exit(1, exit_code=3, log_tail=log_tail)
    [found] = tick(job)
    assert found.cause == cause


def test_a_sigkill_on_a_node_without_free_memory_hints_at_the_oom_killer(job):
    samples = [
        Sample("node_memory_MemAvailable_bytes", {}, 1e6, job.now_ns),
        Sample("node_memory_MemTotal_bytes", {}, 64e9, job.now_ns),
    ]
    job.engine.feed(job.batch("node-0", samples=samples), job.now_ns)
    job.exit(1, signal=9)
    [found] = tick(job)
    assert "the OOM killer may have killed it" in found.evidence[-1].text


def test_exit_code_0_and_commanded_exits_are_no_failures(job):
    job.exit(0, exit_code=0)
    job.exit(1, signal=9, commanded=True)
    job.exit(2, exit_code=1, commanded=True)
    assert tick(job, 3) == []


def test_nothing_is_reported_while_the_generation_is_being_stopped(job):
    job.engine.suspend()
    job.muted_nodes = {"node-1"}
    job.exit(0, signal=15)
    for _ in range(10):
        assert tick(job, 1) == []
        heartbeat(job)


def test_exits_of_another_generation_or_of_a_node_without_that_rank_are_ignored(job):
    job.generation = 7
    job.exit(0, signal=9)
    job.generation = 0
    exits = job.node
    job.node = lambda rank: "node-3"
    job.exit(0, signal=9)
    job.node = exits
    assert tick(job) == []


def silent(job: SimulatedJob, seconds: float) -> list[Finding]:
    findings = []
    for _ in range(round(seconds / 0.5)):
        job.now_ns += 500_000_000
        heartbeat(job)
        findings += job.tick(job.now_ns).findings
    return findings


def test_a_silent_node_is_lost_after_its_lease(job):
    job.muted_nodes = {"node-2"}
    assert silent(job, 4.5) == []
    [found] = silent(job, 1.5)
    assert (found.cause, found.node, found.rank) == ("node lost", "node-2", None)
    assert found.suspects_node
    assert not found.can_checkpoint
    assert silent(job, 10) == []


def test_a_node_is_lost_after_its_lease_also_if_the_clock_was_set_back_meanwhile(job):
    silent(job, 2)
    job.muted_nodes = {"node-2"}
    silent(job, 2)
    job.now_ns -= 3600 * 10**9
    assert silent(job, 4.5) == [], "a full lease from then on"
    assert [each.node for each in silent(job, 2)] == ["node-2"]


def test_a_node_is_lost_after_the_clock_was_set_back(job):
    silent(job, 2)
    job.now_ns -= 3600 * 10**9
    assert silent(job, 10) == []
    job.muted_nodes = {"node-2"}
    assert [each.node for each in silent(job, 7)] == ["node-2"]


def with_collectives(
    job: SimulatedJob, node: str, seconds: float, count: float, op: Op
) -> list[str]:
    """Let the ranks of all other nodes finish `count` collectives per second of that node's group.

    Return the summaries of the findings.
    """
    job.muted_nodes = {node}
    findings = []
    for _ in range(round(seconds / 0.5)):
        job.now_ns += 500_000_000
        finished = 100 + int(count * (job.now_ns // 10**9 % 1000))
        progress = GroupProgress(WORLD, finished + 1, finished, job.now_ns, op)
        for each in job.nodes:
            if each != node:
                events = [job.state(rank, groups=[progress]) for rank in job.on_node(each)]
                job.engine.feed(job.batch(each, events=events), job.now_ns)
        findings += job.tick(job.now_ns).findings
    return [each.summary for each in findings if each.cause == "node lost"]


def test_a_silent_node_is_not_lost_while_others_communicate_with_its_ranks(job):
    assert with_collectives(job, "node-2", 60, count=3, op=Op.ALL_REDUCE) == []
    # Lost, a lease after the last sign.
    assert with_collectives(job, "node-2", 3.5, count=0, op=Op.ALL_REDUCE) == []
    [summary] = with_collectives(job, "node-2", 3, count=0, op=Op.ALL_REDUCE)
    assert summary.startswith("Node node-2 with ranks 4, 5 is lost: silent for 6")


def test_ranks_of_a_silent_node_may_communicate_only_once_in_each_long_step(job):
    job.host_factor = 12.0
    job.advance(12)  # steps of 6.7 s
    assert with_collectives(job, "node-2", 4.0, count=1, op=Op.ALL_REDUCE) == []
    assert with_collectives(job, "node-2", 90, count=0.1, op=Op.ALL_REDUCE) == []


def test_what_ranks_finish_without_the_silent_node_is_no_sign_of_it(job):
    # A broadcast that its root finishes alone.
    assert len(with_collectives(job, "node-2", 7, count=3, op=Op.BROADCAST)) == 1


def test_a_lost_node_explains_the_exits_of_its_peers(job):
    job.muted_nodes = {"node-2"}
    for rank in (0, 1, 2, 3, 6, 7):
        job.exit(rank, exit_code=1, log_tail=RESET)
    found = silent(job, 12)
    assert [each.cause for each in found] == ["node lost"]
    assert "ended meanwhile" in found[0].evidence[1].text


def test_a_pause_of_the_server_does_not_make_nodes_look_lost(job):
    job.now_ns += 60_000_000_000
    assert job.tick(job.now_ns).findings == []
    heartbeat(job)
    assert silent(job, 3) == []


@pytest.mark.parametrize("seconds", [4.0, 4.8, 5.2, 6.0, 20.0])
def test_a_server_that_receives_from_no_node_for_a_while_loses_none(job, seconds):
    """The nodes report in turn, so the one that reported first reaches its lease first."""
    for _ in range(10):
        for node in job.nodes:
            job.now_ns += 125_000_000
            job.engine.feed(job.batch(node), job.now_ns)
            assert job.tick(job.now_ns).findings == []
    for _ in range(round(seconds / 0.1)):
        job.now_ns += 100_000_000
        assert job.tick(job.now_ns).findings == []
    for node in reversed(job.nodes):
        job.now_ns += 125_000_000
        job.engine.feed(job.batch(node), job.now_ns)
        assert job.tick(job.now_ns).findings == []


def test_a_node_is_lost_although_the_others_report_only_now_and_then(job):
    silent(job, 2)
    responding = [node for node in job.nodes if node != "node-2"]
    findings = []
    for _ in range(4):
        for _ in range(30):
            job.now_ns += 100_000_000
            findings += job.tick(job.now_ns).findings
        for node in responding:
            job.engine.feed(job.batch(node), job.now_ns)
    assert [(found.cause, found.node) for found in findings] == [("node lost", "node-2")]


@pytest.mark.parametrize(("others", "seconds"), [(True, 5), (False, 60)])
@pytest.mark.parametrize("others_before", [True, False])
def test_the_only_node_that_may_respond_has_more_time(
    others: bool, seconds: int, others_before: bool
) -> None:
    """Its host and the server's may be one, and overloaded; no other node could take over."""
    job = SimulatedJob(Topology(dp=2))
    job.others_respond = others_before
    assert silent(job, 10) == []
    job.others_respond = others
    job.muted_nodes = set(job.nodes)
    assert silent(job, seconds - 1) == []
    assert [found.cause for found in silent(job, 2)] == ["node lost"]


def test_a_server_that_receives_nothing_for_a_while_does_not_lose_the_only_node_of_a_job() -> None:
    job = SimulatedJob(Topology(dp=2))
    job.others_respond = True
    assert silent(job, 10) == []
    job.muted_nodes, job.others_respond = set(job.nodes), False
    assert silent(job, 30) == []
    job.others_respond = True
    assert silent(job, 2) == [], "another one responds first"
    assert [found.cause for found in silent(job, 4)] == ["node lost"]


@pytest.mark.parametrize("ahead_seconds", [3, -3])
def test_a_node_is_lost_also_if_another_server_receives_whose_clock_differs(
    job, ahead_seconds: int
) -> None:
    responding = [node for node in job.nodes if node != "node-2"]
    findings = []
    for count in range(60):
        job.now_ns += 500_000_000
        for node in responding if count > 10 else job.nodes:
            job.engine.feed(job.batch(node), job.now_ns - ahead_seconds * 10**9)
        findings += job.tick(job.now_ns).findings
    assert [(found.cause, found.node) for found in findings] == [("node lost", "node-2")]


def test_while_all_batches_are_late_a_silent_node_is_not_lost(job):
    for node in job.nodes:
        job.engine.feed(job.batch(node), job.now_ns)
    job.muted_nodes = {"node-2"}
    seconds, late_ns = 9.0, 7_000_000_000
    for _ in range(round(seconds / 0.5)):
        job.now_ns += 500_000_000
        for node in job.nodes:
            if node not in job.muted_nodes:
                batch = replace(job.batch(node), packed_ns=job.now_ns - late_ns)
                job.engine.feed(batch, job.now_ns)
        assert job.tick(job.now_ns).findings == []
    assert [each.node for each in silent(job, 6.0)] == ["node-2"]


def test_all_nodes_silent_at_once_means_a_network_problem_of_the_server(job):
    job.muted_nodes = set(job.nodes)
    assert silent(job, 20) == []
    job.muted_nodes = set(job.nodes[1:])
    assert silent(job, 4.5) == [], "one responding node does not make the others lost at once"
    job.muted_nodes = {"node-2"}
    assert [each.node for each in silent(job, 6)] == ["node-2"]


def test_all_nodes_of_a_job_are_lost_if_others_respond_for_a_minute(job):
    job.others_respond = True
    job.muted_nodes = set(job.nodes)
    assert silent(job, 58) == []
    assert {each.node for each in silent(job, 4)} == set(job.nodes)
    assert silent(job, 20) == []


def test_that_minute_begins_again_after_a_pause_of_the_server_or_of_the_others(job):
    job.muted_nodes = set(job.nodes)
    for responds in (True, False, True):
        job.others_respond = responds
        assert silent(job, 58) == []
    job.now_ns += 600_000_000_000
    assert silent(job, 58) == []
    assert len(silent(job, 4)) == len(job.nodes)


def test_the_only_rank_known_to_have_lost_a_connection_is_not_blamed(job):
    job.exit(3, exit_code=1, log_tail=RESET)
    for rank in (2, 7):  # ended by their launchers, which do not report how
        job.exit(rank, at_ns=job.now_ns + 4 * 10**8)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.ranks) == (None, None, [2, 3, 7])
    assert found.summary.startswith("Connections between ranks broke before any rank ended. Rank 3")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:18337",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while "
        "trying to connect to (node-1, 29500).",
    ],
)
def test_ranks_that_never_connected_lost_no_connection(job, error):
    for rank in (3, 6):
        job.exit(rank, exit_code=1, log_tail=f"Traceback (most recent call last):\n{error}\n")
    [found] = all_nodes_report(job)
    assert (found.rank, found.ranks) == (None, [3, 6])
    expected = "A rank could not connect to the others. Rank 3 (node-1) exited with code 1"
    assert found.summary.startswith(expected)


def test_all_ranks_that_lost_connections_are_named_in_whichever_words_they_report_it(job):
    aborted = RESET.replace("Connection closed by peer", "Software caused connection abort")
    for rank in job.ranks:
        job.exit(rank, exit_code=1, log_tail=RESET if rank < 7 else aborted)
    [found] = all_nodes_report(job)
    assert (found.rank, found.ranks) == (None, [*job.ranks])
    assert found.summary.startswith("Connections between ranks broke before any rank ended. Rank 0")


def test_no_end_of_a_broken_connection_is_blamed(job):
    for rank in (3, 6):
        job.exit(rank, exit_code=1, log_tail=RESET)
    for rank in (2, 7):  # ended by their launchers, which do not report how
        job.exit(rank, at_ns=job.now_ns + 4 * 10**8)
    [found] = all_nodes_report(job)
    assert (found.rank, found.node, found.ranks) == (None, None, [3, 6])
    assert found.summary.startswith(
        "Connections between ranks broke before any rank ended. Rank 3 (node-1) exited with code 1"
    )


def test_a_lost_gpu_is_a_failure_of_its_rank_and_node(job):
    job.device_event("node-1", "gpu_lost", "gpu1")
    [found] = tick(job)
    assert (found.cause, found.rank, found.node) == ("GPU lost", 3, "node-1")
    assert found.suspects_node
    job.device_event("node-1", "gpu_back", "gpu1")
    assert [each.cleared for each in tick(job)] == [True]


def test_a_lost_gpu_without_a_rank_is_not_reported(job):
    job.device_event("node-1", "gpu_lost", "gpu5")
    job.device_event("node-4", "gpu_lost", "gpu0")
    assert tick(job) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_non_finite_loss_is_reported_once(job, loss):
    events = [job.state(rank, loss=loss) for rank in (4, 5)]
    job.engine.feed(job.batch("node-2", events=events), job.now_ns)
    [found] = tick(job)
    assert (found.cause, found.can_checkpoint) == ("non-finite loss", False)
    assert found.onset_step == job.step - 1
    assert tick(job) == []


KILLED = "critical: Memory cgroup out of memory: Killed process {pid} (python), UID 0"


def log_is_read(job: SimulatedJob, node: str) -> None:
    sample = Sample("paceline_kernel_log_lost_total", {}, 0.0, job.now_ns)
    job.engine.feed(job.batch(node, samples=[sample]), job.now_ns)


def pid_of(job: SimulatedJob, rank: int) -> int:
    return job.engine._running._exited[rank].pid


def test_a_sigkill_that_the_kernel_log_explains_is_out_of_memory(job):
    log_is_read(job, "node-2")
    job.exit(5, signal=9, at_ns=job.now_ns + 1000)
    assert tick(job, 0.3) == []  # the kernel log of that second may still explain it
    job.device_event("node-2", "oom_kill", "host", KILLED.format(pid=pid_of(job, 5)))
    [found] = tick(job, 0.3)
    assert (found.cause, found.rank) == ("out of memory", 5)
    assert "Killed process" in found.evidence[1].text
    assert found.advice
    assert not found.suspects_node
    assert tick(job, 5) == []


def test_a_sigkill_that_is_not_in_the_kernel_log_is_reported_once_the_log_was_read(job):
    log_is_read(job, "node-2")
    job.exit(5, signal=9, at_ns=job.now_ns + 1000)
    assert tick(job, 0.3) == []
    log_is_read(job, "node-2")
    [found] = tick(job, 0.1)
    assert found.cause == "killed by SIGKILL"
    job.exit(4, signal=9, at_ns=job.now_ns - 10**9)
    [found] = tick(job, 0.1)
    assert found.rank == 4


def test_a_kernel_log_that_is_no_longer_read_does_not_delay_the_report(job):
    log_is_read(job, "node-2")
    job.exit(5, signal=9, at_ns=job.now_ns + 1000)
    assert tick(job, 0.6) == []
    assert [found.cause for found in tick(job, 0.3)] == ["killed by SIGKILL"]


def test_a_killed_rank_whose_peers_wait_for_the_next_generation_is_reported_at_once(job):
    log_is_read(job, "node-2")
    job.exit(5, signal=9, at_ns=job.now_ns + 1000, renewable=True)
    [found] = tick(job, 0.01)
    assert (found.rank, found.cause) == (5, "killed by SIGKILL")


def test_a_broken_connection_is_held_back_even_if_its_peers_wait(job):
    job.exit(4, exit_code=1, log_tail=RESET, renewable=True)
    assert tick(job) == []
    job.exit(5, signal=9, renewable=True)
    [found] = tick(job, 0.01)
    assert found.rank == 5


def test_an_oom_kill_that_is_reported_later_corrects_the_cause(job):
    job.exit(5, signal=9)
    [first] = tick(job)
    labels = {"job": JOB, "rank": "5", "kind": "oom_kill"}
    kill = Sample("paceline_rank_kernel_events_total", labels, 1.0, job.now_ns)
    job.engine.feed(job.batch("node-2", samples=[kill]), job.now_ns)
    [second] = tick(job)
    assert (first.cause, second.cause) == ("killed by SIGKILL", "out of memory")
    assert first.fingerprint == second.fingerprint
    assert tick(job) == []


def test_a_kill_of_another_process_explains_nothing(job):
    job.device_event("node-2", "oom_kill", "host", KILLED.format(pid=1))
    job.exit(5, signal=9)
    job.device_event("node-0", "oom_kill", "host", KILLED.format(pid=pid_of(job, 5)))
    assert [found.cause for found in tick(job)] == ["killed by SIGKILL"]


def test_a_rank_whose_loader_worker_was_killed_is_out_of_memory(job):
    job.device_event("node-0", "oom_kill", "host", KILLED.format(pid=4242))
    words = "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed."
    job.exit(1, exit_code=1, log_tail=words)
    [found] = tick(job)
    assert (found.cause, found.rank) == ("out of memory", 1)
    assert found.summary == "A loader worker of rank 1 (node-0) ran out of memory."


def test_a_rank_that_notices_its_dead_worker_by_a_broken_connection_is_the_first_cause(job):
    job.exit(0, exit_code=1, log_tail=RESET)
    noticed = """Traceback (most recent call last):
  File "data.py", line 3, in get
ConnectionResetError: [Errno 104] Connection reset by peer

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly
"""
    job.exit(1, exit_code=1, log_tail=noticed)
    [found] = tick(job)
    assert found.rank == 1
    assert "DataLoader worker (pid(s) 4242) exited unexpectedly" in found.summary


RAISED_BY_SCRIPT = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    batch = next(batches)
            ^^^^^^^^^^^^^
  File "data.py", line 3, in get
    raise RuntimeError(reason)
{error}
"""


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='data'): Read timed out.",
        "RuntimeError: DataLoader timed out after 60 seconds",
        "RuntimeError: ProcessGroupGloo::allgather: invalid output tensor list at index 0",
        "RuntimeError: shard 7: no bytes since 30 s, read timed out",
    ],
)
def test_an_error_of_a_ranks_own_connection_loader_or_arguments_is_the_cause(job, error):
    job.exit(0, exit_code=1, log_tail=RESET)
    job.exit(1, exit_code=1, log_tail=RAISED_BY_SCRIPT.format(error=error))
    [found] = tick(job)
    assert (found.rank, found.cause) == (1, f"exit code 1: {error}")
    assert found.summary.startswith("Rank 1 (node-0) exited with code 1")
