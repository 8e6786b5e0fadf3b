"""The error in the last lines of a rank's log; the texts were recorded on an H200, torch 2.11."""

import pytest
from msgspec.structs import replace
from simulated_job import WORLD, SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_server.detect.raised_error import error_line, error_place, fatal_place
from paceline_wire.batch import RankState
from paceline_wire.ring import GroupProgress
from paceline_wire.spans import NONE_16, NONE_32, Op

KERNEL = "/pytorch/aten/src/ATen/native/cuda/ScatterGatherKernel.cu:409: operator(): block: [0,0,0]"
ASSERTION = 'Assertion `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.'
ASSERTED = "CUDA error: device-side assert triggered"
HINTS = """Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/ for more.
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from query at /pytorch/c10/cuda/CUDAEvent.h:111 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f3d1677305d in libc10.so)
frame #4: <unknown function> + 0x129ecc (0x7f3d17929ecc in /lib/x86_64-linux-gnu/libc.so.6)
"""
TRACEBACK = f"""[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/user/fault.py", line 31, in <module>
[rank0]:     print(step, loss.item(), flush=True)
[rank0]:                 ^^^^^^^^^^^
[rank0]: torch.AcceleratorError: {ASSERTED}
[rank0]: Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/ for more information.

"""
WHO = "[PG ID 0 PG GUID 0(default_pg) Rank 0]"
DIED = f"{WHO} Process group watchdog thread terminated with exception"
LOGGED = "[rank0]:[E1126 06:39:34.181883415 ProcessGroupNCCL.cpp:"
NO_EXCEPTION = "terminate called without an active exception"
THROWN = "terminate called after throwing an instance of"


def abort(error: str) -> str:
    announced = f"{LOGGED}2119] {DIED}: {error}\n{HINTS}"
    return f"{announced}\n{THROWN} 'c10::DistBackendError'\n  what():  {DIED}: {error}\n{HINTS}"


WORK = "WorkNCCL(SeqNum=305, OpType=ALLREDUCE, NumelIn=262656, NumelOut=262656, Timeout(ms)=20000)"
TIMEOUT = f"Watchdog caught collective operation timeout: {WORK} ran for 20056 milliseconds"
WATCHDOG = f"""149 6.734685698006615e-09
{LOGGED}689] [Rank 0] {TIMEOUT} before timing out.
{LOGGED}2303] {WHO}  failure detected by watchdog at work sequence
"""
GLOO = "[/pytorch/third_party/gloo/transport/tcp/pair.cc:534] Connection {how} [10.0.0.3]:41337"
CLOSED, RESET = GLOO.format(how="closed by peer"), GLOO.format(how="reset by peer")


def gloo_abort(error: str) -> str:
    return f"149 6.73e-09\n{THROWN} 'gloo::IoException'\n  what():  {error}\n"


MISMATCH = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length "
    "<= op.nbytes. 10 vs 8. Received data size doesn't match expected size. Is there a distributed "
    "collective mismatch in your code?"
)


@pytest.fixture
def job() -> SimulatedJob:
    job = SimulatedJob(seed=1)
    job.advance(8)
    return job


def all_nodes_report(job: SimulatedJob) -> list[Finding]:
    found = []
    for _ in range(12):
        job.now_ns += 200_000_000
        for node in job.nodes:
            job.engine.feed(job.batch(node), job.now_ns)
        found += job.tick(job.now_ns).findings
    return found


@pytest.mark.parametrize(
    ("raised", "error", "place"),
    [
        (TRACEBACK, f"torch.AcceleratorError: {ASSERTED}", "/home/user/fault.py:31 <module>"),
        ("", ASSERTED, None),
    ],
)
def test_an_abort_names_the_error_of_the_device_and_its_assertion(job, raised, error, place):
    asserted = f"{KERNEL}, thread: [0,0,0] {ASSERTION}\n"
    job.exit(5, signal=6, log_tail=f"149 6.8e-09\n{asserted}{raised}{abort(ASSERTED)}")
    job.now_ns += 10**8
    [found] = job.tick(job.now_ns).findings
    assert found.cause == f"killed by SIGABRT: {error} ({ASSERTION[:-1]})"
    assert found.summary == f"Rank 5 (node-2) was {found.cause}."
    texts = [one.text for one in found.evidence]
    assert texts[0].endswith("of rank 5 (node-2): killed by SIGABRT")
    where = f", raised in {place}" if place else ""
    assert texts[1] == f"its log: {error} ({ASSERTION[:-1]}){where}"


