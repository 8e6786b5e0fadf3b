"""Copies that are made while the next step computes, until an optimizer changes what they copy.

Parameters and the states of optimizers are most of a state, and change only when an optimizer
steps. So the training thread copies the rest between two steps, and a thread of Paceline copies
these. A hook before the optimizer's step finishes what is left.

A script may also change them before that: in place, which torch counts (`Tensor._version`), or by
`.data`, which it does not. So a few bytes in the middle of each tensor are compared as well: those
between the steps with those after the copy. A copy that was changed meanwhile is discarded.

Tensors of a GPU are copied at once: the training thread waits.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, thread_time
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoints.memory.file import local_of

LEAST_BYTES = 64 * 1024  # a smaller tensor is copied at the boundary
_PIECE_BYTES = 4 << 20  # that the training thread may wait for
_PROBE_BYTES = 64

# By address and number of elements of this rank's part: what the script changes.
LiveTensors: TypeAlias = dict[tuple[int, int], Tensor]


class DeferredTensor(NamedTuple):
    target: Tensor  # its place in the file
    source: Tensor  # the part that this rank has
    live: Tensor  # which the script changes


class Updates:
    """The optimizers of a script: what only they change, and when."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._stepped: set[int] = set()  # numbers of optimizers, since the last `live_tensors`
        self._pending: DeferredCopy | None = None
        self._waited = 0.0
        self._handles = [
            optimizer.register_step_pre_hook(partial(self._before_step, number))
            for number, optimizer in enumerate(self._optimizers)
        ]

    def _before_step(self, number: int, *_: object) -> None:
        self._stepped.add(number)
        self._finish()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            started = monotonic()
            pending.finish()
            self._waited += monotonic() - started

    def live_tensors(self) -> LiveTensors:
        """Return what only the next steps of the optimizers change.

        An optimizer that did not call its hook since the last time may step unnoticed: its tensors
        are left out.
        """
        found: LiveTensors = {}
        for number in self._stepped:
            optimizer = self._optimizers[number]
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            states = [each for state in optimizer.state.values() for each in state.values()]
            for tensor in (*parameters, *states):
                if isinstance(tensor, Tensor):
                    local = local_of(tensor)
                    found[local.data_ptr(), local.numel()] = tensor
        self._stepped.clear()
        return found

    def finish_before_step(self, copy: DeferredCopy) -> None:
        """Have the next step of an optimizer finish a copy."""
        self._pending = copy

    def take_waited(self) -> float:
        """Return the seconds for which optimizers have waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        self._finish()
        for handle in self._handles:
            handle.remove()


class DeferredCopy:
    """A copy that a thread makes, and that the training thread finishes before it changes anything.

    The training thread copies the pieces that are left itself, so that it never waits for a thread
    that does not run. `memmove` releases the GIL and starts no threads of torch.
    """

    def __init__(self, tensors: Sequence[DeferredTensor]) -> None:
        self._tensors = tensors  # their memory is read until the copy is complete
        self._pieces: deque[tuple[int, int, int]] = deque()  # target, source, bytes
        self._probed: list[tuple[int, int]] = []  # address, bytes
        for target, source, _ in tensors:
            to, at, size = target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize
            for offset in range(0, size, _PIECE_BYTES):
                self._pieces.append((to + offset, at + offset, min(_PIECE_BYTES, size - offset)))
            self._probed.append((at + size // 2, min(_PROBE_BYTES, size - size // 2)))
        self._before = self._fingerprint()
        self._in_progress = threading.Lock()  # held for one piece at a time
        self.is_intact: bool | None = None  # None: not complete yet

    def run(self) -> float:
        """Copy, in a thread. Return what that costs the training, in seconds."""
        started = thread_time()
        is_left = True
        while is_left:
            with self._in_progress:
                is_left = self._copy_piece()
        with self._in_progress:
            self._check()
        return _wanted_share() * (thread_time() - started)

    def finish(self) -> None:
        """Copy what is left, in the training thread."""
        while self._copy_piece():
            pass
        with self._in_progress:  # the piece of the other thread, if it has one
            self._check()

    def _copy_piece(self) -> bool:
        try:
            piece = self._pieces.popleft()
        except IndexError:
            return False
        ctypes.memmove(*piece)
        return True

    def _check(self) -> None:
        if self.is_intact is None:
            self.is_intact = self._before == self._fingerprint()

    def _fingerprint(self) -> tuple[list[int], list[bytes]]:
        """Return what differs once a tensor is changed: its version, or the bytes in its middle."""
        versions = [each.live._version for each in self._tensors]
        return versions, [ctypes.string_at(*place) for place in self._probed]


def _wanted_share(pressure: Path = Path("/proc/pressure/cpu")) -> float:
    """Return how likely something waits for the processor that a thread of Paceline uses.

    It is the share of the last ten seconds in which something waited for one (PSI), or where the
    kernel does not count that, the load average over the processors.
    """
    try:
        _, average, *_ = pressure.read_text().split()
        return float(average.removeprefix("avg10=")) / 100
    except (OSError, ValueError):
        return min(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


_stream: Any = None  # a stream of the device, for copies to the host


def _copy_from_device(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of a GPU, and wait until it is done."""
    global _stream
    cuda: Any = torch.cuda
    if _stream is None:
        _stream = cuda.Stream()
    _stream.wait_stream(cuda.current_stream())
    with cuda.stream(_stream):
        torch._foreach_copy_(targets, sources, non_blocking=True)
    _stream.synchronize()


def begin_copy(
    targets: Sequence[Tensor], sources: Sequence[Tensor], live: LiveTensors
) -> DeferredCopy:
    """Copy what may change at any time, and return the rest as a copy that is not made yet.

    Args:
        targets: in the host's memory.
        sources: the tensors of this rank.
        live: what only the next step of an optimizer changes.
    """
    now: dict[bool, tuple[list[Tensor], list[Tensor]]] = {True: ([], []), False: ([], [])}
    later = []
    for target, source in zip(targets, sources, strict=True):
        changed = live.get((source.data_ptr(), source.numel()))
        if changed is not None and _is_deferrable(source):
            later.append(DeferredTensor(target, source, changed))
        else:
            for tensors, tensor in zip(now[source.is_cuda], (target, source), strict=True):
                tensors.append(tensor)
    with torch.no_grad():
        if now[True][0]:
            _copy_from_device(*now[True])
        if now[False][0]:
            torch._foreach_copy_(*now[False])
    return DeferredCopy(later)


def _is_deferrable(tensor: Tensor) -> bool:
    size = tensor.numel() * tensor.itemsize
    return tensor.is_cpu and tensor.is_contiguous() and size >= LEAST_BYTES
