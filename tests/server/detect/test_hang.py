"""Hung jobs and the ranks that block them."""

import pytest
from simulated_job import DP, JOB, TP, SimulatedJob
from stuck_job import StuckJob, make_all_wait_for, resume

from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine, definitions_in
from paceline_server.flight_recorder import received
from paceline_wire import dumps
from paceline_wire.batch import RankDefined, RankDump, RankStackTraces, Sample
from paceline_wire.ring import SectionDefinition, section_op
from paceline_wire.spans import Op
from paceline_wire.stacks import StackFrame, ThreadStack
from paceline_wire.topology import Topology


def test_a_stopped_process_is_named_within_three_seconds():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.FORWARD, process_state="T")
    assert stuck.wait(1.0) == []
    [found] = stuck.wait(2.0)
    assert (found.kind, found.cause) == ("hang", "process stopped (SIGSTOP)")
    assert (found.rank, found.node, found.stage) == (2, "node-1", 0)
    assert not found.can_checkpoint
    assert not found.suspects_node
    assert found.severity == "critical"
    assert stuck.wait(5.0) == []  # reported once


def test_a_process_that_is_gone_has_six_seconds_in_which_its_exit_explains_more():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.FORWARD, process_state="Z")
    assert stuck.wait(5.0) == []
    [found] = stuck.wait(2.0)
    assert (found.kind, found.rank) == ("hang", 2)
    assert found.summary == "Rank 2 (node-1) blocks the job: its process is gone."


def test_a_rank_that_leaves_its_loop_early_ended_even_if_its_process_takes_long_to_exit():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.status = "finished"
    stuck.inside(2, Op.STEP)
    [found] = stuck.wait(7)
    assert (found.rank, found.cause) == (2, "ended early")
    assert found.summary == (
        "Rank 2 (node-1) blocks the job: it ended before the other ranks finished."
    )


def test_a_server_that_takes_the_job_over_names_the_culprit():
    """The batches in which the ranks defined their groups may have been pruned by then."""
    job = SimulatedJob(seed=1)
    placement = job.placement()
    job.engine.place(placement)
    job.advance(3)
    before = job.engine
    job.engine = Engine(JOB, memory=before.memory())
    job.engine.place(placement)
    stuck = StuckJob(job=job)
    make_all_wait_for(stuck, 2)
    [found] = stuck.wait(3.5)
    assert (found.rank, found.cause) == (2, "stuck in host code: forward")
    later = job.placement()
    job.engine.place(later)
    assert definitions_in(before.memory()).are_of(placement)
    assert definitions_in(job.engine.memory()).groups == [], "those of another run"


def test_the_rank_that_others_wait_for_is_the_culprit():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    assert stuck.wait(2.0) == []
    [found] = stuck.wait(1.5)
    assert (found.rank, found.cause) == (2, "stuck in host code: forward")
    reported = " ".join(each.text for each in found.evidence)
    assert "wait for rank 2" in reported
    assert "sleeps" in reported


@pytest.mark.parametrize(
    ("op", "cause"),
    [
        (Op.DATA_WAIT, "stuck in data loading"),
        (Op.STEP, "stuck in host code: between operations"),
        (section_op(7), "stuck in host code: section tokenise"),
        (Op.CHECKPOINT, "stuck in checkpoint"),
    ],
)
def test_what_the_culprit_is_stuck_in(op, cause):
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.inside(2, op)
    job = stuck.job
    defined = RankDefined(
        time_ns=job.now_ns,
        job="job-simulated",
        generation=0,
        rank=2,
        definitions=[SectionDefinition(7, "tokenise")],
    )
    job.engine.feed(job.batch("node-1", events=[defined]), job.now_ns)
    [found] = stuck.wait(4)
    assert (found.rank, found.cause) == (2, cause)


