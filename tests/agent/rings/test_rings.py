"""Rings become events and span blocks; a damaged ring does not affect the others."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_agent.clock import timeline_ns
from paceline_agent.collect import visible_gpus
from paceline_agent.collect.contract import Inventory
from paceline_agent.collect.exit_status import ExitStatus
from paceline_agent.collect.processes import process_status
from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings import rank_end
from paceline_agent.rings.reader import RankKey, Rings
from paceline_wire import ring
from paceline_wire.batch import (
    Event,
    GpuInfo,
    RankAcknowledged,
    RankAttached,
    RankDefined,
    RankExited,
    RankState,
    Sample,
    SpanBlock,
)
from paceline_wire.ending import Ending, ending_path, fault_path, write_ending
from paceline_wire.metadata import SLURM_JOB
from paceline_wire.ring import Identity, RingFile, SectionDefinition
from paceline_wire.spans import NONE_16, NONE_32, RECORD, RECORD_BYTES, Op, from_columns, unpack
from paceline_wire.topology import Coordinates, Topology
from tests.open_files import no_free_descriptors
from tests.waiting import wait_for


class Writer:
    """The trainer's end of a ring."""

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        generation: int = 0,
        pid: int = 0,
        metadata: dict[str, str] | None = None,
        started_ns: int | None = None,
    ) -> None:
        self.path = directory / f"job.g{generation}.r{rank}.ring"
        identity = Identity(
            job="job",
            generation=generation,
            rank=rank,
            local_rank=rank,
            world_size=4,
            topology=Topology(dp=4),
            coordinates=Coordinates(dp_rank=rank),
            pid=pid or os.getpid(),
            host="here",
            clock_offset_ns=0,
            started_ns=time.monotonic_ns() if started_ns is None else started_ns,
            metadata=metadata or {},
        )
        self.ring: RingFile = ring.create(self.path, identity, capacity=64)
        self.head = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            place = (self.head % 64) * RECORD_BYTES
            self.ring.spans[place : place + RECORD_BYTES] = RECORD.pack(
                self.head, Op.FORWARD, 0, NONE_16, 0, 5, NONE_32, NONE_32, 0, 0, 0, self.head, 10
            )
            self.head += 1
            self.ring.state[ring.STATE_HEAD] = self.head


