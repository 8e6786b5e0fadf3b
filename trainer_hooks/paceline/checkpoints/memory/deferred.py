"""Copies that are made while the next step computes, until an optimizer changes what they copy.

Parameters and the states of optimizers are most of a state, and change only when an optimizer
steps. So the training thread copies the rest between two steps, and a thread of Paceline copies
these. A hook before the optimizer's step finishes what is left.

A script may also change them before that: in place, which torch counts (`Tensor._version`), or by
`.data`, which it does not. So a few bytes in the middle of each tensor are compared as well: those
between the steps with those after the copy. A copy that was changed meanwhile is discarded.

Tensors of a GPU are copied by the GPU (`device.py`).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from time import monotonic, sleep
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoints.memory.device import (
    PROBE_BYTES,
    DeviceCopy,
    DevicePlan,
    is_capturing,
)
from paceline.checkpoints.memory.file import local_of

LEAST_BYTES = 64 * 1024  # a smaller tensor is copied at the boundary
_PIECE_BYTES = 4 << 20  # that the training thread may wait for
_POLL_SECONDS = 0.001

# By address and number of elements of this rank's part: what the script changes.
LiveTensors: TypeAlias = dict[tuple[int, int], Tensor]


class Updates:
    """The optimizers of a script: what only they change, and when."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._stepped: set[int] = set()  # numbers of optimizers, since the last `live_tensors`
        self._live: tuple[Hashable, LiveTensors] | None = None
        self._pending: DeferredCopy | None = None
        self._last: DeferredCopy | None = None
        self._waited = 0.0
        self._handles = [
            optimizer.register_step_pre_hook(partial(self._before_step, number))
            for number, optimizer in enumerate(self._optimizers)
        ]

    def _before_step(self, number: int, *_: object) -> None:
        if not is_capturing():  # the graph will step without this hook
            self._stepped.add(number)
        self._finish()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            started = monotonic()
            pending.finish()
            self._waited += monotonic() - started

    def live_tensors(self, version: Hashable) -> LiveTensors:
        """Return what only the next steps of the optimizers change.

        An optimizer that did not call its hook since the last time may step unnoticed: its tensors
        are left out. The result is the same object as long as it and `version`, of the tensors, are
        the same.
        """
        stepped, self._stepped = frozenset(self._stepped), set()
        if self._live is None or self._live[0] != (stepped, version):
            self._live = (stepped, version), self._find_live(stepped)
        return self._live[1]

    def _find_live(self, numbers: Iterable[int]) -> LiveTensors:
        found: LiveTensors = {}
        for number in numbers:
            optimizer = self._optimizers[number]
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            states = [each for state in optimizer.state.values() for each in state.values()]
            for tensor in (*parameters, *states):
                if isinstance(tensor, Tensor):
                    local = local_of(tensor)
                    found[local.data_ptr(), local.numel()] = tensor
        return found

    def finish_before_step(self, copy: DeferredCopy) -> None:
        """Have the next step of an optimizer finish a copy."""
        self._pending = self._last = copy

    def take_waited(self) -> float:
        """Return the seconds for which the training has waited for copies since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited + (0.0 if self._last is None else self._last.take_device_seconds())

    def close(self, seconds: float = 0.0) -> bool:
        """End, in the training thread. Return whether no GPU copies any more, after a wait."""
        self._finish()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self.drop(seconds)

    def drop(self, seconds: float = 0.0) -> bool:
        """End in any thread: the hooks stay, and do nothing. Return what `close` does."""
        last, self._pending, self._last, self._live = self._last, None, None, None
        return last is None or last.is_on_host(seconds)


class DeferredCopy:
    """A copy that a thread makes, and that the training thread finishes before it changes anything.

    The training thread copies the pieces that are left itself, so that it never waits for a thread
    that does not run. `memmove` releases the GIL and starts no threads of torch.
    """

    def __init__(self, plans: Iterable[TensorPlan]) -> None:
        """Begin, in the training thread: what may change at any time is copied now."""
        self._plans = list(plans)
        devices = {device for plan in self._plans for device in plan.devices}
        self._devices = [
            DeviceCopy(device, [p.devices[device] for p in self._plans if device in p.devices])
            for device in devices
        ]
        self._untimed = list(self._devices)
        for plan in self._plans:
            plan.copy_now()
        self._pieces = deque(piece for plan in self._plans for piece in plan.pieces)
        self._before = self._fingerprint()
        self._in_progress = threading.Lock()  # held by the thread, for one piece at a time
        self._finishing = threading.Lock()  # held by the training thread until it has no piece left
        self.is_intact: bool | None = None  # None: not complete yet

    def run(self, closed: threading.Event) -> bool:
        """Copy, in a thread. Return whether all is copied; it is not if `closed` is set before."""
        is_left = True
        while is_left:
            with self._in_progress:
                is_left = self._copy_piece()
        if not all(each.wait(closed) for each in self._devices):
            return False
        with self._finishing:
            self._check()
        if not all(each.is_intact for each in self._devices):
            self.is_intact = False
        return True

    def finish(self) -> None:
        """Copy what is left, in the training thread."""
        with self._finishing:
            while self._copy_piece():
                pass
            for each in self._devices:
                each.hold_back()
            with self._in_progress:  # the piece of the other thread, if it has one
                self._check()

    def is_on_host(self, seconds: float) -> bool:
        """Wait for the GPUs. Return False if one still copies after so long."""
        until = monotonic() + seconds
        while not all(each.is_complete for each in self._devices):
            if monotonic() >= until:
                return False
            sleep(_POLL_SECONDS)
        return True

    def take_device_seconds(self) -> float:
        """Return what the script's streams have waited for, once it is known."""
        seconds = {each: each.seconds() for each in self._untimed}
        self._untimed = [each for each, known in seconds.items() if known is None]
        return sum(filter(None, seconds.values()))

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
        versions = [each._version for plan in self._plans for each in plan.live]
        return versions, [ctypes.string_at(*place) for plan in self._plans for place in plan.probed]


