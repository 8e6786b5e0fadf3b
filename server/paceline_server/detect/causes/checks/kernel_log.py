"""Messages of the node's kernel log: PCIe, NICs, links, disks, memory, heat, lockups.

XIDs are in `gpu_errors`, which distinguishes them by number. A kind of message that was never
logged has no series. If the agent reads the log, such a series starts at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import (
    BLOCKED_ON_IO,
    CORRECTABLE_ECC_ERRORS,
    GPU_HUNG,
    HOST_HARDWARE_ERRORS,
    KERNEL_LOCKUP,
    LINK_DOWN,
    MEMORY_PRESSURE,
    NIC_ERROR,
    NVLINK_ERRORS,
    PCIE_ERRORS,
    SLOW_DISK,
    THERMAL_THROTTLE,
    UNCORRECTABLE_ECC_ERRORS,
)
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, combine, weigh_series
from paceline_server.detect.finding import Evidence
from paceline_server.detect.telemetry import MetricSeries, Telemetry
from paceline_wire import metric_names

EVENTS = metric_names.KERNEL_EVENTS_TOTAL
READ = metric_names.KERNEL_LOG_LOST_TOTAL  # sent with each sweep, so the log is being read
_SWEEP_NS = 2_000_000_000  # the log is read each second
_OLD_LOG_NS = 5_000_000_000  # during this time after its start an agent counts older messages
# Tolerances, in messages.
_ONE_IS_SEVERE = 0.25  # a single message scores 4
_MANY_ARE_SEVERE = 10.0  # corrected by hardware: healthy nodes log some
_ONE_IS_A_HINT = 0.5  # a single message scores 2


def _message(cause: str, name: str, tolerance: float = _ONE_IS_SEVERE) -> Symptom:
    return Symptom(cause, EVENTS, Scope.DEVICE, name, "", "events", tolerance)


_PCIE, _NIC, _LOCKUP = PCIE_ERRORS, NIC_ERROR, KERNEL_LOCKUP
_HARDWARE, _IO = HOST_HARDWARE_ERRORS, BLOCKED_ON_IO
# By kind, or by kind and code if the codes mean different things.
MESSAGES: Mapping[str, Symptom] = {
    "pcie_aer/corrected": _message(_PCIE, "corrected PCIe errors (AER)", _MANY_ARE_SEVERE),
    "pcie_aer": _message(_PCIE, "uncorrected PCIe errors (AER)"),
    "pcie_link_down": _message(_PCIE, "PCIe links lost"),
    "nvlink_error": _message(NVLINK_ERRORS, "NVLink error messages"),
    "sxid": _message(NVLINK_ERRORS, "NVSwitch errors (SXid)"),
    "gpu_ecc/uncorrected": _message(UNCORRECTABLE_ECC_ERRORS, "uncorrectable memory errors"),
    "gpu_ecc": _message(CORRECTABLE_ECC_ERRORS, "corrected memory errors", _MANY_ARE_SEVERE),
    "gpu_ring_timeout": _message(GPU_HUNG, "GPU queues that hung"),
    "gpu_reset": _message(GPU_HUNG, "GPU resets by the driver"),
    "gpu_reboot_required": _message(GPU_HUNG, "errors that require a reboot"),
    "mlx5_health": _message(_NIC, "failed health checks of the NIC firmware"),
    "mlx4_health": _message(_NIC, "internal NIC errors"),
    "mlx5_command_timeout": _message(_NIC, "NIC commands that timed out"),
    "mlx5_command_error": _message(_NIC, "NIC commands that failed", 1.0),
    "mlx5_cq_error": _message(_NIC, "completion queue errors"),
    "mlx5_temperature": _message(_NIC, "NIC temperature warnings", _ONE_IS_A_HINT),
    "mlx5_power": _message(_NIC, "NIC power warnings", _ONE_IS_A_HINT),
    "nic_init_failed": _message(_NIC, "failed NIC initializations"),
    "nic_command_timeout": _message(_NIC, "NIC commands that timed out"),
    "nic_firmware_error": _message(_NIC, "NIC firmware errors"),
    "cxi_error": _message(_NIC, "NIC errors"),
    "transmit_timeout": _message(_NIC, "transmit queues that timed out"),
    "mlx5_module": _message(LINK_DOWN, "transceiver messages"),
    "rdma_link_down": _message(LINK_DOWN, "link losses"),
    "nic_link_down": _message(LINK_DOWN, "link losses"),
    "thermal_throttle": _message(THERMAL_THROTTLE, "CPU thermal messages", 1.0),
    "oom_kill": _message(MEMORY_PRESSURE, "processes killed by the OOM killer"),
    "page_allocation_failure": _message(MEMORY_PRESSURE, "failed page allocations", _ONE_IS_A_HINT),
    "machine_check/uncorrected": _message(_HARDWARE, "uncorrected machine checks"),
    "machine_check": _message(_HARDWARE, "machine checks", _MANY_ARE_SEVERE),
    "edac/uncorrected": _message(_HARDWARE, "uncorrected host memory errors"),
    "edac": _message(_HARDWARE, "corrected host memory errors", _MANY_ARE_SEVERE),
    "hardware_error/uncorrected": _message(_HARDWARE, "uncorrected hardware errors"),
    "hardware_error": _message(_HARDWARE, "corrected hardware errors", _MANY_ARE_SEVERE),
    "memory_failure": _message(_HARDWARE, "bad memory pages"),
    "soft_lockup": _message(_LOCKUP, "CPU lockups"),
    "hard_lockup": _message(_LOCKUP, "CPU lockups"),
    "rcu_stall": _message(_LOCKUP, "RCU stalls"),
    "kernel_bug": _message(_LOCKUP, "kernel bugs"),
    "nvme_timeout": _message(SLOW_DISK, "requests that timed out"),
    "nvme_down": _message(SLOW_DISK, "controller failures"),
    "disk_error": _message(SLOW_DISK, "I/O errors"),
    "filesystem_error": _message(SLOW_DISK, "file system errors"),
    "filesystem_read_only": _message(SLOW_DISK, "file systems remounted read-only"),
    "nfs_not_responding": _message(_IO, "file server timeouts"),
    "lustre_connection_lost": _message(_IO, "lost connections to the file server"),
    "hung_task": _message(_IO, "tasks blocked for minutes"),
}
# Causes that only the kernel log reports. If it has no such message, they are ruled out.
KERNEL_LOG_CAUSES = (_PCIE, _NIC, _HARDWARE, _LOCKUP)
SYMPTOMS = tuple(MESSAGES.values())


def check(suspect: Suspect) -> list[WeighedEvidence]:
    if not is_read(suspect.observation.telemetry, suspect.node, suspect.onset_ns):
        return []
    by_cause: dict[str, list[WeighedEvidence]] = {}
    for weighed in _weigh_messages(suspect):
        by_cause.setdefault(weighed.cause, []).append(weighed)
    no_message = Evidence(f"the kernel log of {suspect.node} reports no such error", EVENTS)
    results = [combine(cause, messages) for cause, messages in by_cause.items()]
    return results + [
        WeighedEvidence(cause, weighing.strength_weight(0.0), (no_message,))
        for cause in KERNEL_LOG_CAUSES
        if cause not in by_cause
    ]


def is_read(telemetry: Telemetry, node: str, since_ns: float) -> bool:
    """Return whether the agent has read the node's kernel log since `since_ns`."""
    read = telemetry.find(node, READ)
    return read is not None and (read.latest_ns() or 0.0) >= since_ns


