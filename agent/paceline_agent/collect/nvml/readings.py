"""NVML calls for a whole GPU: those of each sweep, and those that rarely change.

Names are dcgm-exporter's where it has one. Numbers of clocks, thresholds and reasons: nvml.h.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline_agent.collect.nvml.driver import NO_VALUES, function, pynvml, text
from paceline_agent.collect.nvml.gpu import Reading, Value
from paceline_wire import metric_names

_MEBIBYTE = 1 << 20

THROTTLE_REASONS = {  # nvmlClocksEventReason*
    "gpu_idle": 0x1,
    "applications_clocks": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
_REASONS = [(bit, (("reason", reason),)) for reason, bit in THROTTLE_REASONS.items()]


def _number(*names: str, of: str, arguments: tuple[int, ...] = (), scale: float = 1.0) -> Reading:
    """Return the reading of a call that returns one number, emitted under one or more names."""

    def read(handle: Any) -> Iterable[Value]:
        number = function(of)(handle, *arguments)
        if number in NO_VALUES:
            return []
        return [Value(name, number * scale) for name in names]

    return read


def _utilization(handle: Any) -> Iterable[Value]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return (
        Value(metric_names.GPU_UTIL, rates.gpu),
        Value("DCGM_FI_DEV_MEM_COPY_UTIL", rates.memory),
    )


def _encoder(handle: Any) -> Iterable[Value]:
    return (Value("DCGM_FI_DEV_ENC_UTIL", pynvml.nvmlDeviceGetEncoderUtilization(handle)[0]),)


def _decoder(handle: Any) -> Iterable[Value]:
    return (Value("DCGM_FI_DEV_DEC_UTIL", pynvml.nvmlDeviceGetDecoderUtilization(handle)[0]),)


def memory(handle: Any, extra: tuple[tuple[str, str], ...] | None = None) -> Iterable[Value]:
    """Read the memory; drivers before 510 count reserved memory as used."""
    try:
        memory_info = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:
        memory_info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    sizes = {"TOTAL": memory_info.total, "USED": memory_info.used, "FREE": memory_info.free}
    reserved = getattr(memory_info, "reserved", None)
    if reserved is not None:
        sizes["RESERVED"] = reserved
    return [
        Value(f"DCGM_FI_DEV_FB_{what}", size / _MEBIBYTE, extra)
        for what, size in sizes.items()
        if size not in NO_VALUES
    ]


def _temperature(handle: Any) -> Iterable[Value]:
    """Read the temperature: the older call first; driver 560 added a newer one."""
    try:
        celsius = function("nvmlDeviceGetTemperature")(handle, 0)
    except pynvml.NVMLError_FunctionNotFound:
        celsius = function("nvmlDeviceGetTemperatureV")(handle, 0)
    return (Value(metric_names.GPU_TEMP, celsius),)


def _throttle_reasons(handle: Any) -> Iterable[Value]:
    try:
        reasons = function("nvmlDeviceGetCurrentClocksEventReasons")(handle)
    except pynvml.NVMLError_FunctionNotFound:  # the name in drivers before 535
        reasons = function("nvmlDeviceGetCurrentClocksThrottleReasons")(handle)
    if reasons in NO_VALUES:
        return []
    flags = [
        Value(metric_names.GPU_THROTTLE_REASON, 1.0 if reasons & bit else 0.0, extra)
        for bit, extra in _REASONS
    ]
    return [Value("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", reasons), *flags]


def _power_limits(handle: Any) -> Iterable[Value]:
    least, most = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    limits = {"MIN": least, "MAX": most}
    return [
        Value(f"DCGM_FI_DEV_POWER_MGMT_LIMIT_{which}", milliwatts / 1000)
        for which, milliwatts in limits.items()
        if milliwatts not in NO_VALUES
    ]


def _pcie_throughput(handle: Any) -> Iterable[Value]:
    """Read PCIe throughput; not in every sweep, because each call takes 20 ms."""
    return (
        Value("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", pynvml.nvmlDeviceGetPcieThroughput(handle, 0)),
        Value("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", pynvml.nvmlDeviceGetPcieThroughput(handle, 1)),
    )


def _vbios(handle: Any) -> Iterable[Value]:
    version = text(pynvml.nvmlDeviceGetVbiosVersion, handle)
    return (Value(metric_names.GPU_INFO, 1.0, (("vbios_version", version),)),)


EACH_SWEEP: tuple[Reading, ...] = (
    _utilization,
    memory,
    _number(metric_names.SM_CLOCK, of="nvmlDeviceGetClockInfo", arguments=(1,)),
    _number(metric_names.MEM_CLOCK, of="nvmlDeviceGetClockInfo", arguments=(2,)),
    _number(metric_names.GPU_POWER_USAGE, of="nvmlDeviceGetPowerUsage", scale=0.001),
    _temperature,
    _throttle_reasons,
)

SELDOM: tuple[Reading, ...] = (
    _encoder,
    _decoder,
    _number("DCGM_FI_DEV_VIDEO_CLOCK", of="nvmlDeviceGetClockInfo", arguments=(3,)),
    _number("DCGM_FI_DEV_GPU_TEMP_LIMIT", of="nvmlDeviceGetMarginTemperature"),
    _number(
        metric_names.GPU_PCIE_GENERATION,
        "DCGM_FI_DEV_PCIE_LINK_GEN",
        of="nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    _number(
        metric_names.GPU_PCIE_WIDTH,
        "DCGM_FI_DEV_PCIE_LINK_WIDTH",
        of="nvmlDeviceGetCurrPcieLinkWidth",
    ),
    _number(
        metric_names.GPU_SM_CLOCK_MAX_MHZ,
        "DCGM_FI_DEV_MAX_SM_CLOCK",
        of="nvmlDeviceGetMaxClockInfo",
        arguments=(1,),
    ),
    _number(
        metric_names.GPU_MEMORY_CLOCK_MAX_MHZ,
        "DCGM_FI_DEV_MAX_MEM_CLOCK",
        of="nvmlDeviceGetMaxClockInfo",
        arguments=(2,),
    ),
    _number("DCGM_FI_DEV_MAX_VIDEO_CLOCK", of="nvmlDeviceGetMaxClockInfo", arguments=(3,)),
    _number(
        metric_names.GPU_PCIE_GENERATION_MAX,
        "DCGM_FI_DEV_PCIE_MAX_LINK_GEN",
        of="nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    _number(
        metric_names.GPU_PCIE_WIDTH_MAX,
        "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH",
        of="nvmlDeviceGetMaxPcieLinkWidth",
    ),
    _number(
        metric_names.GPU_ENFORCED_POWER_LIMIT, of="nvmlDeviceGetEnforcedPowerLimit", scale=0.001
    ),
    _number("DCGM_FI_DEV_POWER_MGMT_LIMIT", of="nvmlDeviceGetPowerManagementLimit", scale=0.001),
    _number(
        "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF",
        of="nvmlDeviceGetPowerManagementDefaultLimit",
        scale=0.001,
    ),
    _power_limits,
    _number("DCGM_FI_DEV_SHUTDOWN_TEMP", of="nvmlDeviceGetTemperatureThreshold", arguments=(0,)),
    _number("DCGM_FI_DEV_SLOWDOWN_TEMP", of="nvmlDeviceGetTemperatureThreshold", arguments=(1,)),
    _number("DCGM_FI_DEV_MEM_MAX_OP_TEMP", of="nvmlDeviceGetTemperatureThreshold", arguments=(2,)),
    _number("DCGM_FI_DEV_GPU_MAX_OP_TEMP", of="nvmlDeviceGetTemperatureThreshold", arguments=(3,)),
    _number(metric_names.GPU_PERSISTENCE_MODE, of="nvmlDeviceGetPersistenceMode"),
    _pcie_throughput,
    _vbios,
)