class TensorPlan:
    """Which tensors are copied at once, and which while the next step computes."""

    def __init__(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], live: LiveTensors
    ) -> None:
        """Make the plan, for as long as no tensor is at another address.

        Args:
            targets: in the host's memory.
            sources: the tensors of this rank.
            live: what only the next step of an optimizer changes.
        """
        self.pieces: list[tuple[int, int, int]] = []  # target, source, bytes
        self.probed: list[tuple[int, int]] = []  # address, bytes
        self.live: list[Tensor] = []  # those which the script changes, of the deferred ones
        self.devices: dict[torch.device, DevicePlan] = {}
        self._sources: list[Tensor] = []  # their memory is read until a copy is complete
        self._now: tuple[list[Tensor], list[Tensor]] = ([], [])
        for target, source in zip(targets, sources, strict=True):
            changed = live.get((source.data_ptr(), source.numel()))
            is_deferred = changed is not None and _is_deferrable(source)
            if changed is not None and is_deferred:
                self.live.append(changed)
            if source.is_cuda:
                on_device = self.devices.setdefault(source.device, DevicePlan())
                on_device.add(target, source, is_deferred=is_deferred)
            elif is_deferred:
                self._defer(target, source)
            else:
                self._now[0].append(target)
                self._now[1].append(source)

    def _defer(self, target: Tensor, source: Tensor) -> None:
        to, at, size = target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize
        for offset in range(0, size, _PIECE_BYTES):
            self.pieces.append((to + offset, at + offset, min(_PIECE_BYTES, size - offset)))
        self.probed.append((at + size // 2, min(PROBE_BYTES, size - size // 2)))
        self._sources.append(source)

    def copy_now(self) -> None:
        """Copy what may change at any time, of the host's memory."""
        if self._now[0]:
            with torch.no_grad():
                torch._foreach_copy_(*self._now)


def _is_deferrable(tensor: Tensor) -> bool:
    size = tensor.numel() * tensor.itemsize
    is_reachable = tensor.is_cpu or tensor.is_cuda
    return is_reachable and tensor.is_contiguous() and size >= LEAST_BYTES