RAISED_IN_TORCH = """Traceback (most recent call last):
  File "/home/me/train.py", line 30, in train
    loss.backward()
  File "/usr/lib/python3.11/site-packages/torch/_tensor.py", line 395, in backward
    _engine_run_backward(
RuntimeError: Expected all tensors to be on the same device
"""


@pytest.mark.parametrize(
    ("log_tail", "place"),
    [
        (RAISED_IN_TORCH, "/home/me/train.py:30 train"),
        (RAISED_IN_TORCH.replace("/home/me/train.py", "/opt/site-packages/x.py"), "_tensor.py:395"),
        (f"{RAISED_IN_TORCH}\nThe above exception was the direct cause of\n\n"
         'Traceback (most recent call last):\n  File "a.py", line 3, in main\nOSError: no batch',
         "a.py:3 main"),
        (RAISED_IN_TORCH.replace("/usr/lib/python3.11/site-packages/torch/_tensor.py",
                                 "/src/paceline_autostart/__init__.py"), "/home/me/train.py:30"),
        (RAISED_IN_TORCH.partition("Runtime")[0], None),
        ("step 3", None),
    ],
)  # fmt: skip
def test_the_place_of_an_error_is_the_innermost_one_of_the_script(log_tail, place):
    found = error_place(log_tail)
    assert found is None if place is None else place in found


def test_the_evidence_of_an_error_says_where_it_was_raised(job):
    job.exit(5, exit_code=1, log_tail=RAISED_IN_TORCH)
    [found] = all_nodes_report(job)
    texts = [one.text for one in found.evidence]
    error = RAISED_IN_TORCH.splitlines()[-1]
    assert texts[1] == f"its log: {error}, raised in /home/me/train.py:30 train"


