"""What the node's kernel wrote into its log: PCIe, NICs, links, disks, memory, heat, lockups.

XIDs are in `gpu_errors`, where they are told apart by number. A sort of message that was never
written has no series: where the log is read, its series begins at nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, look_at, together
from paceline_server.detect.finding import Evidence
from paceline_server.detect.telemetry import MetricSeries, Telemetry

EVENTS = "paceline_kernel_events_total"
READ = "paceline_kernel_log_lost_total"  # told at each sweep: the log is read
_SWEEP_NS = 2_000_000_000  # the log is read each second
_OLD_LOG_NS = 5_000_000_000  # in which an agent that starts has counted what was there before
_ONE_IS_TELLING = 0.25  # a single one scores 4
_MANY_ARE_TELLING = 10.0  # corrected by the hardware: some are written on healthy nodes
_HINT = 0.5  # a single one scores 2


def _message(cause: str, what: str, no_deviation: float = _ONE_IS_TELLING) -> Symptom:
    return Symptom(cause, EVENTS, Scope.DEVICE, what, "", "events", no_deviation)


_PCIE, _NIC, _LOCKUP = "PCIe errors", "NIC error", "kernel lockup"
_HARDWARE, _IO = "host hardware errors", "blocked on I/O"
# By kind, or by kind and code where codes differ in what they say.
MESSAGES: Mapping[str, Symptom] = {
    "pcie_aer/corrected": _message(_PCIE, "corrected PCIe errors (AER)", _MANY_ARE_TELLING),
    "pcie_aer": _message(_PCIE, "uncorrected PCIe errors (AER)"),
    "pcie_link_down": _message(_PCIE, "PCIe links lost"),
    "nvlink_error": _message("NVLink errors", "messages of NVLink errors"),
    "sxid": _message("NVLink errors", "errors of an NVSwitch (SXid)"),
    "gpu_ecc/uncorrected": _message("uncorrectable ECC errors", "uncorrectable errors of memory"),
    "gpu_ecc": _message("correctable ECC errors", "corrected errors of memory", _MANY_ARE_TELLING),
    "gpu_ring_timeout": _message("GPU hung", "queues that no longer moved"),
    "gpu_reset": _message("GPU hung", "resets by the driver"),
    "gpu_reboot_required": _message("GPU hung", "errors that only a reboot ends"),
    "mlx5_health": _message(_NIC, "failed health checks of the adapter's firmware"),
    "mlx4_health": _message(_NIC, "internal errors of the adapter"),
    "mlx5_command_timeout": _message(_NIC, "commands that the adapter did not answer"),
    "mlx5_command_error": _message(_NIC, "commands that the adapter refused", 1.0),
    "mlx5_cq_error": _message(_NIC, "errors of a completion queue"),
    "mlx5_temperature": _message(_NIC, "warnings of the adapter's temperature", _HINT),
    "mlx5_power": _message(_NIC, "warnings of the adapter's power", _HINT),
    "nic_init_failed": _message(_NIC, "failed starts of the adapter"),
    "nic_command_timeout": _message(_NIC, "commands that the adapter did not answer"),
    "nic_firmware_error": _message(_NIC, "errors of the adapter's firmware"),
    "cxi_error": _message(_NIC, "errors of the adapter"),
    "transmit_timeout": _message(_NIC, "transmit queues that timed out"),
    "mlx5_module": _message("link down", "messages of the port's module"),
    "rdma_link_down": _message("link down", "losses of the link"),
    "nic_link_down": _message("link down", "losses of the link"),
    "thermal_throttle": _message("thermal throttle", "messages of CPU heat", 1.0),
    "oom_kill": _message("memory pressure", "processes killed for memory"),
    "page_allocation_failure": _message("memory pressure", "failed allocations of pages", _HINT),
    "machine_check/uncorrected": _message(_HARDWARE, "uncorrected machine checks"),
    "machine_check": _message(_HARDWARE, "machine checks", _MANY_ARE_TELLING),
    "edac/uncorrected": _message(_HARDWARE, "uncorrected errors of host memory"),
    "edac": _message(_HARDWARE, "corrected errors of host memory", _MANY_ARE_TELLING),
    "hardware_error/uncorrected": _message(_HARDWARE, "uncorrected hardware errors"),
    "hardware_error": _message(_HARDWARE, "corrected hardware errors", _MANY_ARE_TELLING),
    "memory_failure": _message(_HARDWARE, "pages of bad memory"),
    "soft_lockup": _message(_LOCKUP, "lockups of a CPU"),
    "hard_lockup": _message(_LOCKUP, "lockups of a CPU"),
    "rcu_stall": _message(_LOCKUP, "stalls of the kernel (RCU)"),
    "kernel_bug": _message(_LOCKUP, "faults of the kernel itself"),
    "nvme_timeout": _message("slow disk", "requests that timed out"),
    "nvme_down": _message("slow disk", "failures of the controller"),
    "disk_error": _message("slow disk", "I/O errors"),
    "filesystem_error": _message("slow disk", "errors of the file system"),
    "filesystem_read_only": _message("slow disk", "file systems made read-only"),
    "nfs_not_responding": _message(_IO, "times the file server did not respond"),
    "lustre_connection_lost": _message(_IO, "lost connections to the file server"),
    "hung_task": _message(_IO, "tasks blocked for minutes"),
}
# Nothing else than the log tells of these: where it is silent, they are ruled out.
ONLY_HERE = (_PCIE, _NIC, _HARDWARE, _LOCKUP)
SYMPTOMS = tuple(MESSAGES.values())


def check(suspect: Suspect) -> list[MetricObservation]:
    if not is_read(suspect.seen.telemetry, suspect.node, suspect.onset_ns):
        return []
    by_cause: dict[str, list[MetricObservation]] = {}
    for each in _told(suspect):
        by_cause.setdefault(each.cause, []).append(each)
    silent = Evidence(f"the kernel's log of {suspect.node} tells of no such error", EVENTS)
    found = [together(cause, looks) for cause, looks in by_cause.items()]
    return found + [
        MetricObservation(cause, weighing.of_strength(0.0), (silent,))
        for cause in ONLY_HERE
        if cause not in by_cause
    ]


def is_read(telemetry: Telemetry, node: str, since_ns: float) -> bool:
    """Whether that node's log was still read at that time."""
    read = telemetry.find(node, READ)
    return read is not None and (read.latest_ns() or 0.0) >= since_ns


