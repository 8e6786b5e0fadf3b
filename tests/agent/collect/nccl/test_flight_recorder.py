"""Flight Recorder dumps from processes that listen to a pipe like PyTorch's thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline_agent.collect.nccl import flight_recorder
from paceline_agent.collect.nccl.flight_recorder import DumpError, NoAnswerError, dump_names, take
from paceline_agent.collect.nccl.process import NcclProcess
from paceline_wire import dumps
from paceline_wire.batch import CommandResult, RankAttached, RankDump
from paceline_wire.commands import RankSpec, StartRanks, TakeDumps
from paceline_wire.topology import Topology

DUMP = b"\x80\x02}q\x00." * 1000


def process(directory: Path, **environment: str) -> NcclProcess:
    """Return the test's own process."""
    return NcclProcess(
        environment={"TORCH_FR_DUMP_TEMP_FILE": str(directory / "dump_"), **environment},
        pids=frozenset({os.getpid()}),
        version=None,
        root=Path("/"),
        directory=directory,
        user=os.getuid(),
        started_ns=os.stat(directory).st_mtime_ns,
        descriptors=Path("/proc/self/fd"),
    )


@contextmanager
def listener(pipe: Path, answer: Callable[[], object]) -> Iterator[None]:
    """Imitate c10d's DumpPipe and the thread that polls it."""
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    stop = threading.Event()

    def listen() -> None:
        while not stop.wait(0.02):
            try:
                if os.read(descriptor, 128):
                    answer()
            except BlockingIOError:
                continue

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        os.close(descriptor)


async def test_a_dump_is_asked_for_through_the_pipe_and_read_when_it_is_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(flight_recorder, "DUMP_SECONDS", 60.0)

    def write_slowly() -> None:
        with (tmp_path / "dump_3").open("wb") as file:
            file.write(DUMP)

    (tmp_path / "dump_3").write_bytes(b"of a run before")
    rank = process(tmp_path, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "fr_"))
    with listener(tmp_path / "fr_3.pipe", write_slowly):
        taken = await take(rank, 3)
    assert dumps.unpack(taken.content) == DUMP
    assert taken.written_ns == (tmp_path / "dump_3").stat().st_mtime_ns


async def test_a_rank_that_does_not_write_its_dump_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "DUMP_SECONDS", 0.3)
    rank = process(tmp_path, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "fr_"))
    silent = listener(tmp_path / "fr_0.pipe", lambda: None)
    with silent, pytest.raises(NoAnswerError, match="was requested to write"):
        await take(rank, 0)


async def test_a_pipe_that_nobody_reads_is_no_offer(tmp_path):
    rank = process(tmp_path, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "fr_"))
    for prepare in (lambda: None, lambda: os.mkfifo(tmp_path / "fr_0.pipe")):
        prepare()
        with pytest.raises(DumpError, match="TORCH_NCCL_TRACE_BUFFER_SIZE") as raised:
            await take(rank, 0)
        assert not isinstance(raised.value, NoAnswerError)


async def test_nothing_is_written_into_what_is_no_pipe(tmp_path):
    rank = process(tmp_path, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "fr_"))
    (tmp_path / "fr_0.pipe").write_bytes(b"precious")
    with pytest.raises(DumpError, match="no pipe of that rank"):
        await take(rank, 0)
    assert (tmp_path / "fr_0.pipe").read_bytes() == b"precious"


async def test_the_pipe_of_another_job_on_the_node_is_not_used(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open/7").symlink_to(tmp_path / "fr_0.pipe (deleted)")
    own = process(tmp_path, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "fr_"))
    rank = replace(own, descriptors=tmp_path / "open")
    requests = []
    with (
        listener(tmp_path / "fr_0.pipe", lambda: requests.append("read")),
        pytest.raises(DumpError, match="another process has replaced"),
    ):
        await take(rank, 0)
    assert requests == []


async def test_a_rank_that_has_replaced_its_own_pipe_is_asked_through_the_new_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(flight_recorder, "DUMP_SECONDS", 60.0)
    rank = process(tmp_path, TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "fr_"))
    pipe, dump = tmp_path / "fr_0.pipe", tmp_path / "dump_0"
    with listener(pipe, lambda: None):
        pipe.unlink()
        with listener(pipe, lambda: dump.write_bytes(DUMP)):
            taken = await take(rank, 0)
    assert dumps.unpack(taken.content) == DUMP


async def test_without_a_pipe_only_what_was_written_since_the_start_counts(tmp_path):
    rank = process(tmp_path)
    dump = tmp_path / "dump_0"
    with pytest.raises(DumpError, match="its environment offers none"):
        await take(rank, 0)
    dump.write_bytes(DUMP)
    os.utime(dump, ns=(1, 1))
    with pytest.raises(DumpError, match="its environment offers none"):
        await take(rank, 0)
    os.utime(dump)
    assert dumps.unpack((await take(rank, 0)).content) == DUMP