STACKS = """Fatal Python error: Segmentation fault

Thread 0x00007ff79c8996c0 (most recent call first):
  File "/home/me/logging.py", line 6 in write

{current}hread 0x00007ff79d62ab80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/opt/lib/python3.11/site-packages/torch/_ops.py", line 9 in __call__
  File "/home/me/model.py", line 88 in forward
  File "/home/me/train.py", line 30 in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""


@pytest.mark.parametrize(
    ("log_tail", "place"),
    [
        (STACKS.format(current="Current t"), "/home/me/model.py:88 forward"),
        (STACKS.format(current="T"), "/home/me/model.py:88 forward"),  # a thread without a stack
        (STACKS.format(current="T").replace("/home/me", "/opt/site-packages"), "__init__.py:519"),
        ("Fatal Python error: Aborted\n", None),
        (RAISED_IN_TORCH, None),
        ("", None),
    ],
)
def test_the_place_of_a_fatal_signal_is_the_innermost_one_of_the_script(log_tail, place):
    found = fatal_place(log_tail)
    assert found is None if place is None else place in found


def test_a_fatal_signal_is_reported_with_the_python_line(job):
    job.exit(5, signal=11, log_tail=f"step 3\n{STACKS.format(current='Current t')}")
    job.now_ns += 10**8
    [found] = job.tick(job.now_ns).findings
    assert found.summary == "Rank 5 (node-2) was killed by SIGSEGV in model.py:88 forward."
    assert found.cause == "killed by SIGSEGV"
    assert [one.text for one in found.evidence][1:3] == [
        "its log: Fatal Python error: Segmentation fault",
        "its Python line when it was killed: /home/me/model.py:88 forward",
    ]


def test_an_abort_after_a_timeout_of_the_watchdog_names_the_collective_that_timed_out(job):
    job.exit(5, signal=6, log_tail=f"{WATCHDOG}{abort(f'[Rank 0] {TIMEOUT} before timing out.')}")
    [found] = all_nodes_report(job)
    assert found.cause == f"killed by SIGABRT: {TIMEOUT} before timing out."


def test_ranks_whose_collective_timed_out_lost_no_connection(job):
    for rank in (4, 5, 6):
        job.exit(rank, signal=6, log_tail=f"{WATCHDOG}{abort(f'[Rank 0] {TIMEOUT}')}")
    [found] = all_nodes_report(job)
    assert (found.rank, found.ranks) == (None, [4, 5, 6])
    assert found.summary.startswith("A collective timed out before any rank ended. Rank 4 ")


def test_ranks_whose_collective_of_gloo_timed_out_lost_no_connection(job):
    waited = (
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
    )
    for rank in (4, 6):
        job.exit(rank, exit_code=1, log_tail=waited)
    [found] = all_nodes_report(job)
    assert (found.rank, found.ranks) == (None, [4, 6])
    assert found.summary.startswith("A collective timed out before any rank ended. Rank 4 ")


def test_a_rank_that_aborts_after_a_timeout_is_a_victim_of_the_one_with_the_device_error(job):
    job.exit(4, signal=6, log_tail=f"{WATCHDOG}{abort(TIMEOUT)}")
    job.exit(6, signal=6, log_tail=abort(ASSERTED), at_ns=job.now_ns + 10**9)
    assert [found.rank for found in all_nodes_report(job)] == [6]


@pytest.mark.parametrize("error", [CLOSED, RESET])
def test_an_abort_of_gloo_names_the_connection_and_stays_a_consequence(job, error):
    job.exit(4, signal=6, log_tail=gloo_abort(error))
    job.exit(6, signal=9, at_ns=job.now_ns + 10**9)
    [found] = all_nodes_report(job)
    assert (found.rank, found.cause) == (6, "killed by SIGKILL")


def test_connections_that_broke_without_a_cause_are_quoted(job):
    job.exit(4, signal=6, log_tail=gloo_abort(CLOSED))
    [found] = all_nodes_report(job)
    assert found.cause == f"killed by SIGABRT: {CLOSED}"


def test_aborts_of_all_ranks_for_different_reasons_name_none_of_them(job):
    for rank in job.ranks:
        job.exit(rank, signal=6, log_tail=gloo_abort(CLOSED if rank < 4 else RESET))
    [found] = all_nodes_report(job)
    assert found.cause == "killed by SIGABRT"


def test_an_error_that_ended_the_script_is_the_cause_of_an_abort_at_its_exit(job):
    raised = TRACEBACK.replace(f"torch.AcceleratorError: {ASSERTED}", "ValueError: bad batch")
    job.exit(4, signal=6, log_tail=gloo_abort(CLOSED))
    job.exit(6, signal=6, log_tail=f"{raised}{gloo_abort(CLOSED)}", at_ns=job.now_ns + 10**9)
    [found] = all_nodes_report(job)
    assert (found.rank, found.cause) == (6, "killed by SIGABRT: ValueError: bad batch")


def test_an_error_that_the_script_handled_is_not_the_cause_of_an_abort(job):
    handled = TRACEBACK.replace("[rank0]: ", "").replace(f"torch.AcceleratorError: {ASSERTED}", "x")
    job.exit(4, signal=6, log_tail=f"{handled}{gloo_abort(CLOSED)}")
    [found] = all_nodes_report(job)
    assert found.cause == f"killed by SIGABRT: {CLOSED}"


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/home/user/train.py", line 31, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/user/train.py", line 17, in rollout
    |     raise OSError("disk gone")
    | OSError: disk gone
    +------------------------------------
"""
REPORTED = """Traceback (most recent call last):
  File "/home/user/train.py", line 31, in <module>
    loss.backward()
{error}
"""  # by the hooks of an external rank, without torch's prefix


