"""Copies that a GPU makes while it computes. The host does not wait for them.

What may change at any time is copied on the script's stream, between the work of two steps. What
only an optimizer changes is copied on a stream of its own: before the optimizer's step the script's
stream waits for it, on the device.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.device_mark import DeviceMark

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.001
PROBE_BYTES = 64
_RELAXED_CAPTURE = 2  # cudaStreamCaptureModeRelaxed: the thread's calls are no part of a capture
_PORTABLE = 1  # cudaHostRegisterPortable: the pages are locked for all GPUs
_cuda: Any = torch.cuda

_streams: dict[torch.device, Any] = {}  # for copies; the training thread's alone


class DevicePlan:
    """The tensors of a part of a state that one GPU copies."""

    def __init__(self) -> None:
        self.now: tuple[list[Tensor], list[Tensor]] = ([], [])  # targets and sources
        self.deferred: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.probes: list[Tensor] = []  # bytes in the middle of each deferred one

    def add(self, target: Tensor, source: Tensor, *, is_deferred: bool) -> None:
        targets, sources = self.deferred if is_deferred else self.now
        targets.append(target)
        sources.append(source)
        if is_deferred:
            content = source.detach().view(-1).view(torch.uint8)
            begin = len(content) // 2
            self.probes.append(content[begin : begin + PROBE_BYTES])


def _copy(tensors: tuple[list[Tensor], list[Tensor]]) -> None:
    targets, sources = tensors
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


class DeviceCopy:
    """A copy of the tensors of one GPU, from its launch on."""

    def __init__(self, device: torch.device, plans: list[DevicePlan]) -> None:
        """Launch it between two steps.

        Args:
            device: the GPU.
            plans: for the parts of the state.
        """
        with torch.no_grad(), _cuda.device(device):
            if device not in _streams:
                _streams[device] = _cuda.Stream()
            own, script = _streams[device], _cuda.current_stream()
            self._device = device
            self._begun = _event(script)
            for plan in plans:
                _copy(plan.now)
            probes = [probe for plan in plans for probe in plan.probes]
            self._before = _to_host(probes)
            self._ready = _event(script)
            with _cuda.stream(own):
                own.wait_event(self._ready)
                for plan in plans:
                    _copy(plan.deferred)
                self._after = _to_host(probes)
                self._mark = DeviceMark(device)
            self._done = _event(own)
        self._reached: Any = None  # event: the script's stream waits from here on

    def hold_back(self) -> None:
        """Have what the script launches from now on wait for the copy, in the training thread.

        In the capture of a graph, which cannot depend on it, the host waits.
        """
        if self._reached is not None:
            return
        with _cuda.device(self._device):
            if is_capturing():
                self.wait(threading.Event())
                return
            script = _cuda.current_stream()
            self._reached = _event(script)
            script.wait_event(self._done)

    def wait(self, closed: threading.Event) -> bool:
        """Wait, in any thread, until the copy is in the host's memory; False: closed before."""
        while not self._mark.is_reached:
            if closed.wait(_POLL_SECONDS):
                return False
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the copy is in the host's memory."""
        return self._mark.is_reached

    @property
    def is_intact(self) -> bool:
        """Whether the tensors looked the same before and after the complete copy."""
        return torch.equal(self._before, self._after)

    def seconds(self) -> float | None:
        """Return for how long the script's stream did nothing else; None: not over yet.

        In the training thread.
        """
        if not self._done.query() or (self._reached is not None and not self._reached.query()):
            return None
        milliseconds = self._begun.elapsed_time(self._ready)
        if self._reached is not None:
            milliseconds += max(0.0, self._reached.elapsed_time(self._done))
        return float(milliseconds) / 1e3


def is_capturing() -> bool:
    """Return whether a graph of CUDA is captured from the current stream."""
    return bool(_cuda.is_initialized() and _cuda.is_current_stream_capturing())


def _event(stream: Any) -> Any:
    event = _cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _to_host(tensors: list[Tensor]) -> Tensor:
    """Return tensors of bytes, joined, in memory that the current stream will write."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    joined = torch.cat(tensors)
    target = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
    return target.copy_(joined, non_blocking=True)


def pin(content: mmap.mmap, device: torch.device) -> bool:
    """Lock the pages of memory for copies from a GPU; that only saves time.

    In a thread of Paceline, because it takes long. Return whether they are locked: then `unpin` is
    due before the memory is freed.
    """
    try:
        with _outside_of_graphs(device):
            error = int(_cuda.cudart().cudaHostRegister(*_place_of(content), _PORTABLE))
    except OSError:
        _log.debug("libcudart is not found: memory is not locked for copies")
        return False
    if error:
        _log.debug("the memory for copies is not locked: CUDA error %d", error)
    return not error


def unpin(content: mmap.mmap, device: torch.device) -> None:
    """Unlock the pages that `pin` has locked.

    Otherwise CUDA copies from and to these pages, and not the memory that is later mapped there.
    """
    with _outside_of_graphs(device):
        error = int(_cuda.cudart().cudaHostUnregister(_place_of(content)[0]))
    if error:
        _log.debug("the memory for copies is not unlocked: CUDA error %d", error)


def _place_of(content: mmap.mmap) -> tuple[int, int]:
    return torch.frombuffer(content, dtype=torch.uint8).data_ptr(), len(content)


@contextmanager
def _outside_of_graphs(device: torch.device) -> Iterator[None]:
    """Have calls of this thread break no capture of a graph. Raises OSError without libcudart.

    A thread begins with GPU 0, where the first call would create a context of hundreds of MB.
    """
    library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    with _cuda.device(device):
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