def _told(suspect: Suspect) -> Iterator[MetricObservation]:
    telemetry, node = suspect.seen.telemetry, suspect.node
    for labels, series in telemetry.all_of(node, EVENTS):
        message = message_of(labels.get("kind", ""), labels.get("code", ""))
        device = labels.get("device", "host")
        if message is None or not _concerns(suspect, device):
            continue
        name = node if device == "host" else f"{device} of {node}"
        place = MeasuredDevice(node, labels, f"the kernel's log of {name}")
        found = look_at(suspect, message, place, from_nothing(telemetry, node, series))
        if found is not None and found.weight > 0:
            yield found


def message_of(kind: str, code: str) -> Symptom | None:
    return MESSAGES.get(f"{kind}/{code}") or MESSAGES.get(kind)


def _concerns(suspect: Suspect, device: str) -> bool:
    """Not so of a GPU on which others compute."""
    if not device.startswith("gpu"):
        return True
    mine = {suspect.generation.gpus.get(rank) for rank in suspect.ranks}
    return device.removeprefix("gpu") in {str(gpu) for gpu in mine if gpu is not None}


def from_nothing(telemetry: Telemetry, node: str, series: MetricSeries) -> MetricSeries:
    """The same count from when the log was first read, if that was before its first message."""
    read, points = telemetry.find(node, READ), series.points
    if read is None or not points:
        return series
    first_ns = points[0][0]
    begun_ns = read.points[0][0]
    if first_ns - begun_ns < _OLD_LOG_NS:
        return series
    begun = MetricSeries()
    begun.add(int(begun_ns), 0.0)
    begun.add(int(first_ns - _SWEEP_NS), 0.0)
    for at, value in points:
        begun.add(int(at), value)
    return begun