class Bench:
    """A directory of rings with a reader and its outbox."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.outbox = Outbox()
        self.rings = Rings(directory, self.outbox)

    def poll(self) -> tuple[list[Event], list[SpanBlock]]:
        self.rings.poll()
        return self.taken()

    def taken(self) -> tuple[list[Event], list[SpanBlock]]:
        events: list[Event] = []
        spans: list[SpanBlock] = []
        for some_events, some_spans, _, _ in self.outbox.take():
            events += some_events
            spans += some_spans
        return events, spans


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.rings.close()


def indices(blocks: list[SpanBlock]) -> list[int]:
    return [span.index for block in blocks for span in unpack(from_columns(block.columns))]


def test_a_rank_is_attached_once_and_every_span_is_sent_once(bench: Bench) -> None:
    writer = Writer(bench.directory, rank=3)
    ring.define(writer.ring, SectionDefinition(1, "load"))
    writer.write(10)
    events, blocks = bench.poll()
    assert [type(event) for event in events] == [RankAttached, RankDefined, RankState]
    assert events[0].identity.user == os.getuid(), "the server compares the users of a job"
    assert indices(blocks) == list(range(10))
    assert (blocks[0].job, blocks[0].rank, blocks[0].lost) == ("job", 3, 0)
    writer.write(50)
    bench.rings._state_due = math.inf
    events, blocks = bench.poll()
    assert not events, "nothing new but spans, and the state is not due"
    assert indices(blocks) == list(range(10, 60))


def test_a_rank_that_has_not_used_its_gpu_has_the_one_that_its_environment_shows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = Inventory()
    inventory.gpus = tuple(GpuInfo(index, f"GPU-{index}", "", "") for index in range(4))
    bench.rings = Rings(bench.directory, bench.outbox, inventory=inventory)
    environment = {"CUDA_VISIBLE_DEVICES": "3,1"}
    monkeypatch.setattr(visible_gpus, "read_environment", lambda *_: environment)
    visible_gpus._visible_words.cache_clear()
    Writer(bench.directory, rank=1)
    events, _ = bench.poll()
    visible_gpus._visible_words.cache_clear()
    [attached] = [event for event in events if isinstance(event, RankAttached)]
    assert attached.identity.gpu_uuid == "GPU-1"


def test_an_overrun_is_counted_where_it_happened(bench: Bench) -> None:
    writer = Writer(bench.directory)
    writer.write(200)
    _, blocks = bench.poll()
    assert blocks[0].lost == 137
    assert indices(blocks) == list(range(137, 200))
    writer.write(1)
    _, blocks = bench.poll()
    assert blocks[0].lost == 0
    assert bench.rings.counts.lost_spans == 137


def test_finish_reads_the_rest_and_the_last_state(bench: Bench) -> None:
    writer = Writer(bench.directory)
    bench.rings.supervised[RankKey("job", 0, 0)] = os.geteuid()
    bench.poll()
    writer.write(7)
    writer.ring.state[ring.STATE_STEP] = 42
    writer.ring.control[ring.ACK_STATUS] = ring.AckStatus.DONE
    writer.ring.control[ring.ACK_STEP] = 41
    writer.ring.control[ring.ACK_COMMAND] = 9
    bench.rings.finish(RankKey("job", 0, 0))
    events, blocks = bench.taken()
    acknowledged, state = events
    assert isinstance(acknowledged, RankAcknowledged)
    assert (acknowledged.command_id, acknowledged.status, acknowledged.step) == (9, "done", 41)
    assert isinstance(state, RankState)
    assert state.view.step == 42
    assert indices(blocks) == list(range(7))
    assert not writer.path.exists()
    assert bench.poll() == ([], [])


def test_a_rank_that_ends_before_the_first_poll_is_still_read(bench: Bench) -> None:
    Writer(bench.directory).write(3)
    bench.rings.finish(RankKey("job", 0, 0))
    events, blocks = bench.taken()
    assert [type(event) for event in events] == [RankAttached, RankState]
    assert indices(blocks) == [0, 1, 2]


def test_a_command_reaches_the_control_pages_of_its_generation_only(bench: Bench) -> None:
    old, new = Writer(bench.directory, 0, 0), Writer(bench.directory, 1, 1)
    bench.poll()
    kind = ring.ControlKind.CHECKPOINT
    assert bench.rings.control("job", 1, command_id=5, kind=kind, target_step=12) == [1]
    assert new.ring.control[ring.CONTROL_COMMAND] == 5
    assert new.ring.control[ring.CONTROL_TARGET_STEP] == 12
    assert old.ring.control[ring.CONTROL_COMMAND] == 0


def test_a_ring_that_could_not_be_opened_for_lack_of_descriptors_is_attached_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_agent.rings.reader.REFUSED_SECONDS", 0.0)
    rings = Rings(tmp_path, Outbox())
    rings.supervise(RankKey("job", 0, 0), os.getuid())
    Writer(tmp_path)
    with no_free_descriptors():
        rings.poll()
    assert len(rings) == 0
    rings.poll()
    assert len(rings) == 1
    rings.close()


@pytest.mark.parametrize("damage", ["magic", "short", "empty", "identity", "version"])
def test_a_file_that_is_not_a_ring_is_skipped_once(
    bench: Bench, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = Writer(bench.directory, rank=1)
    content = bytearray(bad.path.read_bytes())
    match damage:
        case "magic":
            content[:8] = b"NOTARING"
        case "short":
            content = content[:-64]
        case "empty":
            content = bytearray()
        case "identity":
            content[28:60] = os.urandom(32)
        case "version":
            content[8] = 99
    bad.path.unlink()
    bad.path.write_bytes(content)
    good = Writer(bench.directory, rank=0)
    good.write(1)
    _, blocks = bench.poll()
    assert indices(blocks) == [0]
    for _ in range(3):
        bench.poll()
    assert bench.rings.counts.corrupt == 1
    assert len([record for record in caplog.records if "skipped" in record.message]) == 1


@pytest.mark.parametrize(
    "damage", ["head", "definitions", "acknowledgement", "command", "truncated"]
)
def test_a_ring_damaged_in_use_is_detached_and_the_others_are_read(
    bench: Bench, damage: str
) -> None:
    bad, good = Writer(bench.directory, 0), Writer(bench.directory, 1)
    bad.write(5)
    bench.poll()
    match damage:
        case "head":
            bad.ring.state[ring.STATE_HEAD] = 2
        case "definitions":
            bad.ring.state[ring.STATE_DEFINITIONS] = 1 << 40
        case "acknowledgement":
            bad.ring.control[ring.ACK_STATUS] = 77
            bad.ring.control[ring.ACK_COMMAND] = 1
        case "command":
            bad.ring.control[ring.ACK_STATUS] = ring.AckStatus.DONE
            bad.ring.control[ring.ACK_COMMAND] = 1 << 63
        case "truncated":
            os.truncate(bad.path, 4096)
    good.write(2)
    _, blocks = bench.poll()
    assert indices(blocks) == [0, 1]
    assert bench.rings.counts.corrupt == 1
    assert len(bench.rings) == 1


def test_a_recreated_ring_is_read_from_its_start(bench: Bench) -> None:
    Writer(bench.directory).write(20)
    bench.poll()
    Writer(bench.directory).write(4)
    events, blocks = bench.poll()
    assert isinstance(events[0], RankAttached)
    assert indices(blocks) == [0, 1, 2, 3]


def test_the_end_of_an_external_rank_is_reported(bench: Bench) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writer = Writer(bench.directory, pid=process.pid)
    bench.poll()
    writer.write(3)
    process.communicate(b"\n")
    bench.rings._state_due = 0.0
    events, blocks = bench.poll()
    assert isinstance(events[-1], RankExited)
    assert (events[-1].exit_code, events[-1].signal) == (None, None), "nobody can know"
    assert indices(blocks) == [0, 1, 2]


MAPS_ITS_RING = (
    "import mmap, os, sys; file = open(input(), 'r+b'); ring = mmap.mmap(file.fileno(), 0);"
    "print(flush=True); input()"
)


def rank_process(bench: Bench, end: str, launcher: str = "") -> subprocess.Popen[bytes]:
    """Return a process that maps its ring and runs `end` after a line of input."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{MAPS_ITS_RING}; {end}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    metadata = {SLURM_JOB: "7"} if launcher == "slurm" else {"launcher": launcher}
    writer = Writer(bench.directory, pid=process.pid, metadata=metadata)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{writer.path}\n".encode())
    process.stdin.flush()
    process.stdout.readline()
    bench.poll()
    bench.rings._state_due = 0.0
    return process


