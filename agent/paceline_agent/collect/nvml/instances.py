"""MIG: each GPU instance as a separate GPU with dcgm-exporter's labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from paceline_agent.collect.nvml.driver import NOTHING_THERE, pynvml
from paceline_agent.collect.nvml.gpu import NvmlGpu, Value
from paceline_agent.collect.nvml.readings import memory
from paceline_wire import metric_names

_MIG_AT_MOST = 8  # instances of one GPU; there are at most 7 today


def mig_mode(handle: Any) -> int:
    current: int = pynvml.nvmlDeviceGetMigMode(handle)[0]
    return current


def read(gpu: NvmlGpu) -> Iterator[Value]:
    mode = gpu.ask(mig_mode)
    if mode is None:
        return
    if gpu.mig_mode is not None and gpu.mig_mode != mode:
        gpu.forget_refusals()
    gpu.mig_mode = mode
    yield Value(metric_names.MIG_MODE, mode)
    if mode == pynvml.NVML_DEVICE_MIG_ENABLE:
        yield from gpu.ask(_instances) or ()


def _instances(handle: Any) -> list[Value]:
    """Read instances; memory belongs to the GPU instance, so one compute instance is enough."""
    values: list[Value] = []
    seen: set[int] = set()
    for index in range(min(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle), _MIG_AT_MOST)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            number = pynvml.nvmlDeviceGetGpuInstanceId(instance)
            if number not in seen:
                seen.add(number)
                values += _instance(instance, number)
        except NOTHING_THERE:
            continue  # the instance may have been destroyed
    return values


def _instance(instance: Any, number: int) -> Iterator[Value]:
    attributes = pynvml.nvmlDeviceGetAttributes_v2(instance)
    name = pynvml.nvmlDeviceGetName(instance)
    profile = _profile(name, attributes.gpuInstanceSliceCount, attributes.memorySizeMB)
    labels = (("GPU_I_PROFILE", profile), ("GPU_I_ID", str(number)))
    uuid = ("mig_uuid", pynvml.nvmlDeviceGetUUID(instance))
    yield Value("paceline_gpu_mig_info", 1.0, (*labels, uuid))
    yield Value("paceline_gpu_mig_multiprocessors", attributes.multiprocessorCount, labels)
    yield from memory(instance, labels)


def _profile(name: str, slices: int, mebibytes: int) -> str:
    """Return `1g.18gb` for "NVIDIA H200 MIG 1g.18gb"."""
    match = re.search(r"MIG (\S+)", name)
    return match[1] if match else f"{slices}g.{round(mebibytes / 1024)}gb"
