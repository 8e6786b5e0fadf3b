"""The catalog of causes: name, prior, what to exclude, and what to do.

The names are a public contract: alerts, policies and dashboards match on them. No other module
spells one out. docs/concepts.md lists those that `CAUSES` describes.

Priors are shares per kind of finding. They are accurate to a factor of about two, which is less
than the weight of one clear measurement. Source for hardware faults: the 419 interruptions of Llama
3 (table 5: GPU 148, HBM 72, switch and cable 35, GPU SRAM 19, NIC 7, thermal 6, SSD 3, memory, CPU
and I/O 2 each). Throttling and contention slow a rank without interrupting it. That table does not
list them, and they lead the slow kinds here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN = "unknown"
# Prior of everything that no check measures: the training script, its data, a broken cable between
# two nodes.
UNKNOWN_PRIOR = 0.25

# Causes that `diagnosis.py` finds in the measurements of a node. `CAUSES` has a row for each.
THERMAL_THROTTLE = "thermal throttle"
POWER_THROTTLE = "power throttle"
HARDWARE_SLOWDOWN = "hardware slowdown"
LOW_SM_CLOCK = "low SM clock"
LOW_MEMORY_CLOCK = "low memory clock"
UNCORRECTABLE_ECC_ERRORS = "uncorrectable ECC errors"
CORRECTABLE_ECC_ERRORS = "correctable ECC errors"
ROW_REMAPPING = "row remapping"
GPU_XID = "GPU error (XID)"
GPU_LOST = "GPU lost"
GPU_HUNG = "GPU hung"
GPU_SHARED = "other processes on the GPU"
NVLINK_ERRORS = "NVLink errors"
DEGRADED_GPU_PCIE = "degraded PCIe link"
PCIE_REPLAYS = "PCIe replays"
PCIE_ERRORS = "PCIe errors"
DEGRADED_NIC_PCIE = "degraded PCIe link of the NIC"
NIC_ERROR = "NIC error"
LOW_LINK_RATE = "low link rate"
LINK_DOWN = "link down"
LINK_ERRORS = "link errors"
PACKET_LOSS = "packet loss"
NETWORK_CONGESTION = "network congestion"
HOST_HARDWARE_ERRORS = "host hardware errors"
KERNEL_LOCKUP = "kernel lockup"
NUMA_MISBINDING = "NUMA misbinding"
CPU_CONTENTION = "CPU contention"
MEMORY_PRESSURE = "memory pressure"
SWAPPING = "swapping"
SLOW_DISK = "slow disk"
DISK_FULL = "disk full"
BLOCKED_ON_IO = "blocked on I/O"

# Causes that a detector reports by itself.
PROCESS_STOPPED = "process stopped (SIGSTOP)"
PROCESS_GONE = "process gone"
ENDED_EARLY = "ended early"
STOPPED_ON_REQUEST = "stopped on request"
OUT_OF_MEMORY = "out of memory"
NON_FINITE_LOSS = "non-finite loss"
CHECKPOINT_NOT_WRITTEN = "checkpoint not written"
CHECKPOINTS_STOPPED = "checkpoints stopped"
_CANNOT_RESUME = frozenset({PROCESS_STOPPED, PROCESS_GONE})
_NOT_OF_A_NODE = frozenset({ENDED_EARLY, STOPPED_ON_REQUEST})


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """One row of the catalog.

    Attributes:
        subject: The word for the cause in "unknown, but not: clock, PCIe, ...".
        on_node: The node is at fault, so a restart should exclude it.
        priors: Kind of finding -> share. A kind that is missing never has this cause.
        advice: What the operator should do.
        is_load: The cause is load on the node, which can end without a fix.
    """

    subject: str
    on_node: bool
    priors: Mapping[str, float]
    advice: str
    is_load: bool = False


CAUSES: Mapping[str, CauseInfo] = {
    THERMAL_THROTTLE: CauseInfo(
        "thermal throttle",
        True,
        {"straggler": 0.15, "hang": 0.01},
        "check fans, inlet temperature and the heat sink; drain the node if it recurs",
    ),
    POWER_THROTTLE: CauseInfo(
        "power throttle",
        True,
        {"straggler": 0.10},
        "check the power limit (`nvidia-smi -q -d POWER`), power supplies and their cables",
    ),
    HARDWARE_SLOWDOWN: CauseInfo(
        "hardware slowdown",
        True,
        {"straggler": 0.05},
        "check power delivery and cooling; if the slowdown persists, replace the GPU",
    ),
    LOW_SM_CLOCK: CauseInfo(
        "clock",
        True,
        {"straggler": 0.08},
        "compare application clocks and persistence mode with a healthy node's",
    ),
    LOW_MEMORY_CLOCK: CauseInfo(
        "memory clock",
        True,
        {"straggler": 0.03},
        "compare application clocks with a healthy node's; reset the GPU",
    ),
    UNCORRECTABLE_ECC_ERRORS: CauseInfo(
        "ECC",
        True,
        {"straggler": 0.04, "hang": 0.12},
        "drain the node and reset the GPU; replace it if rows cannot be remapped",
    ),
    CORRECTABLE_ECC_ERRORS: CauseInfo(
        "ECC",
        True,
        {"straggler": 0.03},
        "monitor the GPU; a burst of corrected errors often precedes an uncorrectable one",
    ),
    ROW_REMAPPING: CauseInfo(
        "row remapping",
        True,
        {"straggler": 0.02, "hang": 0.03},
        "drain the node and reset the GPU, which completes the remapping",
    ),
    GPU_XID: CauseInfo(
        "XID",
        True,
        {"straggler": 0.04, "hang": 0.22},
        "look up the number in NVIDIA's XID catalog; 48, 63, 64, 74, 79, 94, 95: drain the node",
    ),
    GPU_LOST: CauseInfo(
        "lost GPU",
        True,
        {"straggler": 0.003, "hang": 0.08},
        "drain the node, power-cycle it, reseat or replace the GPU",
    ),
    GPU_HUNG: CauseInfo(
        "hung GPU",
        True,
        {"straggler": 0.002, "hang": 0.06},
        "search the kernel log for XIDs and GSP timeouts; reset the GPU or power-cycle the node",
    ),
    GPU_SHARED: CauseInfo(
        "other processes on the GPU",
        True,
        {"straggler": 0.05, "slow_link": 0.01},
        "end the other processes on the GPU (`nvidia-smi` lists them) or keep them off it: one job "
        "per GPU, or exclusive compute mode",
        is_load=True,
    ),
    NVLINK_ERRORS: CauseInfo(
        "NVLink",
        True,
        {"straggler": 0.02, "slow_link": 0.10, "hang": 0.03},
        "reset the GPU; check the NVLink bridge or baseboard if links stay down",
    ),
    DEGRADED_GPU_PCIE: CauseInfo(
        "PCIe",
        True,
        {"straggler": 0.06, "slow_link": 0.04, "slow_data": 0.03},
        "reseat the GPU or its riser; a link that trains down usually has a bad contact",
    ),
    PCIE_REPLAYS: CauseInfo(
        "PCIe",
        True,
        {"straggler": 0.02, "slow_link": 0.02},
        "reseat the GPU or its riser",
    ),
    PCIE_ERRORS: CauseInfo(
        "PCIe errors",
        True,
        {"straggler": 0.02, "slow_link": 0.01, "slow_data": 0.01, "hang": 0.03},
        "reseat the device or its riser; if the errors continue, replace it",
    ),
    DEGRADED_NIC_PCIE: CauseInfo(
        "PCIe of the NIC",
        True,
        {"slow_link": 0.08, "checkpoint_stall": 0.02},
        "reseat the NIC; compare `LnkSta` with `LnkCap` of `lspci -vv`",
    ),
    NIC_ERROR: CauseInfo(
        "NIC",
        True,
        {"straggler": 0.005, "slow_link": 0.02, "hang": 0.04, "checkpoint_stall": 0.01},
        "update the NIC's firmware and driver and power-cycle the node; else replace the NIC",
    ),
    LOW_LINK_RATE: CauseInfo(
        "link rate",
        True,
        {"slow_link": 0.15, "checkpoint_stall": 0.02},
        "the port trained to a lower speed: clean or replace the cable or transceiver",
    ),
    LINK_DOWN: CauseInfo(
        "link state",
        True,
        {"slow_link": 0.10, "straggler": 0.01, "hang": 0.10, "checkpoint_stall": 0.02},
        "check cable, transceiver and switch port; treat a flapping link like a lost one",
    ),
    LINK_ERRORS: CauseInfo(
        "link errors",
        True,
        {"slow_link": 0.15, "checkpoint_stall": 0.01},
        "clean or replace the cable or transceiver",
    ),
    PACKET_LOSS: CauseInfo(
        "packet loss",
        True,
        {"slow_link": 0.12, "hang": 0.02, "slow_data": 0.04, "checkpoint_stall": 0.05},
        "find where packets drop (`ethtool -S`, switch counters); check PFC and ECN settings",
    ),
    NETWORK_CONGESTION: CauseInfo(
        "congestion",
        False,
        {"slow_link": 0.15, "slow_data": 0.02, "checkpoint_stall": 0.05},
        "find the jobs that share the switch; check adaptive routing, ECN and PFC settings",
    ),
    HOST_HARDWARE_ERRORS: CauseInfo(
        "host hardware",
        True,
        {"straggler": 0.01, "host_noise": 0.03, "hang": 0.02},
        "drain the node; find the memory module or CPU (`ras-mc-ctl --errors`) and replace it",
    ),
    KERNEL_LOCKUP: CauseInfo(
        "kernel",
        True,
        {"straggler": 0.01, "host_noise": 0.02, "hang": 0.03},
        "read the trace in the kernel log (`dmesg -T`), update the component that it names, "
        "reboot the node",
    ),
    NUMA_MISBINDING: CauseInfo(
        "NUMA",
        False,
        {"straggler": 0.05, "slow_data": 0.03, "slow_link": 0.02},
        "bind each rank to the CPUs of its GPU's NUMA node",
    ),
    CPU_CONTENTION: CauseInfo(
        "CPU contention",
        True,
        {
            "straggler": 0.10,
            "slow_data": 0.15,
            "host_noise": 0.50,
            "slow_link": 0.03,
            "checkpoint_stall": 0.03,
        },
        "find what else runs on the node; reserve CPUs for the ranks or use fewer loader workers",
        is_load=True,
    ),
    MEMORY_PRESSURE: CauseInfo(
        "memory pressure",
        True,
        {
            "straggler": 0.03,
            "slow_data": 0.10,
            "host_noise": 0.12,
            "hang": 0.03,
            "checkpoint_stall": 0.08,
        },
        "free host memory: pinned buffers, loader workers and page cache compete for it",
        is_load=True,
    ),
    SWAPPING: CauseInfo(
        "swapping",
        True,
        {
            "straggler": 0.03,
            "slow_data": 0.06,
            "host_noise": 0.08,
            "hang": 0.03,
            "checkpoint_stall": 0.04,
        },
        "turn swap off on training nodes and free host memory",
        is_load=True,
    ),
    SLOW_DISK: CauseInfo(
        "disk",
        True,
        {
            "straggler": 0.01,
            "slow_data": 0.25,
            "host_noise": 0.05,
            "hang": 0.02,
            "checkpoint_stall": 0.30,
        },
        "check the disk's health (`smartctl`, `nvme smart-log`) and what else reads or writes it",
    ),
    DISK_FULL: CauseInfo(
        "disk space",
        True,
        {"slow_data": 0.02, "checkpoint_stall": 0.10, "hang": 0.01},
        "delete old checkpoints or logs, or write them to another disk",
    ),
    BLOCKED_ON_IO: CauseInfo(
        "I/O wait of the process",
        True,
        {"straggler": 0.02, "slow_data": 0.10, "hang": 0.12, "checkpoint_stall": 0.10},
        "check the file system that it waits for (`cat /proc/PID/stack`, dmesg)",
        is_load=True,
    ),
}


def can_end_without_fix(cause: str) -> bool:
    """Return whether the cause is load on the node, which can end without a fix."""
    info = CAUSES.get(cause)
    return info is not None and info.is_load


def cannot_resume(cause: str) -> bool:
    """Return whether a process with this cause never makes progress again without a restart."""
    return cause in _CANNOT_RESUME


def blames_no_node(cause: str) -> bool:
    """Return whether the training script or a person caused it: no node is held responsible."""
    return cause in _NOT_OF_A_NODE
