"""Field values: many numbers of a GPU in one call of the driver.

Each field of a batch has its own result; an unsupported field is left out of the next batch.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline_agent.collect.nvml.driver import GONE, field_values, pynvml
from paceline_wire import metric_names

ALL_LINKS = 0xFFFFFFFF  # nvml.h: a scope of UINT_MAX sums over the links
# nvmlFieldValue_t: field, scope, timestamp, latency, type, result, value. Unpacked at once, because
# each attribute access of pynvml's structures costs as much as the driver call.
_VALUE = struct.Struct("=IIqqIi8s")
_TYPES = tuple(struct.Struct(code) for code in ("=d", "=I", "=Q", "=Q", "=q", "=i", "=H"))
# nvmlValueType_t of unsigned integers -> their size. All bits set mean no value (nvml.h,
# NVML_VALUE_NOT_AVAILABLE, and 0xFFFFFFFF as some drivers return it, also in 64 bits).
_UNSIGNED = {1: 4, 2: 8, 3: 8, 6: 2}
_NO_VALUES = tuple(bytes([0xFF] * size) for size in (2, 4, 8))
_NO_VALUE_32 = b"\xff" * 4 + bytes(4)
_NOTHING = (0, 0, 0, 0, bytes(8))  # all members except field and scope
_PERMANENT = frozenset({2, 3, 4, 13, 25, 26})  # nvmlReturn_t values of driver.UNSUPPORTED


class FieldRow(NamedTuple):
    """A field of nvml.h (NVML_FI_DEV_*) and the value made from it."""

    name: str
    field: int
    scale: float = 1.0  # factor from the driver's unit to the metric's
    scope: int = 0
    extra: tuple[tuple[str, str], ...] | None = None


class FieldReading(NamedTuple):
    name: str
    number: float
    extra: tuple[tuple[str, str], ...] | None
    scope: int
    time_us: int  # CLOCK_REALTIME of the driver's reading; 0: not reported


class Fields:
    """A batch of fields of one GPU."""

    def __init__(self, rows: Sequence[FieldRow]) -> None:
        self._all = tuple(rows)
        self.reset()

    def reset(self) -> None:
        self._keep(self._all)

    def _keep(self, rows: Sequence[FieldRow]) -> None:
        self._rows = rows
        self._asked = b"".join(_VALUE.pack(row.field, row.scope, *_NOTHING) for row in rows)
        self._result = ctypes.create_string_buffer(self._asked, len(self._asked))

    def __call__(self, handle: Any) -> list[FieldReading]:
        if not self._rows:
            return []
        self._result.raw = self._asked
        field_values(handle, len(self._rows), self._result)
        answers, kept, failed = [], [], None
        values = _VALUE.iter_unpack(self._result)
        for row, (_, _, time_us, _, kind, result, content) in zip(self._rows, values, strict=True):
            if result == 0:
                number = _number(kind, content)
                if number is not None:
                    name, _, scale, scope, extra = row
                    answers.append(FieldReading(name, number * scale, extra, scope, time_us))
            elif result not in _PERMANENT:
                failed = pynvml.NVMLError(result)
                if isinstance(failed, GONE):
                    raise failed
            if result not in _PERMANENT:
                kept.append(row)
        if len(kept) < len(self._rows):
            self._keep(kept)
        if failed is not None and not answers:
            raise failed
        return answers


def _number(kind: int, content: bytes) -> float | None:
    """Return a field's value; None if it has none or an unknown type."""
    if not 0 <= kind < len(_TYPES):
        return None
    size = _UNSIGNED.get(kind)
    if size is not None and (content[:size] in _NO_VALUES or content == _NO_VALUE_32):
        return None
    number: float = _TYPES[kind].unpack_from(content)[0]
    return number if math.isfinite(number) else None


def _throttled(reason: str) -> str:
    return f"DCGM_FI_DEV_CLOCKS_EVENT_REASON_{reason}_NS"


FAST: tuple[FieldRow, ...] = (
    FieldRow(metric_names.GPU_ECC_SBE_VOL_TOTAL, 3),
    FieldRow(metric_names.GPU_ECC_DBE_VOL_TOTAL, 4),
    FieldRow(metric_names.GPU_POWER_VIOLATION, 74),
    FieldRow(metric_names.GPU_THERMAL_VIOLATION, 75),
    FieldRow("DCGM_FI_DEV_SYNC_BOOST_VIOLATION", 76),
    FieldRow("DCGM_FI_DEV_MEMORY_TEMP", 82),
    FieldRow("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 83),
    FieldRow(metric_names.PCIE_REPLAY_COUNTER, 94),
    FieldRow("DCGM_FI_DEV_POWER_USAGE_INSTANT", 186, 0.001),
    FieldRow("paceline_gpu_pcie_transmitted_bytes_total", 197),
    FieldRow("paceline_gpu_pcie_received_bytes_total", 198),
    FieldRow(_throttled("SW_THERM_SLOWDOWN"), 269),
    FieldRow(_throttled("HW_THERM_SLOWDOWN"), 270),
    FieldRow(_throttled("HW_POWER_BRAKE_SLOWDOWN"), 271),
)

_MARGIN = "paceline_gpu_temperature_threshold_margin_celsius"  # replaces DCGM_FI_DEV_GPU_TEMP_LIMIT

SLOW: tuple[FieldRow, ...] = (
    FieldRow(metric_names.GPU_ECC_CURRENT, 1),
    FieldRow("DCGM_FI_DEV_ECC_PENDING", 2),
    FieldRow("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", 5),
    FieldRow("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", 6),
    FieldRow("DCGM_FI_DEV_RETIRED_SBE", 29),
    FieldRow("DCGM_FI_DEV_RETIRED_DBE", 30),
    FieldRow("DCGM_FI_DEV_RETIRED_PENDING", 31),
    FieldRow("DCGM_FI_DEV_BOARD_LIMIT_VIOLATION", 77),
    FieldRow("DCGM_FI_DEV_LOW_UTIL_VIOLATION", 78),
    FieldRow("DCGM_FI_DEV_RELIABILITY_VIOLATION", 79),
    FieldRow("DCGM_FI_DEV_TOTAL_APP_CLOCKS_VIOLATION", 80),
    FieldRow("DCGM_FI_DEV_TOTAL_BASE_CLOCKS_VIOLATION", 81),
    FieldRow(metric_names.GPU_CORRECTABLE_REMAPPED_ROWS, 142),
    FieldRow(metric_names.GPU_UNCORRECTABLE_REMAPPED_ROWS, 143),
    FieldRow(metric_names.GPU_ROW_REMAP_PENDING, 144),
    FieldRow(metric_names.GPU_ROW_REMAP_FAILURE, 145),
    FieldRow(_MARGIN, 193, extra=(("threshold", "shutdown"),)),
    FieldRow(_MARGIN, 194, extra=(("threshold", "slowdown"),)),
    FieldRow(_MARGIN, 195, extra=(("threshold", "memory_maximum"),)),
    FieldRow(_MARGIN, 196, extra=(("threshold", "maximum"),)),
)