def test_a_collective_that_all_have_entered_blames_no_rank():
    stuck = StuckJob()
    for rank in stuck.job.ranks:
        stuck.in_collective(rank, TP)
    [found] = stuck.wait(4)
    assert (found.rank, found.cause) == (None, "stuck in communication: all_reduce tp#5")


def test_ranks_in_different_collectives_are_a_deadlock():
    stuck = StuckJob()
    for rank in stuck.job.ranks:
        stuck.in_collective(rank, TP if rank % 4 in (1, 2) else DP)
    [found] = stuck.wait(4)
    assert (found.rank, found.cause) == (None, "deadlock: ranks wait for each other")


def test_a_job_with_one_rank_in_progress_does_not_hang():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    for _ in range(10):
        stuck.states[5] = stuck.job.state(5, head=stuck.states[5].view.head + 1)
        assert stuck.wait(1) == []


def test_missing_batches_are_not_a_hang():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(1)
    stuck.states.clear()
    assert stuck.wait(10) == []


@pytest.mark.parametrize("status", ["starting", "checkpointing", "evaluating"])
def test_start_checkpoint_and_evaluation_may_take_longer(status):
    stuck = StuckJob(status=status)
    make_all_wait_for(stuck, 2)
    assert stuck.wait(15) == []
    found = stuck.wait(115)
    assert {one.rank for one in found} == {2}
    assert found[-1].severity == "critical"


def test_ranks_that_a_signal_asked_to_end_may_take_longer_if_all_received_it():
    stuck = StuckJob(status="stopping")
    make_all_wait_for(stuck, 2)
    assert stuck.wait(15) == []
    found = stuck.wait(115)
    assert {one.rank for one in found} == {2}
    assert found[-1].severity == "critical"
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.status = "stopping"
    stuck.inside(2, Op.FORWARD)
    assert stuck.wait(14) == []
    (found,) = stuck.wait(15)
    assert found.rank == 2
    assert " received a signal to end, is hung and blocks the job: it is stuck " in found.summary


def test_a_rank_that_raised_an_error_may_take_longer_to_end():
    stuck = StuckJob(status="failed")
    make_all_wait_for(stuck, 2)
    assert stuck.wait(15) == []
    assert [found.rank for found in stuck.wait(30)] == [2]


def test_ranks_before_their_first_step_have_the_start_timeout():
    """The ranks are between `paceline.init()` and the first step.

    The machine has been up for days.
    """
    stuck = StuckJob(steps=0)
    for rank in stuck.job.ranks:
        stuck.states[rank] = stuck.job.state(rank, frames=[], groups=[], status="running")
    assert stuck.wait(100) == []
    (found,) = stuck.wait(40)
    assert 120 <= found.evidence[0].value < 125


def test_a_slow_operation_may_take_three_times_its_usual_duration():
    stuck = StuckJob(steps=0)
    stuck.job.host_factor = 500.0  # forwards of 10 s in steps of minutes
    stuck.job.advance(5)
    for rank in stuck.job.ranks:
        stuck.inside(rank, Op.FORWARD)
    make_all_wait_for(stuck, 2)
    assert stuck.wait(28) == []
    assert [found.rank for found in stuck.wait(6)] == [2]


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 2.4), (5.0, 5.6), (100.0, 20.0)])
def test_a_short_operation_may_stall_for_two_steps_and_at_most_20_seconds(factor, seconds):
    stuck = StuckJob(steps=0)
    stuck.job.host_factor = factor  # steps take 0.56 s with 1
    stuck.job.advance(5)
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.OPTIMIZER)
    assert stuck.wait(seconds - 0.6) == []
    assert [found.rank for found in stuck.wait(1.6)] == [2]


def test_a_read_that_takes_as_long_as_a_step_is_no_hang():
    stuck = StuckJob(steps=0)
    stuck.job.host_factor = 10.0  # steps of 5.6 s
    stuck.job.advance(5)
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.DATA_WAIT)  # its usual duration is 50 ms
    assert stuck.wait(15) == []
    assert [found.rank for found in stuck.wait(4)] == [2]


