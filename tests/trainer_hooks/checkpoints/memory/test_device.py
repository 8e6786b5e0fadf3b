"""The order of a GPU's copies. Its streams are simulated; `tests/gpu` has the real ones."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.memory import device
from paceline.checkpoints.memory.device import DeviceCopy, DevicePlan

GPU = torch.device("cuda", 0)


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self.is_reached = False

    def record(self, stream: Stream) -> None:
        stream.launch(lambda: setattr(self, "is_reached", True))

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, other: Event) -> float:
        return 2.0


class Stream:
    """Launched calls; an event instead of one is waited for."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object] | Event] = deque()

    def launch(self, call: Callable[[], object]) -> None:
        self.queue.append(call)

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def run(self) -> None:
        """Run what need not wait."""
        while self.queue:
            first = self.queue[0]
            if isinstance(first, Event) and not first.is_reached:
                return
            self.queue.popleft()
            if not isinstance(first, Event):
                first()


class Cuda:
    Event = Event
    Stream = Stream

    def __init__(self) -> None:
        self.script = self.current = Stream()
        self.is_capturing = False
        self.gpu = GPU  # the current one

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def device(self, which: torch.device) -> Iterator[None]:
        before, self.gpu = self.gpu, which
        yield
        self.gpu = before

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing


class Mark:
    def __init__(self, cuda: Cuda) -> None:
        self.is_reached = False
        cuda.current.launch(lambda: setattr(self, "is_reached", True))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda, copy = Cuda(), device._copy

    def to_host(tensors: list[Tensor]) -> Tensor:
        target = torch.empty(sum(map(len, tensors)), dtype=torch.uint8)
        cuda.current.launch(lambda: target.copy_(torch.cat(tensors)))
        return target

    monkeypatch.setattr(device, "_cuda", cuda)
    monkeypatch.setattr(device, "_streams", {})
    monkeypatch.setattr(device, "_copy", lambda tensors: cuda.current.launch(lambda: copy(tensors)))
    monkeypatch.setattr(device, "_to_host", to_host)
    monkeypatch.setattr(device, "DeviceMark", lambda gpu: Mark(cuda))
    return cuda


class State:
    """A buffer, which may change at any time, and a weight, which an optimizer changes."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.buffer, self.weight = torch.zeros(4), torch.zeros(300, 300)
        self.copied = torch.full((4,), -1.0), torch.full((300, 300), -1.0)
        plan = DevicePlan()
        plan.add(self.copied[0], self.buffer, is_deferred=False)
        plan.add(self.copied[1], self.weight, is_deferred=True)
        self.change(self.buffer)  # the work of the step before
        self.change(self.weight)
        self.copy = DeviceCopy(GPU, [plan])

    def change(self, tensor: Tensor) -> None:
        self.cuda.script.launch(lambda: tensor.add_(1))

    def run(self, *, script_first: bool) -> None:
        (own,) = device._streams.values()
        for _ in range(3):
            for stream in (self.cuda.script, own) if script_first else (own, self.cuda.script):
                stream.run()


@pytest.mark.parametrize("script_first", [False, True])
def test_what_changes_is_copied_before(cuda: Cuda, *, script_first: bool) -> None:
    state = State(cuda)
    state.change(state.buffer)  # the forward pass
    state.copy.hold_back()
    state.change(state.weight)  # the optimizer
    assert state.copy.seconds() is None
    state.run(script_first=script_first)
    assert state.copied[0].eq(1).all()
    assert state.copied[1].eq(1).all()
    assert state.buffer.eq(2).all()
    assert state.weight.eq(2).all()
    assert state.copy.wait(threading.Event())
    assert state.copy.is_intact
    assert state.copy.seconds() == 0.004, "before the next step, and before the optimizer"


def test_a_change_that_nothing_announced_is_noticed(cuda: Cuda) -> None:
    state = State(cuda)
    state.change(state.weight)
    state.run(script_first=True)
    assert state.copy.wait(threading.Event())
    assert not state.copy.is_intact


def test_a_graph_that_is_captured_depends_on_no_copy(cuda: Cuda) -> None:
    state = State(cuda)
    (own,) = device._streams.values()
    cuda.is_capturing = True
    waiting = threading.Timer(0.05, lambda: state.run(script_first=True))
    waiting.start()
    state.copy.hold_back()
    assert state.copied[1].eq(1).all(), "the host has waited"
    assert not own.queue
    assert not cuda.script.queue


def test_a_copy_of_a_gpu_that_hangs_ends_with_the_training(cuda: Cuda) -> None:
    state = State(cuda)
    closed = threading.Event()
    closed.set()
    assert not state.copy.wait(closed)


def test_memory_is_locked_on_the_gpu_of_the_state(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    modes: list[int] = []

    class Runtime:
        """The calls of the CUDA runtime."""

        def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802 - CUDA's
            modes.append(mode._obj.value)
            mode._obj.value = 0  # that of the thread

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            calls.append(("register", cuda.gpu, address, size))
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            calls.append(("unregister", cuda.gpu, address))
            return 0

    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: Runtime())
    monkeypatch.setattr(cuda, "cudart", Runtime, raising=False)
    gpu = torch.device("cuda", 3)
    content = mmap.mmap(-1, 4096)
    assert device.pin(content, gpu)
    device.unpin(content, gpu)
    address = calls[0][2]
    assert calls == [("register", gpu, address, 4096), ("unregister", gpu, address)]
    assert modes == [2, 0, 2, 0], "and the thread's own again"
