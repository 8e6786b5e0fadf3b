"""Copies of a process alone: what they contain, when they are kept, and what goes wrong."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoints.errors import OtherRunError
from paceline.checkpoints.layout import run_of, saved_checkpoints
from paceline.checkpoints.memory import schedule, slots
from paceline.checkpoints.memory.captures import Captures
from paceline.checkpoints.memory.copies import MemoryCopies, _JobRanks
from paceline.checkpoints.memory.deferred import DeferredCopy, TensorPlan
from paceline.checkpoints.memory.directory import CopyDirectory
from paceline.checkpoints.memory.held import HeldCopies
from paceline.checkpoints.memory.slots import NodeMemory
from paceline.checkpoints.memory.transfer import CopyServer
from paceline.checkpoints.parts import part_of
from paceline.checkpoints.rank_group import RankGroup
from paceline.environment import memory_settings
from paceline_wire.ring import RingReader
from tests import forked_python


@pytest.fixture(autouse=True)
def root(no_copies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have copies in a directory of the test, as often as before costs were exchanged: never."""
    monkeypatch.setenv("PACELINE_MEMORY_DIRECTORY", str(tmp_path / "memory"))
    for name in ("FIRST_POLL_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(schedule, name, 3600.0)
    return tmp_path / "memory"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def mapped_files(directory: Path) -> set[str]:
    """Return the files below a directory that this process has mapped, also deleted ones."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.partition("/")[2] for line in lines if f"{directory}/" in line}


class CopiedScript:
    """A training that is interrupted after some batches."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        defaults = {"every": 0, "model": self.model, "optimizer": self.optimizer}
        self.state = paceline.Checkpoints(directory, **defaults | options)
        self.copies = self.state._copies

    def train(self, stop_after: int, spoil: Callable[[int], None] = lambda step: None) -> Any:
        for number in paceline.steps(range(100), state=self.state):
            if self.state.step == stop_after:
                break
            self.wait()
            self.model(torch.full((3,), float(number))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            spoil(self.state.step + 1)
        self.state.wait()
        self.wait()
        return self

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        if self.copies is not None:
            until(lambda: self.copies.is_off or not self.copies._is_writing)

    def interrupt(self) -> CopyDirectory:
        """End as a killed process does: the copies stay."""
        assert self.copies is not None
        self.copies.close(remove=False)
        return self.copies._directory

    @property
    def resumed(self) -> tuple[str | None, int | None]:
        return self.state.resumed_from, self.state.resumed_step


def test_all_kinds_of_tensors_are_restored(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        return {
            "bits": torch.zeros(3, dtype=torch.bool),
            "half": torch.zeros(5, dtype=torch.bfloat16),
            "number": torch.zeros((), dtype=torch.float64),
            "empty": torch.zeros(0, 3),
            "turned": torch.zeros(4, 3).t(),
            "table": {"rows": torch.zeros(2), "names": ["a", ("b", None)]},
            "generator": torch.Generator().manual_seed(0),
        }

    first, second = parts(), parts()
    first["bits"][1] = True
    first["half"] += 1 / 3
    first["number"] += 1 / 7
    first["turned"].copy_(torch.arange(12.0).view(3, 4))
    first["table"] |= {"rows": torch.ones(2), "names": ["c"]}
    torch.rand(3, generator=first["generator"])
    CopiedScript(tmp_path / "saved", **first).train(3).interrupt()
    script = CopiedScript(tmp_path / "saved", **second).train(3)
    assert script.resumed == ("memory", 3)
    for name in ("bits", "half", "number", "empty", "turned"):
        assert torch.equal(second[name], first[name])
    assert second["table"]["rows"].tolist() == [1, 1]
    assert second["table"]["names"] == ["c"]
    assert second["generator"].get_state().equal(first["generator"].get_state())


def test_a_copied_directory_has_copies_of_its_own(tmp_path: Path) -> None:
    CopiedScript(tmp_path / "saved", every=3).train(5).interrupt()
    shutil.copytree(tmp_path / "saved", tmp_path / "branch")
    branch = CopiedScript(tmp_path / "branch").train(9)
    assert branch.resumed == ("disk", 3)
    branch.interrupt()
    assert CopiedScript(tmp_path / "saved").train(9).resumed == ("memory", 5)


def test_copies_are_deleted_when_the_training_is_complete(tmp_path: Path, root: Path) -> None:
    script = CopiedScript(tmp_path / "saved").train(9)
    assert len(list(root.glob("*/*.copy"))) == 3
    script.state._end_copies()
    assert list(root.iterdir()) == []


SCRIPT = """
import sys, time, torch, paceline
paceline.init()
weight = torch.zeros(3)
state = paceline.Checkpoints(sys.argv[1], every=0, weight=weight)
for number in paceline.steps(range(9), state=state):
    while state._copies._is_writing and not state._copies.is_off:
        time.sleep(0.001)
    if number == 7 and sys.argv[2] == "fail":
        raise RuntimeError("broken")
    if number == 7 and sys.argv[2] == "exit":
        sys.exit(1)
print(state.resumed_from, state.resumed_step)
"""


@pytest.mark.parametrize("error", ["fail", "exit"])
@pytest.mark.parametrize("has_agent", [True, False])
def test_copies_are_kept_if_an_error_ends_the_training(
    tmp_path: Path, root: Path, error: str, has_agent: bool
) -> None:
    def run(how: str) -> str:
        environment = os.environ | {"PACELINE_RING_DIRECTORY": str(tmp_path / "rings")}
        return forked_python.run(["-c", SCRIPT, tmp_path / "saved", how], environment).stdout

    if has_agent:
        (tmp_path / "rings").mkdir()
    assert run(error) == ""
    assert len(list(root.glob("*/*.copy"))) > 0
    assert run("end") == "memory 7\n"
    assert list(root.iterdir()) == []


HANDLED = """
import os, signal, sys, time, torch, paceline

def preempted(*_):
    raise KeyboardInterrupt if sys.argv[2] == "caught" else SystemExit(143)

signal.signal(signal.SIGTERM, preempted)

def main():
    weight = torch.zeros(3)
    state = paceline.Checkpoints(sys.argv[1], every=0, weight=weight)
    for number in paceline.steps(range(9), state=state):
        while state._copies._is_writing and not state._copies.is_off:
            time.sleep(0.001)
        if number == 7 and sys.argv[2] in ("raised", "caught"):
            os.kill(os.getpid(), signal.SIGTERM)
    print(state.resumed_from, state.resumed_step)

try:
    main()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("how", "status", "output"), [("raised", 143, ""), ("caught", 0, "interrupted\n")]
)
def test_copies_of_a_process_alone_are_kept_if_a_handler_of_a_signal_interrupts_its_loop(
    tmp_path: Path, root: Path, how: str, status: int, output: str
) -> None:
    environment = os.environ | {"PACELINE_RING_DIRECTORY": ""}
    ended = forked_python.run(["-c", HANDLED, tmp_path / "saved", how], environment)
    assert (ended.returncode, ended.stdout) == (status, output)
    assert len(list(root.glob("*/*.copy"))) > 0
    ended = forked_python.run(["-c", HANDLED, tmp_path / "saved", "end"], environment)
    assert ended.stdout == "memory 7\n"
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("stream", ["None", "object()", "types.MappingProxyType({})"])
def test_a_script_without_a_standard_error_keeps_its_copies_as_well(
    tmp_path: Path, root: Path, stream: str
) -> None:
    script = f"import sys, types; sys.stderr = {stream}\n{SCRIPT}"
    environment = os.environ | {"PACELINE_RING_DIRECTORY": ""}
    arguments = ["-c", script, tmp_path / "saved", "exit"]
    assert forked_python.run(arguments, environment).returncode in (1, 120)  # 120: by Python itself
    assert len(list(root.glob("*/*.copy"))) > 0


RANK_SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist, paceline
rank, directory, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=2)

def preempted(*_):
    sys.exit(0)

signal.signal(signal.SIGTERM, preempted)

def main():
    weight = torch.zeros(3)
    state = paceline.Checkpoints(f"{directory}/saved", every=0, memory=True, weight=weight)
    for epoch in state.epochs(2):
        for number in paceline.steps(range(5), state=state):
            while state._copies._is_writing and not state._copies.is_off:
                time.sleep(0.001)
            if number == 2:
                dist.barrier()  # both have files in the directory, which the last one removes
            if number == 3 and end == "caught":
                try:
                    sys.exit(1)
                except SystemExit:
                    pass
            if number == 3 and end == "break":
                break
            if number == 3 and end == "interrupted":
                raise KeyboardInterrupt
            if number == 3 and end == "raised":
                raise SystemExit(1)
            if number == 3 and end == "preempted":
                os.kill(os.getpid(), signal.SIGTERM)
        if end == "between epochs":
            os.kill(os.getpid(), signal.SIGTERM)
    assert not state._copies.is_off
    return state if "keep" in sys.argv else None

try:
    kept = main()
except KeyboardInterrupt:
    pass
if end == "interrupted":
    dist.destroy_process_group()
if end == "child" and os.fork() == 0:
    sys.exit(0)
if end == "child":
    os.wait()
if end == "exit":
    sys.exit(0)
if end in ("failed", "child"):
    sys.exit(1)
"""


@pytest.mark.parametrize("kept", ["keep", "drop"])
@pytest.mark.parametrize(
    ("end", "status", "remain"),
    [
        ("end", 0, False),
        ("exit", 0, False),
        ("caught", 0, False),
        ("break", 0, True),
        ("preempted", 0, True),
        ("between epochs", 0, True),
        ("interrupted", 0, True),
        ("raised", 1, True),
        ("failed", 1, True),
        ("child", 1, True),
    ],
)
def test_copies_of_ranks_that_do_not_destroy_their_process_group(
    tmp_path: Path, root: Path, end: str, status: int, remain: bool, kept: str
) -> None:
    """They were left in memory for a day after each training."""
    environment = os.environ | {"PACELINE_RING_DIRECTORY": "", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        forked_python.ForkedPython(["-c", RANK_SCRIPT, rank, tmp_path, end, kept], environment)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=150)
        assert (rank.returncode, errors) == (status, "")
    assert bool(list(root.glob("*/*.copy"))) is remain


def test_a_copy_with_nan_is_not_loaded(tmp_path: Path) -> None:
    def spoil(step: int) -> None:
        if step == 4:
            with torch.no_grad():
                script.model.weight[0, 0] = torch.nan

    script = CopiedScript(tmp_path / "saved", every=3)
    script.train(5, spoil).interrupt()
    assert CopiedScript(tmp_path / "saved").train(3).resumed == ("disk", 3)


def test_a_newer_checkpoint_on_disk_is_preferred(tmp_path: Path) -> None:
    CopiedScript(tmp_path / "saved", every=9).train(9).interrupt()
    assert CopiedScript(tmp_path / "saved").train(3).resumed == ("disk", 9)


def test_copies_are_not_loaded_after_the_user_went_back_to_an_earlier_checkpoint(
    tmp_path: Path,
) -> None:
    script = CopiedScript(tmp_path / "saved", every=7)
    script.train(17, lambda step: script.state.wait()).interrupt()  # copied at 16
    newest = saved_checkpoints(tmp_path / "saved")[0]
    assert newest.step == 14
    (tmp_path / "saved" / newest.name).rename(tmp_path / "elsewhere")
    assert CopiedScript(tmp_path / "saved").train(3).resumed == ("disk", 7)


def test_copies_of_another_model_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CopiedScript(tmp_path / "saved").train(5).interrupt()
    script = CopiedScript(tmp_path / "saved", model=nn.Linear(4, 2))
    for _ in script.state.begin([]):
        pass
    assert script.resumed == (None, None)
    assert "model.weight is float32 [2, 3] there and float32 [2, 4] here" in caplog.text


@pytest.mark.parametrize("adds_again", [True, False])
def test_copies_with_a_group_that_the_script_adds_in_a_later_epoch_are_loaded(
    tmp_path: Path, adds_again: bool
) -> None:
    def train(adds_in: tuple[int, ...], stop_after: int) -> CopiedScript:
        script = CopiedScript(tmp_path / "saved")
        added = nn.Parameter(torch.zeros(2))
        for epoch in script.state.epochs(3):
            if epoch in adds_in and len(script.optimizer.param_groups) == 1:
                script.optimizer.add_param_group({"params": [added]})
            for _ in paceline.steps(range(10), state=script.state):
                script.wait()
                (script.model(torch.ones(3)) + added).square().sum().backward()
                script.optimizer.step()
                if script.state.step == stop_after:
                    return script
        return script

    train((1, 2), stop_after=17).interrupt()
    if adds_again:
        assert train((1, 2), stop_after=18).resumed[0] == "memory"
    else:
        with pytest.raises(
            OtherRunError, match=r"parameter optimizer.group1.0, .* before paceline"
        ):
            train((), stop_after=18)


def test_copies_that_are_turned_off_take_none_of_a_later_generation_with_them(
    tmp_path: Path,
) -> None:
    first = CopiedScript(tmp_path / "saved").train(5)
    second = CopiedScript(tmp_path / "saved").train(9)
    first.copies._turn_off("its files were deleted")
    first.train(7)
    until(lambda: not first.copies._slots)
    assert [name.generation for name in second.interrupt().copies()] == [2, 2, 2]


def test_copies_outlive_a_script_that_fits_neither_them_nor_the_disk(tmp_path: Path) -> None:
    CopiedScript(tmp_path / "saved", every=4).train(7).interrupt()
    with pytest.raises(OtherRunError):
        CopiedScript(tmp_path / "saved", model=nn.Linear(4, 2)).train(1)
    assert CopiedScript(tmp_path / "saved").train(3).resumed == ("memory", 7)


def test_without_memory_training_continues_and_it_is_reported(
    tmp_path: Path,
    reader: RingReader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PACELINE_MEMORY_BYTES", "1000")
    script = CopiedScript(tmp_path / "saved", memory=True).train(9)
    assert script.state.step == 9
    until(lambda: reader.view().failed_saves == 1)  # reported after the copies are off
    assert "this rank may use 1,000" in caplog.text
    assert not list(tmp_path.glob("memory/*/*"))


def test_a_full_file_system_stops_no_training(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))\n"
    ended = forked_python.run(["-c", limit + SCRIPT, tmp_path / "saved", "end"], os.environ)
    assert ended.stdout == "None None\n", ended.stderr
    assert "Copies in memory: [Errno 27] File too large" in ended.stderr


def test_files_are_deleted_if_there_is_no_memory_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = []

    def reserve(descriptor: int, offset: int, size: int) -> None:
        reserved.append(size)
        if len(reserved) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(descriptor, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    script = CopiedScript(tmp_path / "saved").train(9)
    assert len(reserved) == 3
    assert script.copies.is_off
    until(lambda: mapped_files(tmp_path) == set())
    assert not list(tmp_path.glob("memory/*/*"))


def test_memory_is_freed_once_copies_are_off(tmp_path: Path) -> None:
    def turn_off(step: int) -> None:
        if step == 5:
            assert mapped_files(tmp_path)
            script.copies._turn_off("as a peer did")

    script = CopiedScript(tmp_path / "saved")
    script.train(9, turn_off)
    until(lambda: mapped_files(tmp_path) == set())
    assert not list(tmp_path.glob("memory/*/*"))


def test_a_training_that_the_script_drops_is_freed(tmp_path: Path, root: Path) -> None:
    def train(name: str, steps: int) -> tuple[weakref.ref[nn.Module], Any]:
        script = CopiedScript(tmp_path / name).train(steps)
        return weakref.ref(script.model), script.resumed

    model, _ = train("first", 9)
    until(lambda: gc.collect() >= 0 and model() is None)
    until(lambda: mapped_files(tmp_path) == set())
    model, resumed = train("first", 17)
    assert resumed == ("memory", 8), "after an error the script may train again"
    until(lambda: gc.collect() >= 0 and model() is None)
    train("second", 3)
    runs = [run_of(tmp_path / name) for name in ("first", "second")]
    assert [(root / run).exists() for run in runs] == [False, True]


def test_memory_that_is_locked_for_a_gpu_is_unlocked_before_it_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 1)
    locked: list[mmap.mmap] = []

    def pin(content: mmap.mmap, device: torch.device) -> bool:
        assert device == gpu
        locked.append(content)
        return True

    def unpin(content: mmap.mmap, device: torch.device) -> None:
        assert device == gpu
        locked.remove(content)

    monkeypatch.setattr(slots, "pin", pin)
    monkeypatch.setattr(slots, "unpin", unpin)
    monkeypatch.setattr(Captures, "gpu", gpu)
    table: dict[str, Any] = {"rows": torch.zeros(2)}

    def grow(step: int) -> None:
        if step == 7:
            table["rows"] = torch.ones(100_000)

    script = CopiedScript(tmp_path / "saved", table=table).train(17, grow)
    assert locked == [slot.content for slot in script.copies._slots]
    script.interrupt()
    assert locked == []


def test_an_object_that_cannot_be_copied_turns_copies_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = CopiedScript(tmp_path / "saved", sparse={"x": torch.zeros(2).to_sparse()}).train(9)
    assert script.state.step == 9
    assert script.copies.is_off
    assert "sparse.x is a torch.sparse_coo, which is not copied to memory" in caplog.text


def test_the_root_of_another_user_turns_copies_off(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    script = CopiedScript(tmp_path / "saved").train(5)
    assert script.copies is None
    assert "is not a directory of this user" in caplog.text
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_state_that_grows_is_copied_to_larger_files(tmp_path: Path) -> None:
    table: dict[str, Any] = {"rows": torch.zeros(2)}

    def grow(step: int) -> None:
        if step == 7:
            table["rows"] = torch.ones(100_000)

    CopiedScript(tmp_path / "saved", table=table).train(17, grow).interrupt()
    table = {"rows": torch.zeros(2)}
    assert CopiedScript(tmp_path / "saved", table=table).train(3).resumed == ("memory", 16)
    assert table["rows"].sum() == 100_000


def test_the_directory_of_a_run_is_bounded(tmp_path: Path, root: Path) -> None:
    for steps in (9, 17, 33):
        script = CopiedScript(tmp_path / "saved").train(steps)
        run = run_of(tmp_path / "saved")
        files = list((root / run).iterdir())
        assert len(files) <= 4, "three, and the one that was loaded"
        script.interrupt()


def _deferred_tensors(pending: DeferredCopy | None) -> int:
    return 0 if pending is None else sum(len(plan.live) for plan in pending._plans)


class LargeScript:
    """A training whose weights are large enough to be copied while the next step computes.

    The thread that copies begins after `before_backward`, or not at all.
    """

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = paceline.Checkpoints(
            directory, every=0, model=self.model, optimizer=self.optimizer
        )
        assert self.state._copies is not None
        self.copies = self.state._copies
        self.seen: dict[int, list[Tensor]] = {}  # the state after each step
        self.deferred: dict[int, int] = {}  # tensors that were not copied yet then
        self.may_copy = threading.Event()
        self.before_backward: Callable[[], None] = lambda: None

    def train(self, stop_after: int, *, thread_copies: bool = True) -> None:
        for number in paceline.steps(range(100), state=self.state):
            step, pending = self.state.step, self.copies._updates._pending
            self.deferred[step] = _deferred_tensors(pending)
            self.seen[step] = [each.clone() for each in self.tensors()]
            if step == stop_after:
                break
            self.before_backward()
            if thread_copies:
                self.may_copy.set()
            self.model(torch.arange(600.0).view(2, 300) + number).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if thread_copies:
                until(lambda: not self.copies._is_writing)
                self.may_copy.clear()
            until(lambda: self.copies._layout is None or bool(self.copies._slots))

    def tensors(self) -> list[Tensor]:
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        return [*self.model.state_dict().values(), *states]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LargeScript]:
    run, current = DeferredCopy.run, list[LargeScript]()

    def script() -> LargeScript:
        current[:] = [LargeScript(tmp_path / "saved")]
        return current[0]

    monkeypatch.setattr(
        DeferredCopy,
        "run",
        lambda copy, closed: current[0].may_copy.wait(60) and run(copy, closed),
    )
    return script


def check_resumed(script: LargeScript, step: int, expected: LargeScript) -> None:
    script.train(step)
    assert (script.state.resumed_from, script.state.resumed_step) == ("memory", step)
    for loaded, before in zip(script.seen[step], expected.seen[step], strict=True):
        assert torch.equal(loaded, before)


def test_weights_and_their_moments_are_copied_while_the_next_step_computes(
    large: Callable[[], LargeScript],
) -> None:
    script = large()
    script.train(9)
    assert script.deferred == {step: 3 if 2 <= step <= 8 else 0 for step in range(10)}
    script.copies.close(remove=False)
    check_resumed(large(), 8, script)


def test_the_training_copies_what_the_thread_did_not(large: Callable[[], LargeScript]) -> None:
    script = large()
    script.train(9, thread_copies=False)
    assert script.copies.skipped > 0
    script.may_copy.set()
    until(lambda: not script.copies._is_writing)
    script.copies.close(remove=False)
    copied = script.copies._directory.copies()
    assert len(copied) == 1
    check_resumed(large(), copied[0].step, script)


def test_the_thread_waits_for_the_piece_that_the_training_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = torch.randn(300, 300)
    target = torch.zeros(300, 300)
    plan = TensorPlan([target], [source], {(source.data_ptr(), source.numel()): source})
    copy = DeferredCopy([plan])
    thread = threading.Thread(target=copy.run, args=[threading.Event()])
    memmove = ctypes.memmove

    def slow_memmove(*piece: int) -> None:
        thread.start()  # finds no piece: this one is the only one
        thread.join(0.5)
        assert thread.is_alive()
        memmove(*piece)

    monkeypatch.setattr(ctypes, "memmove", slow_memmove)
    copy.finish()
    thread.join(60)
    assert copy.is_intact
    assert torch.equal(target, source)


@pytest.mark.parametrize("how", ["by .data", "in place"])
def test_a_copy_that_was_changed_by_other_means_is_discarded(
    how: str, large: Callable[[], LargeScript], caplog: pytest.LogCaptureFixture
) -> None:
    script = large()

    def change() -> None:
        weight = script.model[0].weight
        if script.state.step == 4 and how == "by .data":
            weight.data.mul_(0.5)
        elif script.state.step == 4:
            with torch.no_grad():
                weight[0, 0] = 0.0

    script.before_backward = change
    script.train(9)
    assert "The copy of step 4 in memory is discarded (rank 0)" in caplog.text
    assert script.deferred[8] == 0, "copies are made at once from now on"
    script.copies.close(remove=False)
    assert [name.step for name in script.copies._directory.copies()] == [6, 7, 8]
    check_resumed(large(), 8, script)


def test_an_optimizer_that_steps_unnoticed_is_copied_at_once(
    large: Callable[[], LargeScript],
) -> None:
    script = large()
    for handle in script.copies._updates._handles:
        handle.remove()
    script.train(9)
    assert set(script.deferred.values()) == {0}


@pytest.fixture
def silent_peer(tmp_path: Path) -> Any:
    """A holder that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


def test_a_peer_that_never_answers_delays_no_copy(
    tmp_path: Path, silent_peer: tuple[str, int]
) -> None:
    directory = CopyDirectory(tmp_path / "memory", "0" * 32)
    ranks = _JobRanks(RankGroup(None), [0], [0], [silent_peer], b"secret")
    reports: list[str] = []
    closed = threading.Event()
    memory = NodeMemory(1 << 30)
    copies = MemoryCopies(
        memory_settings(),
        directory,
        ranks,
        1,
        memory,
        None,
        HeldCopies(directory, 1, frozenset(), memory, closed),
        None,
        closed,
        Captures({"part": part_of("part", {"weight": torch.zeros(100)}, dict)}),
        reports.append,
    )
    copied = []
    for step in range(1, 65):
        if copies.step_ended(step):
            copied.append(step)
        until(lambda: not copies._is_writing)
        assert not copies.is_off
    assert copied == [*range(2, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8)]
    assert copies.skipped == 0
    assert copies._sending is not None, "the transfer still waits"
    assert [name.step for name in directory.copies()] == [2, 48, 56, 64]
    copies.close(remove=True)
    assert list((tmp_path / "memory").iterdir()) == []


def test_a_dead_peer_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    directory = CopyDirectory(tmp_path / "memory", "0" * 32)
    ranks = _JobRanks(RankGroup(None), [0], [0], [address], b"secret")
    reports: list[str] = []
    memory, closed = NodeMemory(1 << 30), threading.Event()
    copies = MemoryCopies(
        memory_settings(),
        directory,
        ranks,
        1,
        memory,
        None,
        HeldCopies(directory, 1, frozenset(), memory, closed),
        None,
        closed,
        Captures({"part": part_of("part", {"weight": torch.zeros(100)}, dict)}),
        reports.append,
    )
    for step in range(1, 2**12 + 1):
        if copies.step_ended(step):
            copies._send_after = 0.0
        until(lambda: not copies._is_writing and copies._sending is None)
        assert not copies.is_off
    assert copies._failures > 3
    assert len(reports) == 1
    assert "Connection refused" in reports[0]
    copies.close(remove=True)


def test_what_sending_and_receiving_cost_is_counted(tmp_path: Path) -> None:
    """One process sends its copies to itself, in another directory."""
    memory, closed = NodeMemory(1 << 30), threading.Event()
    held = HeldCopies(CopyDirectory(tmp_path / "held", "0" * 32), 1, frozenset({0}), memory, closed)
    server = CopyServer("127.0.0.1", b"secret", None, held.serve)
    address = ("127.0.0.1", server.port)
    reports: list[str] = []
    copies = MemoryCopies(
        memory_settings(),
        CopyDirectory(tmp_path / "memory", "0" * 32),
        _JobRanks(RankGroup(None), [0], [0], [address], b"secret"),
        1,
        memory,
        None,
        held,
        server,
        closed,
        Captures({"part": part_of("part", {"weight": torch.zeros(100)}, dict)}),
        reports.append,
    )
    for step in range(1, 9):
        copies.step_ended(step)
        until(lambda: not copies._is_writing and copies._sending is None)
    assert reports == []
    planned = copies._schedule
    until(lambda: len(planned._taking) == len(planned._sending) > 1)
    cost = planned._cost()
    assert cost is not None
    assert cost.sending_seconds == min(planned._sending) + min(planned._taking)
    copies.close(remove=True)
