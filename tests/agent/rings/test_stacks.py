"""Python stacks of real processes: one waits for a lock, one is stopped, one does not exist."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline_agent.rings import stacks
from paceline_agent.rings.stacks import take_of_rank
from paceline_wire.batch import CommandResult, RankProfile, RankStackTraces, RankStarted
from paceline_wire.commands import RankSpec, StartRanks, TakeProfiles, TakeStacks
from paceline_wire.stacks import (
    MAXIMUM_FRAMES,
    MAXIMUM_STACKS,
    MAXIMUM_TEXT,
    MAXIMUM_THREADS,
    Profile,
    ProfiledStack,
    StackFrame,
    ThreadStack,
    bounded,
    bounded_profile,
)
from paceline_wire.topology import Topology
from tests.agent.command_factory import with_constants
from tests.ports import free_port

Fixture = Callable[..., Any]

# Rank 0 waits for a lock that another thread holds, which keeps the GIL busy.
RANK = """
import os, threading
from pathlib import Path
from paceline_wire import ring
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology
rank = int(os.environ["RANK"])
identity = Identity(
    job="job-a", generation=0, rank=rank, local_rank=rank, world_size=2, topology=Topology(dp=2),
    coordinates=Coordinates(dp_rank=rank), pid=os.getpid(), host="here", clock_offset_ns=0,
    started_ns=1)
ring_file = ring.create(
    Path(os.environ["PACELINE_RING_DIRECTORY"]) / f"job-a.g0.r{rank}.ring", identity, 64)
lock = threading.Lock()
def holds_the_lock_and_spins():
    with lock:
        ready.set()
        while True:
            pass
def waits_for_the_lock():
    with lock:
        pass
ready = threading.Event()
threading.Thread(target=holds_the_lock_and_spins, name="spinner", daemon=True).start()
ready.wait()
waits_for_the_lock()
"""


# A rank that has not begun to record.
LOADING = """
import signal
def loads():
    signal.pause()