def test_an_operation_without_records_may_take_three_steps():
    stuck = StuckJob(steps=0)
    stuck.job.host_factor = 10.0  # steps of 5.6 s
    stuck.job.advance(5)
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.EVALUATE)
    assert stuck.wait(15) == []
    assert [found.rank for found in stuck.wait(4)] == [2]


def test_clock_skew_does_not_change_the_verdict():
    stuck = StuckJob(skew_ns={"node-1": 3_600_000_000_000, "node-2": -60_000_000_000})
    make_all_wait_for(stuck, 2)
    assert stuck.wait(2.0) == []
    assert [found.rank for found in stuck.wait(1.5)] == [2]


def test_a_clock_that_is_set_back_delays_the_verdict_only():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.job.faults.skew_ns = {"node-1": -3_600_000_000_000}
    assert [found.rank for found in stuck.wait(8)] == [2]


def test_a_finished_job_does_not_hang():
    stuck = StuckJob(status="finished")
    assert stuck.wait(30) == []


def test_a_pause_that_recurs_is_reported_once():
    """A rank of the script works alone, for example to upload a checkpoint, while others wait."""
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    [found, cleared] = stuck.wait(8) + resume(stuck)
    assert (found.rank, cleared.cleared) == (2, True)
    make_all_wait_for(stuck, 2)
    assert stuck.wait(8) + resume(stuck) == []
    make_all_wait_for(stuck, 3)
    assert [again.rank for again in stuck.wait(4)] == [3]
    resume(stuck)
    make_all_wait_for(stuck, 2)
    assert stuck.wait(8) == []
    assert [again.rank for again in stuck.wait(11)] == [2]


def test_a_hang_is_cleared_when_the_process_resumes():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    assert len(stuck.wait(4)) == 1
    stuck.states = {rank: stuck.job.state(rank, head=9_000_000) for rank in stuck.job.ranks}
    [found] = stuck.wait(0.5)
    assert found.cleared


def read_stacks(stuck: StuckJob, rank: int, *threads: ThreadStack) -> RankStackTraces:
    job = stuck.job
    taken = RankStackTraces(
        time_ns=job.now_ns, job="job-simulated", generation=0, rank=rank, threads=list(threads)
    )
    job.engine.feed(job.batch(job.node(rank), events=[taken]), job.now_ns)
    return taken


def thread(name: str, *functions: str, holds_gil: bool = False) -> ThreadStack:
    return ThreadStack(name, [StackFrame(each, "data.py", 88) for each in functions], holds_gil)


def test_stacks_of_the_culprit_and_of_a_waiting_rank_are_requested_and_reported():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.DATA_WAIT)
    [found] = stuck.wait(3)
    assert found.side == "host"
    assert found.stacks_wanted == [2, 0]
    # Frames of the standard library, the hooks and torch that only wait.
    waits = [
        StackFrame("wait", "threading.py", 327, is_installed=True),
        StackFrame("timed", "paceline/communication.py", 400),
        StackFrame("init_process_group", "paceline_autostart/__init__.py", 73),
        StackFrame("wrapper", "torch/distributed/c10d_logger.py", 80, is_installed=True),
    ]
    taken = read_stacks(stuck, 2, ThreadStack("MainThread", waits + thread("", "__next__").frames))
    [reported] = stuck.wait(0.5)
    assert reported.fingerprint == found.fingerprint
    assert reported.summary.endswith("stuck in data loading (data.py:88 __next__).")
    assert reported.stacks == [taken]
    [stack] = [each.text for each in reported.evidence if each.text.startswith("MainThread")]
    assert stack.startswith("MainThread of rank 2 is in threading.py:327 wait, called from ")
    assert stack.endswith("data.py:88 __next__")
    assert stuck.wait(2) == []  # reported once


def worker(pid: int, *files: str) -> ThreadStack:
    frames = [StackFrame("run", file, 5, is_installed="/" in file) for file in files]
    return ThreadStack("MainThread", frames, child_pid=pid)