def test_an_external_rank_that_aborts_at_its_exit_is_named_with_the_error_that_it_reported(job):
    lost = REPORTED.format(error=f"RuntimeError: {RESET}")
    raised = REPORTED.format(error="ValueError: bad batch")
    job.exit(4, signal=6, log_tail=lost, since_error_ns=10**8)
    job.exit(6, signal=6, log_tail=raised, since_error_ns=10**8, at_ns=job.now_ns + 10**9)
    [found] = all_nodes_report(job)
    assert (found.rank, found.cause) == (6, "killed by SIGABRT: ValueError: bad batch")


def test_external_ranks_that_abort_because_their_connections_broke_say_so(job):
    lost = REPORTED.format(error=f"RuntimeError: {RESET}")
    for rank in (4, 6):
        job.exit(rank, signal=6, log_tail=lost, since_error_ns=10**8)
    [found] = all_nodes_report(job)
    assert (found.rank, found.cause) == (None, f"killed by SIGABRT: RuntimeError: {RESET}")
    assert found.summary.startswith("Connections between ranks broke before any rank ended.")


@pytest.mark.parametrize(
    ("log_tail", "line"),
    [
        (f"step 3\n{NO_EXCEPTION}\n", NO_EXCEPTION),
        (f"{THROWN} 'std::bad_alloc'\n", "std::bad_alloc"),
        (f"step 3\n{HINTS.splitlines()[-1]}", "step 3"),
        (GROUP, "OSError: disk gone"),
        ("", ""),
    ],
)
def test_without_an_error_the_last_line_that_is_no_frame_is_quoted(log_tail, line):
    assert error_line(log_tail) == line


def test_a_rank_that_aborts_without_an_error_is_blamed_for_the_lost_connections(job):
    job.exit(4, exit_code=1, log_tail=f"RuntimeError: {CLOSED}", at_ns=job.now_ns - 10**8)
    job.exit(6, signal=6)
    [found] = all_nodes_report(job)
    assert (found.rank, found.cause) == (6, "killed by SIGABRT")
    assert found.summary == "Rank 6 (node-3) was killed by SIGABRT."


def test_a_rank_that_aborts_without_an_error_gives_way_to_a_cause(job):
    job.exit(6, signal=6)
    job.exit(4, exit_code=1, log_tail="ValueError: bad", at_ns=job.now_ns + 10**9)
    assert [found.rank for found in all_nodes_report(job)] == [4]


def test_ranks_that_abort_together_without_an_error_are_reported_together(job):
    job.exit(4, signal=6)
    job.exit(6, signal=6)
    [found] = all_nodes_report(job)
    assert (found.rank, found.ranks) == (None, [4, 6])
    assert found.summary.startswith("Ranks 4, 6 aborted together. Rank 4 ")


def enter(job: SimulatedJob, rank: int, number: int, size: int, *, left: int) -> RankState:
    at_ns = job.now_ns - job.offset_ns(rank)
    groups = [GroupProgress(WORLD, number, left, at_ns, Op.ALL_GATHER, size)]
    return job.state(rank, groups=groups)


def send_record(job: SimulatedJob, rank: int, number: int, size: int) -> None:
    word = Op.ALL_GATHER | WORLD << 16 | NONE_16 << 32
    at_ns = job.now_ns - job.offset_ns(rank)
    row = (10**6, word, job.step | NONE_32 << 32, NONE_32, size, number, at_ns, 1)
    job.engine.feed(job.batch(job.node(rank), spans=[job.block(rank, [row])]), job.now_ns)