loads()
"""


def start(ranks: int, script: str = RANK) -> StartRanks:
    return StartRanks(
        command_id=1,
        job="job-a",
        generation=0,
        topology=Topology(dp=2),
        ranks=[RankSpec(rank, rank) for rank in range(ranks)],
        argv=[sys.executable, "-c", script],
        master_address="127.0.0.1",
        master_port=free_port(),
    )


def take(
    server: Any, wait_for: Fixture, command_id: int, *ranks: int
) -> dict[int, RankStackTraces]:
    before = len(server.events(RankStackTraces))
    server.commands.append(
        TakeStacks(command_id=command_id, job="job-a", generation=0, ranks=list(ranks))
    )
    wait_for(lambda: any(event.command_id == command_id for event in server.events(CommandResult)))
    return {event.rank: event for event in server.events(RankStackTraces)[before:]}


def functions(thread: ThreadStack) -> list[str]:
    return [frame.function for frame in thread.frames]


def test_waiting_and_lock_holding_threads_are_shown_in_running_and_stopped_processes(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    agent = start_agent(under=with_constants("paceline_agent.rings.stacks", SECONDS=50.0))
    server.commands.append(start(1))
    (started,) = wait_for(lambda: server.events(RankStarted))
    wait_for(lambda: "attached rank 0" in agent.log_text())

    def waits() -> dict[str, ThreadStack] | None:
        nonlocal number
        number += 1
        (event,) = take(server, wait_for, number, 0).values()
        threads = {thread.name: thread for thread in event.threads}
        main = threads.get("MainThread")
        return threads if main and "waits_for_the_lock" in functions(main) else None

    number = 10
    threads = wait_for(waits)
    assert functions(threads["MainThread"])[0] == "waits_for_the_lock"
    assert functions(threads["spinner"])[0] == "holds_the_lock_and_spins"
    assert (threads["MainThread"].holds_gil, threads["spinner"].holds_gil) == (False, True)

    os.kill(started.pid, signal.SIGSTOP)
    stopped = take(server, wait_for, 100, 0)[0]
    assert stopped.error is None
    assert functions(stopped.threads[0])[0] == "waits_for_the_lock"
    assert stopped.pid == started.pid
    (result,) = (event for event in server.events(CommandResult) if event.command_id == 100)
    assert result.ok


def test_the_reason_why_a_stack_could_not_be_read_is_one_sentence(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    start_agent()
    event = take(server, wait_for, 1, 7)[7]
    assert event.threads == []
    assert event.error == "rank 7 has no process on this node"
    (result,) = server.events(CommandResult)
    assert not result.ok


def test_a_started_rank_is_read_before_it_has_a_ring(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    start_agent()
    server.commands.append(start(1, LOADING))
    wait_for(lambda: server.events(RankStarted))

    def loads() -> bool:
        nonlocal number
        number += 1
        (event,) = take(server, wait_for, number, 0).values()
        return any("loads" in functions(thread) for thread in event.threads)

    number = 10
    wait_for(loads)


LOADER = """
import signal
from torch.utils.data import DataLoader, Dataset
class Samples(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == 8:
            # One line: what is printed may be read before the next one begins.
            print("stuck", flush=True); signal.pause()
        return index
for batch in DataLoader(Samples(), batch_size=4, num_workers=2):
    pass
"""


@contextmanager
def running(directory: Path, source: str, first_line: str) -> Iterator[int]:
    """Run `train.py` with this source. Yield its pid once it has printed that line."""
    script = directory / "train.py"
    script.write_text(source)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{first_line}\n"
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_rank_in_its_data_loader_is_read_with_the_workers(
    tmp_path: Path, wait_for: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "SECONDS", 50.0)
    with running(tmp_path, LOADER, "stuck") as pid:

        def loads(frames: list[StackFrame]) -> bool:
            return "torch/utils/data/_utils/fetch.py" in {frame.file for frame in frames}

        def read() -> list[list[StackFrame]] | None:
            try:
                threads = asyncio.run(take_of_rank(pid, Path("/proc")))
            except stacks.StacksError:  # its stacks changed while they were read
                return None
            main = threads[0].frames
            workers = [thread.frames for thread in threads if thread.child_pid is not None]
            is_waiting = any(str(frame).endswith("_try_get_data") for frame in main)
            is_ready = is_waiting and list(map(loads, workers)) == [True, False]
            return [main, *workers] if is_ready else None

        main, stuck, idle = wait_for(read)
    assert main[-1] == StackFrame("<module>", "train.py", 12)
    assert all(frame.is_installed for frame in main[:-1])
    assert (stuck[0].file, stuck[0].line, stuck[0].is_installed) == ("train.py", 10, False)
    assert not any(frame.file == "train.py" for frame in idle)


PROFILED = """
import time
def waits():
    time.sleep(0.03)
def computes():
    end = time.monotonic() + 0.01
    while time.monotonic() < end:
        pass
print("ready", flush=True)
while True:
    waits()
    computes()
"""


def test_a_profile_shows_how_often_a_process_is_in_each_line(tmp_path: Path) -> None:
    with running(tmp_path, PROFILED, "ready") as pid:
        profile, workers = asyncio.run(stacks.profile(pid, 2.0))
    outermost = StackFrame("<module>", f"{tmp_path.name}/train.py", 11)
    waiting = sum(stack.samples for stack in profile.stacks if outermost in stack.frames)
    assert sum(stack.samples for stack in profile.stacks) == profile.samples > 0
    assert 0.5 < waiting / profile.samples < 1.0
    sleeping = [StackFrame("waits", outermost.file, 4), outermost]
    assert any(stack.frames == sleeping for stack in profile.stacks)
    assert workers.samples == 0


async def test_the_thread_that_a_rank_claims_to_train_in_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there is no such thread, the main one does."""

    async def py_spy(*_: object, **__: object) -> bytes:
        rest = {"active": False, "owns_gil": False, "frames": []}
        names = {7: "pool-0", 5: "MainThread", 6: "train-1"}
        threads = [
            {"thread_id": key, "os_thread_id": key, "thread_name": name} | rest
            for key, name in names.items()
        ]
        return json.dumps(threads).encode()

    monkeypatch.setattr(stacks, "_py_spy", py_spy)
    main_first = ["MainThread", "train-1", "pool-0"]
    for thread, order in (
        (None, main_first),
        (5, main_first),
        (6, ["train-1", "MainThread", "pool-0"]),
        (8, main_first),
    ):
        threads = await take_of_rank(3, Path("/proc"), thread)
        assert [each.name for each in threads] == order


@pytest.mark.parametrize("has_worker", [True, False])
async def test_other_processes_are_sampled_only_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch, has_worker: bool
) -> None:
    """To look for them, py-spy needs twice as much CPU time."""
    options: list[str] = []

    async def py_spy(_: int, *given: str, **__: object) -> bytes:
        options.extend(given)
        return b""

    monkeypatch.setattr(stacks, "_py_spy", py_spy)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        pid = os.getpid() if has_worker else trainer.pid
        assert (trainer.pid in stacks.children(pid, Path("/proc"))) == has_worker
        await stacks.profile_of_rank(pid, 1.0, Path("/proc"), workers=True)
        trainer.communicate(b"")
    assert ("--subprocesses" in options) == has_worker