@pytest.mark.parametrize(
    ("workers", "awaited"),
    [
        ([], "a worker of its DataLoader."),
        ([1], "a worker of its DataLoader, process 1 in dataset.py:5 run."),
        ([1, 2], "a worker of its DataLoader."),
    ],
)
def test_a_rank_in_its_data_loader_is_reported_with_the_scripts_line_and_the_worker(
    workers: list[int], awaited: str
) -> None:
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.DATA_WAIT)
    stuck.wait(3)
    torch_data = "torch/utils/data"
    frames = [
        StackFrame("Queue.get", "multiprocessing/queues.py", 113, is_installed=True),
        StackFrame("X._try_get_data", f"{torch_data}/dataloader.py", 1291, is_installed=True),
        StackFrame("Trainer.train", "an_installed_package/trainer.py", 70, is_installed=True),
        StackFrame("<module>", "train.py", 51),
    ]
    loads = ("dataset.py", f"{torch_data}/_utils/fetch.py", f"{torch_data}/_utils/worker.py")
    read_stacks(
        stuck,
        2,
        ThreadStack("MainThread", frames),
        worker(9, "multiprocessing/queues.py", f"{torch_data}/_utils/worker.py"),
        *(worker(pid, *loads) for pid in workers),
    )
    [reported] = stuck.wait(0.5)
    assert reported.summary.endswith(f" (train.py:51 <module>), waiting for {awaited}")
    texts = " ".join(each.text for each in reported.evidence)
    for pid in workers:
        assert f"worker process {pid} of rank 2 is in dataset.py:5 run, called from " in texts
    assert "process 9" not in texts


def creating_a_group() -> ThreadStack:
    file = "torch/distributed/distributed_c10d.py"
    frames = [StackFrame("new_group", file, 5000, is_installed=True), StackFrame("f", "t.py", 28)]
    return ThreadStack("MainThread", frames)


@pytest.mark.parametrize(
    ("topology", "culprit", "reason"),
    [
        (Topology(2, 1, 1), 0, "rank 1 waits in new_group, which it did not call"),
        (Topology(2, 2, 2), 1, "new_group, which ranks 0, 2-7 left or did not call"),
    ],
)
def test_a_group_that_only_some_ranks_create_is_named(topology, culprit, reason):
    stuck = StuckJob(topology=topology)
    make_all_wait_for(stuck, 1)
    [found] = stuck.wait(3)
    assert found.rank == 1
    other = found.stacks_wanted[1]
    read_stacks(stuck, 1, creating_a_group())
    [reported] = stuck.wait(0.5)
    assert (reported.rank, reported.side) == (1, "host")
    read_stacks(stuck, other, thread("MainThread", "all_reduce"))
    [reported] = stuck.wait(0.5)
    assert (reported.rank, reported.ranks, reported.side) == (culprit, [culprit], "mismatch")
    assert f": mismatched collective, {reason} (" in reported.summary
    assert reported.evidence[0].text == "rank 1 waits in new_group, which all ranks must call"


@pytest.mark.parametrize("waits_for_others", [False, True])
def test_the_only_rank_that_does_not_create_a_group_is_named(waits_for_others):
    """No operation shows that the others wait for it, and it may wait for them."""
    stuck = StuckJob(topology=Topology(2, 2, 2))
    if waits_for_others:
        make_all_wait_for(stuck, 5)
    for rank in stuck.job.ranks:
        if rank != 5 or not waits_for_others:
            stuck.inside(rank, Op.STEP)
    [found] = stuck.wait(25)
    assert found.side == "host"
    for _ in range(8):
        read = {stacks.rank for stacks in found.stacks}
        for rank in [rank for rank in found.stacks_wanted if rank not in read]:
            here = thread("MainThread", "load") if rank == 5 else creating_a_group()
            read_stacks(stuck, rank, here)
            [found] = stuck.wait(0.5)
    assert (found.rank, found.ranks, found.side) == (5, [5], "mismatch")
    assert (found.severity, found.advice) == ("critical", None)
    assert "ranks 0-4, 6, 7 wait in new_group, which it did not call" in found.summary