@pytest.mark.parametrize("is_late", [False, True])
def test_the_rank_that_entered_another_size_is_blamed_and_not_the_one_that_gloo_aborted(
    job, is_late
):
    states = {rank: enter(job, rank, 9, 16, left=8) for rank in job.ranks}
    states[3] = enter(job, 3, 10, 512, left=9)  # it has gone on
    if not is_late:
        send_record(job, 3, number=9, size=20)
    job.wait(0.5, states)
    job.exit(5, signal=6, log_tail=f"{THROWN} 'gloo::EnforceNotMet'\n  what():  {MISMATCH}\n")
    job.exit(4, exit_code=1, log_tail=f"RuntimeError: {RESET}", at_ns=job.now_ns - 10**8)
    [found] = all_nodes_report(job)
    if is_late:
        assert found.rank is None
        send_record(job, 3, number=9, size=20)
        [found] = all_nodes_report(job)
    assert (found.rank, found.node) == (3, "node-1")
    assert found.cause == "mismatched collective: another size"
    assert found.summary == (
        "Rank 3 (node-1) entered another collective than the others: rank 3 entered all_gather "
        "world#9 of 20 bytes, rank 1 entered all_gather world#9 of 16 bytes. Rank 5 (node-2) was "
        "killed by SIGABRT."
    )


def test_without_records_a_mismatch_blames_no_rank(job):
    for rank in (5, 6):
        job.exit(rank, signal=6, log_tail=f"{THROWN} 'gloo::Error'\n  what():  {MISMATCH}\n")
    [found] = all_nodes_report(job)
    assert (found.rank, found.ranks, found.cause) == (None, [5], "mismatched collective")
    assert found.summary == (
        "Ranks entered different collectives, or different sizes of one. Rank 5 (node-2) was "
        "killed by SIGABRT."
    )


WORKER = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 22, in <module>
[rank1]:     for batch in loader:
[rank1]: KeyError: Caught KeyError in DataLoader worker process 0.
[rank1]: Original Traceback (most recent call last):
[rank1]:   File "dataloader.py", line 374, in _worker_loop
[rank1]:     data = fetcher.fetch(index)
[rank1]:   File "train.py", line 13, in __getitem__
[rank1]:     raise KeyError("sample 800 has no label")
[rank1]: KeyError: 'sample 800 has no label'

"""
STATE_DICT = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    model.load_state_dict(state)
RuntimeError: Error(s) in loading state_dict for Model:
\tsize mismatch for head.weight: copying a param with shape torch.Size([4]) from checkpoint.
\tsize mismatch for head.bias: copying a param
"""


@pytest.mark.parametrize(
    ("log_tail", "line"),
    [
        (WORKER, "KeyError: 'sample 800 has no label'"),
        (
            STATE_DICT,
            "RuntimeError: Error(s) in loading state_dict for Model: size mismatch for "
            "head.weight: copying a param with shape torch.Size([4]) from checkpoint.",
        ),
    ],
)
def test_the_line_of_a_longer_message_that_names_the_error_is_quoted(job, log_tail, line):
    job.exit(4, exit_code=1, log_tail=log_tail)
    [found] = all_nodes_report(job)
    assert found.summary == f"Rank 4 (node-2) exited with code 1: {line.rstrip('.')}."


@pytest.mark.parametrize("is_same", [True, False])
def test_an_exit_because_of_a_failed_checkpoint_says_so(job, is_same):
    error = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 8 vs 4"
    reason = f"No space left on device: {error}"
    state = job.state(4)
    view = replace(state.view, failed_saves=1, save_failure=reason if is_same else "OSError: busy")
    job.wait(0.5, {4: replace(state, view=view)})
    job.exit(4, exit_code=1, log_tail=error)
    [found] = [one for one in all_nodes_report(job) if one.kind == "failure"]
    because = "because a checkpoint could not be saved: No space left on device"
    assert (because in found.summary) is is_same
    assert error in found.summary


@pytest.mark.timeout(60)
def test_a_line_that_a_script_made_up_takes_no_time():
    """A search that took minutes for each exit would stop the diagnosis of all jobs."""
    hostile = "NCCL error in: a, " * 900
    log = f"Traceback (most recent call last):\n{hostile}"
    assert error_line(log).startswith("NCCL error in: a, ")