RAW = """py-spy> Sampling process 20 times a second for 3 seconds. Press Control-C to exit.

thread (7): pool-0;run (/src/job/a.py:3) 9
thread (5): MainThread;<module> (/src/job/train.py:12);next_batch \
(/src/job/my data/load.py:3);Queue.get (/opt/conda/lib/python3.12/queue.py:171) 4
thread (5): MainThread;<module> (/src/job/train.py:14);run (/src/paceline/x.py:1);__call__ \
(/opt/lib/python3.12/site-packages/torch/nn/m.py:9);kernel (/else/where.py:1);no place 16
thread (5): MainThread;broken
thread (5): MainThread; 1
process 3:"python -c a;b";process 9:"python;c";thread (9): MainThread;<module> \
(/src/job/train.py:1);_bootstrap (/opt/lib/python3.12/multiprocessing/process.py:314);fetch \
(/opt/lib/python3.12/site-packages/torch/utils/data/_utils/fetch.py:5);__getitem__ \
(/src/job/data.py:7) 7
process 3:"python -c a;b";process 9:"python;c";thread (10): feeder;run (/src/job/train.py:1) 7
process 3:"python -c a;b";process 8:"sh";thread (8): MainThread;other (/src/job/tool.py:1) 7
"""


async def test_a_profile_has_the_stacks_of_the_main_thread_with_paths_as_they_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def py_spy(*_: object, **__: object) -> bytes:
        return RAW.replace("\\\n", "").encode()

    monkeypatch.setattr(stacks, "_py_spy", py_spy)
    found, workers = await stacks.profile(3, 10.0, workers=True)
    assert (found.samples, workers.samples) == (21, 7)
    assert [stack.samples for stack in found.stacks] == [16, 4, 1]
    assert [list(map(str, stack.frames)) for stack in workers.stacks] == [
        ["job/data.py:7 __getitem__", "torch/utils/data/_utils/fetch.py:5 fetch"]
    ]
    assert [list(map(str, stack.frames)) for stack in found.stacks] == [
        [
            "else/where.py:1 kernel",
            "torch/nn/m.py:9 __call__",
            "paceline/x.py:1 run",
            "job/train.py:14 <module>",
        ],
        ["queue.py:171 Queue.get", "my data/load.py:3 next_batch", "job/train.py:12 <module>"],
        [],
    ]
    assert [frame.is_installed for frame in found.stacks[1].frames] == [True, False, False]


@pytest.mark.parametrize(
    ("thread", "samples"),
    [(7, 9), (5, 21), (None, 21), pytest.param(10, 21, id="not of this process")],
)
async def test_a_profile_is_of_the_thread_that_trains_and_else_of_the_main_one(
    monkeypatch: pytest.MonkeyPatch, thread: int | None, samples: int
) -> None:
    async def py_spy(*_: object, **__: object) -> bytes:
        return RAW.replace("\\\n", "").encode()

    monkeypatch.setattr(stacks, "_py_spy", py_spy)
    found, workers = await stacks.profile(3, 10.0, thread=thread, workers=True)
    assert (found.samples, workers.samples) == (samples, 7)