def end_unreaped(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


STATUSES = [
    ("raise SystemExit(3)", (3, None)),
    ("os.kill(os.getpid(), 9)", (None, signal.SIGKILL)),
]


@pytest.mark.parametrize(("end", "expected"), STATUSES)
def test_the_end_of_a_rank_is_reported_before_its_parent_asks_for_it(
    bench: Bench, end: str, expected: tuple[int | None, int | None]
) -> None:
    """The parent may be a launcher that only waits for another rank."""
    with rank_process(bench, end) as process:
        end_unreaped(process)
        exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert (exited.exit_code, exited.signal) == expected


@pytest.mark.parametrize(("end", "expected"), [*STATUSES, ("os._exit(0)", (0, None))])
def test_the_exit_status_of_a_rank_is_known_after_its_parent_asked_for_it(
    bench: Bench, end: str, expected: tuple[int | None, int | None]
) -> None:
    process = rank_process(bench, end)
    process.communicate(b"\n")
    exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    has_pidfd_info_exit = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
    status = (exited.exit_code, exited.signal)
    assert status == (expected if has_pidfd_info_exit else (None, None))


@pytest.mark.parametrize(
    ("launcher", "reported", "expected"),
    [
        pytest.param("", None, (None, signal.SIGTERM), id="no torchrun"),
        pytest.param("torchrun", Ending(signal=15), (None, signal.SIGTERM), id="failed first"),
        pytest.param("torchrun", None, (None, None), id="ended after another rank"),
        pytest.param("torchrun", Ending(1, error="reset"), (1, None), id="after its own error"),
        pytest.param("", Ending(1, error="reset"), (1, None), id="ended by mp.spawn after it"),
        pytest.param("slurm", None, (None, None), id="ended by srun after another rank"),
    ],
)
def test_a_sigterm_that_torchrun_does_not_report_is_its_own(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    reported: Ending | None,
    expected: tuple[int | None, int | None],
) -> None:
    for name in ("STATUS_SECONDS", "UNREAPED_SECONDS"):
        monkeypatch.setattr(rank_end, name, 0.0)
    with rank_process(bench, "os.kill(os.getpid(), 15)", launcher) as process:
        end_unreaped(process)
        if reported is not None:
            write_ending(bench.directory / "job.g0.r0.ring", reported)
        exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert (exited.exit_code, exited.signal) == expected


def test_an_error_that_a_rank_reported_is_its_end_also_if_it_exits_with_0(bench: Bench) -> None:
    with rank_process(bench, "os._exit(0)") as process:
        end_unreaped(process)
        write_ending(bench.directory / "job.g0.r0.ring", Ending(1, error="KeyboardInterrupt"))
        exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert (exited.exit_code, exited.log_tail) == (1, "KeyboardInterrupt")


def test_a_rank_that_was_killed_is_reported_without_waiting_for_torchrun(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher finds only the first of ranks that are killed at once."""
    with rank_process(bench, "os.kill(os.getpid(), 9)", "torchrun") as process:
        end_unreaped(process)
        (attached,) = bench.rings._attached.values()
        assert not attached.end.is_awaited(has_finished=False)
        process.wait()  # as its launcher does; the kernel may keep the status no longer
        monkeypatch.setattr(ExitStatus, "_find", lambda _: None)
        exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert exited.signal == signal.SIGKILL


def test_the_python_stack_of_a_rank_that_a_fatal_signal_ended_is_reported(bench: Bench) -> None:
    fault = "import faulthandler; faulthandler.enable(open(path, 'w')); os.abort()"
    path = fault_path(bench.directory / "job.g0.r0.ring")
    with rank_process(bench, f"path = {str(path)!r}; {fault}") as process:
        process.communicate(b"\n")
        exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert exited.signal == signal.SIGABRT
    assert exited.log_tail.startswith("Fatal Python error: Aborted\nCurrent thread 0x")
    assert exited.log_tail.endswith('  File "<string>", line 1 in <module>\n')
    assert list(bench.directory.iterdir()) == []


@pytest.mark.parametrize("content", ["", "Fatal Python error: Aborted", "\0\xff no stack"])
def test_a_file_without_a_stack_is_no_report(bench: Bench, content: str) -> None:
    with rank_process(bench, "os.abort()") as process:
        fault_path(bench.directory / "job.g0.r0.ring").write_text(content)
        process.communicate(b"\n")
        exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert exited.log_tail == (f"{content}\n" if content.startswith("Fatal") else "")


def test_a_rank_that_a_signal_ended_in_good_order_is_reported_with_the_signal(
    bench: Bench,
) -> None:
    """As Lightning ends: with exit code 0, after the hooks wrote which signal it received."""
    process = rank_process(bench, "os._exit(0)")
    write_ending(bench.directory / "job.g0.r0.ring", Ending(signal=signal.SIGTERM))
    process.communicate(b"\n")
    exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert (exited.exit_code, exited.signal) == (None, signal.SIGTERM)


def test_the_end_of_a_rank_is_reported_as_its_launcher_reports_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_end, "stepped_ns", lambda: 0)  # it measures two clocks in turn
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writer = Writer(bench.directory, pid=process.pid, metadata={"launcher": "torchrun"})
    bench.poll()
    process.communicate(b"\n")
    bench.rings._state_due = 0.0
    assert not bench.poll()[0], "torchrun has not reported yet"
    found_ns = timeline_ns()
    write_ending(writer.path, Ending(error="ValueError: of the rank"))
    write_ending(writer.path, Ending(exit_code=1, error="from the launcher"))
    bench.rings._state_due = 0.0
    os.utime(ending_path(writer.path), ns=(raised_ns := found_ns - 10**9, raised_ns))
    exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert (exited.exit_code, exited.log_tail) == (1, "ValueError: of the rank")
    assert exited.since_error_ns == exited.time_ns - raised_ns
    assert exited.time_ns <= found_ns, "ranks that ended at once must not seem seconds apart"
    assert list(bench.directory.iterdir()) == []


@pytest.mark.parametrize(
    ("of_the_rank", "kills_torchrun", "is_gone"),
    [
        pytest.param("start_new_session=True", False, False, id="torchrun runs"),
        pytest.param("start_new_session=True", True, True, id="torchrun has ended"),
        pytest.param("", True, False, id="not known without a session of the rank"),
    ],
)
def test_a_rank_whose_torchrun_has_ended_too_is_reported_as_such(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    of_the_rank: str,
    kills_torchrun: bool,
    is_gone: bool,
) -> None:
    monkeypatch.setattr(rank_end, "STATUS_SECONDS", 0.0)
    starts_a_rank = (
        "import subprocess, sys, time;"
        f"rank = subprocess.Popen([sys.executable, '-c', sys.argv[1]], {of_the_rank});"
        "print(rank.pid, flush=True); rank.wait(); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts_a_rank, MAPS_ITS_RING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as torchrun:
        assert torchrun.stdin is not None
        assert torchrun.stdout is not None
        rank = int(torchrun.stdout.readline())
        writer = Writer(bench.directory, pid=rank, metadata={"launcher": "torchrun"})
        torchrun.stdin.write(f"{writer.path}\n".encode())
        torchrun.stdin.flush()
        torchrun.stdout.readline()
        bench.poll()
        if kills_torchrun:
            torchrun.kill()
            torchrun.wait()
        torchrun.stdin.close()
        wait_for(lambda: process_status(Path("/proc"), rank) is None, "the end of the rank")
        bench.rings._state_due = 0.0
        exited = bench.poll()[0][-1]
        torchrun.kill()
    assert isinstance(exited, RankExited)
    assert exited.launcher_gone is is_gone
    assert not writer.path.exists()


def test_a_launcher_that_reports_nothing_is_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_end, "STATUS_SECONDS", 0.0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Writer(bench.directory, pid=process.pid, metadata={"launcher": "torchrun"})
    bench.poll()
    process.communicate(b"\n")
    bench.rings._state_due = 0.0
    exited = bench.poll()[0][-1]
    assert isinstance(exited, RankExited)
    assert exited.exit_code is None


def test_a_torchrun_that_has_not_found_the_end_of_a_rank_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_end, "STATUS_SECONDS", 0.0)
    with rank_process(bench, "", "torchrun") as process:
        end_unreaped(process)
        assert not bench.poll()[0], "exit code 0 may also mean that the kernel does not show it"
    bench.rings._state_due = 0.0
    assert isinstance(bench.poll()[0][-1], RankExited)


def test_an_agent_that_stops_reports_the_ends_so_far(bench: Bench) -> None:
    """`paceline watch` ends its agent right after the command, which ended with its ranks."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    torchrun = {"launcher": "torchrun"}
    ended = Writer(bench.directory, rank=0, pid=process.pid, metadata=torchrun)
    Writer(bench.directory, rank=1, metadata=torchrun)
    bench.poll()
    write_ending(ended.path, Ending(error="ValueError: of the rank"))
    process.communicate(b"\n")
    bench.rings.report_ended()
    exits = [event for event in bench.poll()[0] if isinstance(event, RankExited)]
    assert [(event.rank, event.log_tail) for event in exits] == [(0, "ValueError: of the rank")]


_CONTAINED = """
import sys
from pathlib import Path
from test_rings import Writer
writer = Writer(Path(sys.argv[1]))
print(flush=True)
input()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="PID namespaces are root's to make")
def test_the_end_of_a_rank_in_a_container_is_reported(bench: Bench) -> None:
    """The ring has the pid in the container, here 1, which is another process on the node."""
    argv = [sys.executable, "-c", _CONTAINED, str(bench.directory)]
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *argv],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
            ),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert container.stdout is not None
    container.stdout.readline()
    bench.poll()
    (rank,) = bench.rings.local_ranks()
    assert Path(f"/proc/{rank.pid}/stat").read_text().split()[3] == str(container.pid), "its child"
    container.communicate(b"\n")
    bench.rings._state_due = 0.0
    events, _ = bench.poll()
    assert isinstance(events[-1], RankExited)
    assert events[-1].pid == 1, "as it says itself"


def test_a_rank_that_ended_unseen_is_reported_if_its_status_is_final(bench: Bench) -> None:
    """A rank without a final status may run in a container, where its pid is not visible."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    ended, silent = (Writer(bench.directory, rank=rank, pid=process.pid) for rank in range(2))
    ended.write(3)
    silent.write(2)
    ended.ring.state[ring.STATE_STATUS] = ring.Status.FINISHED
    events, blocks = bench.poll()  # processes are checked every half second
    more_events, more_blocks = bench.poll()
    exits = [event for event in events + more_events if isinstance(event, RankExited)]
    assert [(event.rank, event.exit_code) for event in exits] == [(0, 0)]
    assert sorted(indices(blocks + more_blocks)) == [0, 0, 1, 1, 2]
    assert [path.name for path in bench.directory.iterdir()] == [silent.path.name]


def test_a_rank_that_ended_without_an_agent_is_reported_with_its_last_spans(
    bench: Bench,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    writer = Writer(bench.directory, pid=process.pid)
    writer.write(5)
    bench.rings.attach_existing({RankKey("job", 0, 0): 3})
    events, blocks = bench.taken()
    assert isinstance(events[-1], RankExited)
    assert events[-1].pid == process.pid
    assert indices(blocks) == [3, 4]
    assert not writer.path.exists()


def test_a_rank_that_ended_without_an_agent_is_not_the_process_that_has_its_pid_now(
    bench: Bench,
) -> None:
    started_ns = time.monotonic_ns() // 2
    with subprocess.Popen(["sleep", "600"]) as other:
        pids = other.pid, os.getpid()
        writers = [
            Writer(bench.directory, rank=rank, pid=pid, started_ns=started_ns)
            for rank, pid in enumerate(pids)
        ]
        bench.rings.attach_existing()
        events, _ = bench.taken()
        other.kill()
    exits = [event for event in events if isinstance(event, RankExited)]
    assert [(event.rank, event.pid) for event in exits] == [(0, other.pid)]
    assert [rank.rank for rank in bench.rings.local_ranks()] == [1], "this process maps its ring"
    assert [writer.path.exists() for writer in writers] == [False, True]


def test_a_rank_replaced_by_the_next_run_is_reported_first(bench: Bench) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = Writer(bench.directory, pid=process.pid)
    bench.poll()
    first.write(2)
    process.communicate(b"\n")
    following = Writer(bench.directory)
    following.write(1)
    events, blocks = bench.poll()
    exited, attached = (event for event in events if isinstance(event, RankExited | RankAttached))
    assert isinstance(exited, RankExited)
    assert exited.pid == process.pid
    assert isinstance(attached, RankAttached)
    assert attached.identity.pid == os.getpid()
    assert indices(blocks) == [0, 1, 0]
    assert following.path.exists()


def test_two_simultaneous_runs_with_one_name_are_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    Writer(bench.directory)
    bench.poll()
    Writer(bench.directory)  # the same process started again
    bench.poll()
    assert "PACELINE_JOB" not in caplog.text
    with subprocess.Popen(["sleep", "600"]) as other:
        Writer(bench.directory, pid=other.pid)
        bench.poll()
        other.kill()
    assert f"processes {os.getpid()} and {other.pid} both claim to be rank 0 of job" in caplog.text


def test_rings_of_dead_ranks_are_deleted_and_live_ones_are_read_from_their_head(
    bench: Bench,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = Writer(bench.directory, rank=0, pid=process.pid)
    living = Writer(bench.directory, rank=1)
    living.write(9)
    bench.rings.attach_existing()
    assert not dead.path.exists()
    living.write(2)
    _, blocks = bench.poll()
    assert indices(blocks) == [9, 10]


def test_collectors_get_the_local_ranks(bench: Bench) -> None:
    Writer(bench.directory, rank=2)
    bench.poll()
    (only,) = bench.rings.local_ranks()
    assert (only.job, only.rank, only.pid) == ("job", 2, os.getpid())


def test_a_value_that_is_not_finite_never_reaches_the_server(bench: Bench) -> None:
    values = [1.0, float("nan"), float("inf")]
    bench.outbox.put_samples([Sample("m", {}, value, 1) for value in values])
    ((_, _, samples, _),) = bench.outbox.take()
    assert [sample.value for sample in samples] == [1.0]