def test_ranks_that_all_create_a_group_leave_none_out():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    for rank in (2, 0):
        read_stacks(stuck, rank, creating_a_group())
    [reported] = stuck.wait(0.5)
    assert (reported.rank, reported.side) == (2, "host")


def test_a_thread_that_holds_the_gil_is_named():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    read_stacks(stuck, 2, thread("MainThread", "forward"), thread("logger", "dump", holds_gil=True))
    [reported] = stuck.wait(0.5)
    assert reported.cause == "GIL held by thread logger"
    assert "thread logger of rank 2 holds the GIL in data.py:88 dump" in [
        each.text for each in reported.evidence
    ]


def test_a_rank_that_trains_in_another_thread_is_reported_with_its_line():
    """Its agent sends this thread first."""
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    read_stacks(stuck, 2, thread("train-1", "forward"), thread("MainThread", "join"))
    [reported] = stuck.wait(0.5)
    assert reported.summary.endswith(", data.py:88 forward).")
    assert "train-1 of rank 2 is in data.py:88 forward" in [each.text for each in reported.evidence]


@pytest.mark.parametrize("holder", ["train-1", "MainThread"])
def test_a_main_thread_that_holds_the_gil_blocks_another_one_that_trains(holder):
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    names = ("train-1", "MainThread")
    read_stacks(stuck, 2, *(thread(name, "f", holds_gil=name == holder) for name in names))
    [reported] = stuck.wait(0.5)
    assert (reported.cause == "GIL held by thread MainThread") == (holder == "MainThread")


def test_the_reason_for_a_missing_stack_is_reported():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    job = stuck.job
    failed = RankStackTraces(
        time_ns=job.now_ns, job="job-simulated", generation=0, rank=2, error="not \0allowed"
    )
    job.engine.feed(job.batch("node-1", events=[failed]), job.now_ns)
    [reported] = stuck.wait(0.5)
    assert reported.evidence[-1].text == "no Python stack of rank 2: not allowed"


@pytest.mark.parametrize("is_same", [True, False])
def test_the_line_is_named_in_which_all_ranks_are(is_same):
    stuck = StuckJob()
    for rank in stuck.job.ranks:
        stuck.inside(rank, Op.STEP)
    [found] = stuck.wait(25)
    assert found.rank is None
    for number, rank in enumerate(found.stacks_wanted):
        read_stacks(stuck, rank, thread("MainThread", "get" if is_same else f"get{number}"))
    assert len(found.stacks_wanted) > 1
    [found] = stuck.wait(0.5)
    assert ("data.py:88 get" in found.summary) == is_same, found.summary


def test_stacks_of_an_earlier_hang_are_not_reported_again():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    read_stacks(stuck, 2, thread("MainThread", "forward"))
    stuck.wait(0.5)
    standing = dict(stuck.states)
    stuck.states = {rank: stuck.job.state(rank, head=9_000_000) for rank in stuck.job.ranks}
    assert stuck.wait(0.5)[0].cleared
    stuck.states = standing
    [found] = stuck.wait(10)  # twice as long as the one that ended by itself
    assert not found.stacks


def send_dump(stuck: StuckJob, rank: int, error: str | None = None, content: bytes = b"") -> None:
    job = stuck.job
    reported = RankDump(
        time_ns=job.now_ns,
        job="job-simulated",
        generation=0,
        rank=rank,
        content=content,
        error=error,
    )
    job.engine.feed(job.batch(job.node(rank), events=[reported]), job.now_ns)