def _weigh_messages(suspect: Suspect) -> Iterator[WeighedEvidence]:
    telemetry, node = suspect.observation.telemetry, suspect.node
    for labels, series in telemetry.all_of(node, EVENTS):
        message = message_of(labels.get("kind", ""), labels.get("code", ""))
        device = labels.get("device", "host")
        if message is None or not _concerns(suspect, device):
            continue
        name = node if device == "host" else f"{device} of {node}"
        source = MeasuredDevice(node, labels, f"kernel log of {name}")
        weighed = weigh_series(suspect, message, source, from_zero(telemetry, node, series))
        if weighed is not None and weighed.weight > 0:
            yield weighed


def message_of(kind: str, code: str) -> Symptom | None:
    return MESSAGES.get(f"{kind}/{code}") or MESSAGES.get(kind)


def _concerns(suspect: Suspect, device: str) -> bool:
    """Return whether the device belongs to the suspect.

    A GPU of other ranks does not, nor an interface that carries no traffic of the job.
    """
    if not device.startswith("gpu"):
        return suspect.may_use(device)
    own = {suspect.generation.gpus.get(rank) for rank in suspect.ranks}
    return device.removeprefix("gpu") in {str(gpu) for gpu in own if gpu is not None}


def from_zero(telemetry: Telemetry, node: str, series: MetricSeries) -> MetricSeries:
    """Return the series with zeros from the first read of the log to the first message."""
    read, points = telemetry.find(node, READ), series.points
    if read is None or not points:
        return series
    first_ns = points[0][0]
    first_read_ns = read.points[0][0]
    if first_ns - first_read_ns < _OLD_LOG_NS:
        return series
    extended = MetricSeries()
    extended.add(int(first_read_ns), 0.0)
    extended.add(int(first_ns - _SWEEP_NS), 0.0)
    for at, value in points:
        extended.add(int(at), value)
    return extended