async def test_a_dump_that_is_a_link_or_too_large_is_not_sent(tmp_path):
    rank = process(tmp_path)  # before the dumps: older ones do not count
    (tmp_path / "secret").write_text("of another user")
    (tmp_path / "dump_0").symlink_to(tmp_path / "secret")
    with pytest.raises(DumpError, match="cannot be read"):
        await take(rank, 0)
    (tmp_path / "dump_1").write_bytes(os.urandom(dumps.MAXIMUM_PACKED_BYTES))
    with pytest.raises(DumpError, match="too many to send"):
        await take(rank, 1)


async def test_a_file_system_that_does_not_respond_blocks_only_the_dump(tmp_path, monkeypatch):
    """By default, torch writes dumps below HOME. The agent was lost to the server with its NFS."""
    monkeypatch.setattr(flight_recorder, "DUMP_SECONDS", 0.1)
    monkeypatch.setattr(flight_recorder, "READ_SECONDS", 0.1, raising=False)
    responds = threading.Event()

    def look(path: Path) -> None:
        assert responds.wait(5), "the event loop is blocked"

    monkeypatch.setattr(flight_recorder, "_look", look)
    try:
        with pytest.raises(DumpError, match="does not respond"):
            await take(process(tmp_path), 0)
    finally:
        responds.set()


def test_where_each_version_of_pytorch_writes():
    assert dump_names({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/dump_"}, 3) == ["/x/dump_3"]
    assert dump_names({"HOME": "/root"}, 3) == [
        "/root/.cache/torch/comm_lib_trace_rank_3",
        "/tmp/nccl_trace_rank_3",
    ]
    assert dump_names({"HOME": "/root", "XDG_CACHE_HOME": "/c"}, 3)[0].startswith("/c/torch/")


def test_a_packed_dump_that_lies_about_its_size_is_refused():
    assert dumps.unpack(dumps.pack(b"")) == b""
    for hostile in (b"", b"no zstd", dumps.pack(os.urandom(1000))[:500]):
        with pytest.raises(ValueError, match="dump"):
            dumps.unpack(hostile)


# Rank 0 responds to its pipe; rank 1 has no pipe.
RANK = """
import os, time
from pathlib import Path
from paceline_wire import ring
from paceline_wire.ring import Identity
from paceline_wire.topology import Coordinates, Topology
rank = int(os.environ["RANK"])
prefix = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
if rank == 0:
    os.mkfifo(prefix + "0.pipe")
    pipe = os.open(prefix + "0.pipe", os.O_RDONLY | os.O_NONBLOCK)
identity = Identity(
    job="job-a", generation=0, rank=rank, local_rank=rank, world_size=2, topology=Topology(dp=2),
    coordinates=Coordinates(dp_rank=rank), pid=os.getpid(), host="here", clock_offset_ns=0,
    started_ns=1)
mine = ring.create(
    Path(os.environ["PACELINE_RING_DIRECTORY"]) / f"job-a.g0.r{rank}.ring", identity, 64)
while True:
    time.sleep(0.05)
    if rank == 0:
        try:
            if os.read(pipe, 128):
                Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_bytes(b"a dump")
        except BlockingIOError:
            pass
"""


def test_an_agent_sends_the_dumps_of_its_ranks(
    start_agent: Any, server: Any, wait_for: Any, tmp_path: Path
) -> None:
    start_agent()
    server.commands.append(
        StartRanks(
            command_id=1,
            job="job-a",
            generation=0,
            topology=Topology(dp=2),
            ranks=[RankSpec(0, 0), RankSpec(1, 1)],
            argv=[sys.executable, "-c", RANK],
            environment={
                "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "fr_"),
                "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dump_"),
            },
            master_address="127.0.0.1",
            master_port=1,
        )
    )
    wait_for(lambda: len(server.events(RankAttached)) == 2)
    server.commands.append(TakeDumps(command_id=2, job="job-a", generation=0, ranks=[0, 1, 7]))
    wait_for(lambda: len(server.events(CommandResult)) == 2)
    by_rank = {one.rank: one for one in server.events(RankDump)}
    assert dumps.unpack(by_rank[0].content) == b"a dump"
    assert by_rank[0].error is None
    assert "nobody reads it" in by_rank[1].error
    assert not by_rank[1].was_asked
    assert by_rank[7].error == "rank 7 has no process on this node"
    assert not server.events(CommandResult)[-1].ok
    assert max(sum(isinstance(one, RankDump) for one in b.events) for b in server.batches) == 1


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        ({}, "set TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE=2000 for older releases"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "set TORCH_FR_BUFFER_SIZE=2000 ("),
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, "set TORCH_NCCL_DEBUG_INFO_PIPE_FILE="),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, "set TORCH_NCCL_DEBUG_INFO_PIPE_FILE="),
    ],
)
async def test_only_what_is_missing_is_to_be_set(tmp_path, environment, hint):
    """torch 2.11 had TORCH_FR_BUFFER_SIZE, and the report asked for the older variable."""
    with pytest.raises(DumpError) as raised:
        await take(process(tmp_path, **environment), 0)
    assert str(raised.value).startswith(f"its environment offers none: {hint}")


async def test_a_recorder_that_was_set_up_and_is_off_needs_no_variable(tmp_path):
    settings = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "fr_"),
    }
    with pytest.raises(DumpError, match=r"is the Flight Recorder on\?\)$"):
        await take(process(tmp_path, **settings), 0)
