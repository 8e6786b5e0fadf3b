"""Measures the memory of a rank in some steps: the allocator's statistics, and what they hold.

The statistics of torch's CUDA allocator are counters of the host: reading them neither waits for
the device nor changes them. The peak is since the start, or since the script reset it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.cuda import device_in_use, initialized_cuda
from paceline.recorder import Recorder
from paceline.writer.interface import NO_CHUNK
from paceline_wire.spans import NONE_32, MemoryKind, Op

# Steps that are measured: two early ones, then each of this many.
EARLY_STEPS = (2, 7)
STEPS_BETWEEN = 128

_STATISTICS = {
    MemoryKind.ALLOCATED: "allocated_bytes.all.current",
    MemoryKind.PEAK: "allocated_bytes.all.peak",
    MemoryKind.RESERVED: "reserved_bytes.all.current",
    MemoryKind.INACTIVE: "inactive_split_bytes.all.current",
}


def measured_after(step: int) -> int:
    """Return the next step whose memory is measured; they count from 0 in this process."""
    early = [each for each in EARLY_STEPS if each > step]
    return early[0] if early else (step // STEPS_BETWEEN + 1) * STEPS_BETWEEN


class MemoryMeter:
    """The memory of one measured step. The thread that trains calls all methods."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._bytes: dict[int, int] = {}  # by `MemoryKind`
        self._optimizers: set[int] = set()

    def phase_ends(self, kind: int) -> None:
        """Note the allocated memory at the end of a phase of the step."""
        statistics = _statistics()
        if statistics:
            self._bytes[kind] = statistics[_STATISTICS[MemoryKind.ALLOCATED]]

    def optimizer_begins(self, optimizer: Any) -> None:
        """Count the parameters of an optimizer and their gradients, which exist at this time."""
        if id(optimizer) in self._optimizers:
            return
        self._optimizers.add(id(optimizer))
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._add(MemoryKind.PARAMETERS, parameters)
        self._add(MemoryKind.GRADIENTS, [each.grad for each in parameters])
        self._bytes.setdefault(MemoryKind.OPTIMIZER, 0)

    def optimizer_ends(self, optimizer: Any) -> None:
        """Count the state of an optimizer, which exists after its first step."""
        if id(optimizer) in self._optimizers:
            self._optimizers.discard(id(optimizer))
            states = optimizer.state.values()
            self._add(MemoryKind.OPTIMIZER, [each for state in states for each in state.values()])
        self.phase_ends(MemoryKind.AFTER_OPTIMIZER)

    def _add(self, kind: int, values: Iterable[Any]) -> None:
        self._bytes[kind] = self._bytes.get(kind, 0) + sum(map(_bytes_of, values))

    def write(self) -> None:
        """Record what was measured, with the allocator's statistics at the end of the step."""
        statistics = _statistics()
        if statistics:
            self._bytes |= {kind: statistics[name] for kind, name in _STATISTICS.items()}
        recorder = self._recorder
        for kind, size in self._bytes.items():
            write_value(recorder, Op.MEMORY, size, kind)


def write_value(recorder: Recorder, op: int, value: int, kind: int = 0) -> None:
    """Append a record of the current step that holds a value instead of a duration."""
    place = op | NO_CHUNK << 32, recorder.word2, NONE_32
    recorder.write(*place, int(value), kind, recorder.step_started_ns, 0)


def _statistics() -> dict[str, int]:
    """Return the allocator's statistics; empty without a device in use."""
    cuda = initialized_cuda()
    if cuda is None or (device := device_in_use(cuda)) is None:
        return {}
    statistics: dict[str, int] = cuda.memory_stats(device)
    return {name: statistics.get(name, 0) for name in _STATISTICS.values()}


def _bytes_of(value: Any) -> int:
    """Return the bytes of a tensor on this rank (of a DTensor: its shard); 0 for anything else."""
    tensor = getattr(value, "_local_tensor", value)
    return tensor.numel() * tensor.element_size() if hasattr(tensor, "element_size") else 0
