"""Utilization of a GPU's units since the last read, with the names of DCGM's profiling metrics.

GPU performance monitoring (nvml.h, GPM) provides it on Hopper and newer, also to unprivileged users
and while a profiler runs. A value is the mean between two samples, so the first read has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from paceline_agent.collect.nvml.driver import function, pynvml
from paceline_agent.collect.nvml.gpu import NvmlGpu, Value

_PERCENT = 100.0
_MEBIBYTE = 2.0**-20
_METRICS = (  # name, nvmlGpmMetricId_t, factor from the driver's unit to DCGM's
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1, _PERCENT),
    ("DCGM_FI_PROF_SM_ACTIVE", 2, _PERCENT),
    ("DCGM_FI_PROF_SM_OCCUPANCY", 3, _PERCENT),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 5, _PERCENT),
    ("DCGM_FI_PROF_DRAM_ACTIVE", 10, _PERCENT),
    ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", 11, _PERCENT),
    ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", 12, _PERCENT),
    ("DCGM_FI_PROF_PIPE_FP16_ACTIVE", 13, _PERCENT),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", 20, _MEBIBYTE),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", 21, _MEBIBYTE),
    ("DCGM_FI_PROF_NVLINK_RX_BYTES", 60, _MEBIBYTE),
    ("DCGM_FI_PROF_NVLINK_TX_BYTES", 61, _MEBIBYTE),
)


class Activity:
    """Utilization of one GPU's units, valid until the driver is initialized again."""

    def __init__(self) -> None:
        self._question: Any = None  # reused: it is 19 KiB
        self._newest: Any = None
        self._spare: Any = None

    def read(self, gpu: NvmlGpu) -> Iterable[Value]:
        return gpu.ask(self._look) or ()

    def _look(self, handle: Any) -> list[Value]:
        if self._question is None:
            self._question = self._begin(handle)
        taken = pynvml.nvmlGpmSampleGet(handle, self._spare or pynvml.nvmlGpmSampleAlloc())
        before, self._newest, self._spare = self._newest, taken, self._newest
        if before is None:
            return []
        self._question.sample1, self._question.sample2 = before, taken
        metrics = pynvml.nvmlGpmMetricsGet(self._question).metrics
        return [
            Value(name, metric.value / units)
            for (name, _, units), metric in zip(_METRICS, metrics, strict=False)
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value)
        ]

    def _begin(self, handle: Any) -> Any:
        if not function("nvmlGpmQueryDeviceSupport")(handle).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        question = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(_METRICS)
        )
        for metric, (_, number, _) in zip(question.metrics, _METRICS, strict=False):
            metric.metricId = number
        return question