def test_the_agent_samples_ranks_on_command(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    agent = start_agent(under=with_constants("paceline_agent.rings.stacks", SECONDS=50.0))
    server.commands.append(start(1))
    wait_for(lambda: "attached rank 0" in agent.log_text())
    server.commands.append(
        TakeProfiles(command_id=2, job="job-a", generation=0, ranks=[0, 7], seconds=1.0)
    )
    found = {one.rank: one for one in wait_for(lambda: events_of_both(server))}
    assert found[7].error == "rank 7 has no process on this node"
    assert found[0].error is None
    assert found[0].main.samples > 0
    functions_of_all = {frame.function for stack in found[0].main.stacks for frame in stack.frames}
    assert "waits_for_the_lock" in functions_of_all


# Ranks that train in a thread. One of them is slow, and hangs once it may.
THREADED = """
import os, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
import paceline
lock = threading.Lock()
lock.acquire()
def filters_slowly():
    time.sleep(0.05)
def waits_for_the_lock():
    with lock:
        pass
def trains():
    dist.init_process_group("gloo")
    paceline.init()
    is_culprit = dist.get_rank() == 1
    for _ in paceline.steps(range(1_000_000)):
        if is_culprit:
            waits_for_the_lock() if Path("HANGS").exists() else filters_slowly()
        dist.all_reduce(torch.ones(1))
thread = threading.Thread(target=trains, name="train-1")
thread.start()
thread.join()
"""


def test_ranks_that_train_in_a_thread_are_shown_with_its_lines(
    start_agent: Fixture, server: Any, wait_for: Fixture, tmp_path: Path
) -> None:
    agent = start_agent(under=with_constants("paceline_agent.rings.stacks", SECONDS=50.0))
    hangs = tmp_path / "hangs"
    server.commands.append(start(2, THREADED.replace("HANGS", str(hangs))))
    for rank in range(2):
        wait_for(lambda rank=rank: f"attached rank {rank}" in agent.log_text())
    server.commands.append(
        TakeProfiles(command_id=2, job="job-a", generation=0, ranks=[0, 1], seconds=1.0)
    )
    found = {one.rank: one for one in wait_for(lambda: events_of_both(server))}
    lines = {
        rank: {frame.function for stack in one.main.stacks for frame in stack.frames}
        for rank, one in found.items()
    }
    assert all(
        "trains" in functions and "Thread.join" not in functions for functions in lines.values()
    )
    assert ["filters_slowly" in lines[rank] for rank in range(2)] == [False, True]

    hangs.touch()

    def hung() -> dict[int, RankStackTraces] | None:
        nonlocal number
        number += 1
        taken = take(server, wait_for, number, 0, 1)
        is_hung = taken[1].threads and functions(taken[1].threads[0])[0] == "waits_for_the_lock"
        return taken if is_hung and taken[0].threads else None

    number = 10
    for stack in wait_for(hung).values():
        assert [thread.name for thread in stack.threads[:2]] == ["train-1", "MainThread"]
        assert functions(stack.threads[0])[-1].endswith("_bootstrap")


def events_of_both(server: Any) -> list[RankProfile] | None:
    events = server.events(RankProfile)
    return events if len(events) == 2 else None


def test_a_profile_is_bounded_and_can_be_stored() -> None:
    deep = ProfiledStack([StackFrame("f" * 999, "\0file", -1)] * 500, 2)
    others = [ProfiledStack([], 5), ProfiledStack([], -1)]
    kept = bounded_profile(Profile(9, [deep] * 500 + others)).stacks
    assert len(kept) == MAXIMUM_STACKS
    assert kept[0].samples == 5
    assert kept[1].frames == [StackFrame("f" * MAXIMUM_TEXT, "file", 0)] * MAXIMUM_FRAMES


def test_a_stack_is_bounded_and_can_be_stored() -> None:
    deep = ThreadStack("t\0" * 500, [StackFrame("f" * 999, "\0file", -1)] * 500)
    threads = bounded([deep] * 500)
    assert len(threads) == MAXIMUM_THREADS
    assert len(threads[0].frames) == MAXIMUM_FRAMES
    assert threads[0].name == "t" * MAXIMUM_TEXT
    assert threads[0].frames[0] == StackFrame("f" * MAXIMUM_TEXT, "file", 0)


async def test_stacks_of_any_length_do_not_fill_the_memory_of_the_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """py-spy writes hundreds of MB about a process with many threads, deep stacks, long names."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec yes\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks, "SECONDS", 60.0)
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(program))
    with pytest.raises(stacks.StacksError, match="more than 8388608 bytes"):
        await stacks.take(1)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