def test_the_flight_recorder_result_is_reported_when_all_ranks_have_answered():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    [found] = stuck.wait(3)
    assert found.dumps_wanted
    for rank in stuck.job.ranks[1:]:
        send_dump(stuck, rank, error="its environment offers none")
    assert stuck.wait(0.5) == []
    send_dump(stuck, 0, error="its environment offers none")
    [reported] = stuck.wait(0.5)
    assert reported.dumps_reported
    assert reported.evidence[-1].text == "No Flight Recorder dump: its environment offers none."
    assert stuck.wait(5) == []  # reported once


def test_dumps_that_were_not_asked_for_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compromised agent could send thousands that take a minute each, and stop all diagnosis."""
    read = []
    monkeypatch.setattr(received, "load", lambda content: read.append(content) or {})
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    for _ in range(100):
        send_dump(stuck, 2, content=dumps.pack(b"hostile"))
    stuck.wait(0.5)
    assert read == []
    stuck.wait(3)
    for rank in stuck.job.ranks:
        send_dump(stuck, rank, content=dumps.pack(b"hostile"))
    [reported] = stuck.wait(0.5)
    assert reported.dumps_reported
    assert len(read) == len(stuck.job.ranks)


def test_missing_dumps_do_not_delay_the_report_forever():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.wait(3)
    send_dump(stuck, 0, error="its environment offers none")
    [reported] = stuck.wait(5)
    assert reported.dumps_reported


def test_the_only_idle_gpu_of_a_collective_is_to_blame():
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.in_collective(2, TP)  # like rank 3: all participants are in the collective
    job = stuck.job
    for rank in job.ranks:
        busy = 0.0 if rank == 3 else 100.0
        sample = Sample("DCGM_FI_DEV_GPU_UTIL", {"gpu": str(rank % 2)}, busy, job.now_ns)
        job.engine.feed(job.batch(job.node(rank), samples=[sample]), job.now_ns)
    [found] = stuck.wait(4)
    assert (found.side, found.rank, found.ranks) == ("device", 3, [3, 2])
    assert found.cause == "stuck in communication: all_reduce tp#5"


def add_kernel_log(job: SimulatedJob, node: str, kind: str, code: str, device: str) -> None:
    """Add one message to the kernel log of a node, which had none before the hang."""
    read, events = "paceline_kernel_log_lost_total", "paceline_kernel_events_total"
    labels = {"kind": kind, "code": code, "device": device}
    samples = [Sample(read, {}, 0.0, job.now_ns + second * 10**9) for second in range(-20, 3)]
    samples += [Sample(events, labels, 1.0, job.now_ns + second * 10**9) for second in (1, 2)]
    job.engine.feed(job.batch(node, samples=samples), job.now_ns)


def hang_of_rank_2(with_log_message: bool, process_state: str = "S") -> Finding:
    stuck = StuckJob()
    make_all_wait_for(stuck, 2)
    stuck.inside(2, Op.FORWARD, process_state)
    if with_log_message:
        add_kernel_log(stuck.job, "node-1", "xid", "119", "gpu0")
    return stuck.wait(8)[0]


def test_the_culprits_node_adds_evidence_but_does_not_change_the_verdict():
    plain, reported = hang_of_rank_2(with_log_message=False), hang_of_rank_2(with_log_message=True)
    assert any("reported XID 119" in line.text for line in reported.evidence)
    assert not any("XID" in line.text for line in plain.evidence)
    assert reported.causes[0].name == "GPU error (XID)"
    for name in ("cause", "rank", "node", "ranks", "summary", "suspects_node", "detected_ns"):
        assert getattr(reported, name) == getattr(plain, name), name


def test_a_culprit_in_uninterruptible_io_is_reported():
    reported = hang_of_rank_2(with_log_message=False, process_state="D")
    assert any("uninterruptible I/O" in line.text for line in reported.evidence)
    assert reported.rank == 2


def test_causes_of_a_hang_that_were_not_measured_are_the_last_counter_evidence():
    assert (
        hang_of_rank_2(with_log_message=False)
        .counter_evidence[-1]
        .text.startswith("not measured: XID")
    )
