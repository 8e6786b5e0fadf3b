"""Emulated accelerators: each forward and backward of a microbatch takes a minimum time.

The given durations hold for a chunk of average size and sequences of full length. A chunk with more
layers takes longer, shorter sequences take less: a part of the time is linear in the length, as in
the linear layers, the other part quadratic, as in attention.

The remaining time is slept, because a GPU does not use the host's CPU. The host's own work counts
towards the duration; waiting for tensor-parallel peers does not and comes on top, as on a GPU. The
durations hold at the GPU's maximum SM clock. NVML reports the current clock before each kernel, so
a throttled GPU slows its rank as a real one would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from paceline_trainer.errors import GpuLostError
from paceline_trainer.faults import Faults
from paceline_trainer.parallel import TensorParallel
from paceline_trainer.settings import RankPlacement, TrainerSettings
from paceline_wire.spans import Op

try:
    import pynvml
except ImportError:  # optional: without it, emulated clocks never change
    pynvml = None

_log = logging.getLogger(__name__)

ATTENTION_SHARE = 0.5  # share of a full-length microbatch's time that is quadratic in the length


class KernelClock(Protocol):
    def slowdown(self) -> float:
        """Return maximum / current SM clock, at least 1."""
        ...


class SteadyClock:
    """A constant clock, for machines without NVML."""

    def slowdown(self) -> float:
        return 1.0


class NvmlClock:
    """The SM clock of one GPU. Raises pynvml.NVMLError if there is no driver or no such GPU."""

    def __init__(self, index: int) -> None:
        pynvml.nvmlInit()
        self.index = index
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._maximum_mhz = pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
        self._slowdown = 1.0

    def slowdown(self) -> float:
        """Return maximum / current SM clock. Raises GpuLostError if the GPU is lost."""
        try:
            now_mhz = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                raise GpuLostError(f"GPU {self.index} has fallen off the bus.") from error
            return self._slowdown  # after a failed reading, the last clock
        if now_mhz:
            self._slowdown = max(1.0, self._maximum_mhz / now_mhz)
        return self._slowdown


class Emulation:
    """Emulates kernels: use `with emulation.kernel(op, share):` around one microbatch's
    computation."""

    def __init__(
        self,
        seconds: dict[Op, float],
        clock: KernelClock,
        parallel: TensorParallel,
        faults: Faults | None = None,
    ) -> None:
        self.seconds = seconds
        self.clock = clock
        self.parallel = parallel
        self.faults = faults or Faults()

    @classmethod
    def off(cls) -> Emulation:
        return cls({}, SteadyClock(), TensorParallel())

    @contextmanager
    def kernel(self, op: Op, share: float = 1.0) -> Iterator[None]:
        """Emulate one kernel. `share`: its duration relative to the average one."""
        self.faults.before_kernel()
        started = time.perf_counter() - self.parallel.blocked_seconds
        yield
        if op in self.seconds:
            worked = time.perf_counter() - self.parallel.blocked_seconds - started
            time.sleep(self.remaining_seconds(op, worked, share))

    def remaining_seconds(self, op: Op, worked: float, share: float = 1.0) -> float:
        slowdown = self.clock.slowdown() * self.faults.kernel_factor()
        return max(0.0, self.seconds.get(op, 0.0) * share * slowdown - worked)


def length_share(lengths: Sequence[int], longest: int) -> float:
    """Return the cost of sequences of these lengths, relative to the same number of longest
    ones."""
    parts = [length / longest for length in lengths]
    whole = sum((1 - ATTENTION_SHARE) * part + ATTENTION_SHARE * part**2 for part in parts)
    return whole / len(parts)


def start_emulation(
    settings: TrainerSettings, place: RankPlacement, parallel: TensorParallel
) -> Emulation:
    """Return the emulation of this rank, and log it."""
    if settings.emulated_kernel_seconds is None:
        return Emulation.off()
    if settings.device != "cpu":
        if place.rank == 0:
            _log.warning("Kernels run on %s: --emulate-kernel-ms has no effect.", settings.device)
        return Emulation.off()
    forward, backward = settings.emulated_kernel_seconds
    if place.rank == 0:
        _log.info(
            "EMULATED kernels: each microbatch takes at least %g ms forward and %g ms backward.",
            forward * 1000,
            backward * 1000,
        )
    seconds = {Op.FORWARD: forward, Op.BACKWARD: backward}
    return Emulation(seconds, _clock(place), parallel, Faults.on(place))


def _clock(place: RankPlacement) -> KernelClock:
    if place.gpu_index is None:
        return SteadyClock()
    if pynvml is None:
        reason = "pynvml is not installed"
    else:
        try:
            return NvmlClock(place.gpu_index)
        except pynvml.NVMLError as error:
            reason = f"NVML error: {error}"
    if place.local_rank == 0:
        _log.warning("Emulated kernels always run at the full clock: %s.", reason)
    return SteadyClock()
