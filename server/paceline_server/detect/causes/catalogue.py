"""The causes that can be named: how often each is met, what is to blame, and what to do.

Names are stable: alerts, policies and dashboards match on them. docs/concepts.md lists them.

The priors are shares per kind of finding, to a factor of about two, which is less than what one
clear measurement is worth. Sources: the 419 interruptions of Llama 3 (table 5: GPU 148, HBM 72,
switch and cable 35, GPU SRAM 19, NIC 7, thermal 6, SSD 3, memory, CPU and I/O 2 each) for what
breaks; throttling and contention, which slow a rank without interrupting it, are not in that table
and lead the slow kinds instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNKNOWN = "unknown"
# The prior of what no check looks at: the program itself, its data, a broken cable between.
UNKNOWN_PRIOR = 0.25


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """`subject`: what was ruled out when it was not this. `on_node`: the node, not the process.

    `may_pass`: it is load, which can end as it began.
    """

    subject: str
    on_node: bool
    priors: Mapping[str, float]  # kind of finding -> share; kinds that are not there: never
    advice: str
    may_pass: bool = False


CAUSES: Mapping[str, CauseInfo] = {
    "thermal throttle": CauseInfo(
        "thermal throttle",
        True,
        {"straggler": 0.15, "hang": 0.01},
        "check fans, inlet temperature and the heat sink; drain the node if it recurs",
    ),
    "power throttle": CauseInfo(
        "power throttle",
        True,
        {"straggler": 0.10},
        "check the power limit (`nvidia-smi -q -d POWER`), power supplies and their cables",
    ),
    "hardware slowdown": CauseInfo(
        "hardware slowdown",
        True,
        {"straggler": 0.05},
        "the board asks for it: check power delivery and cooling, then replace the GPU",
    ),
    "low SM clock": CauseInfo(
        "clock",
        True,
        {"straggler": 0.08},
        "compare application clocks and persistence mode with a healthy node's",
    ),
    "low memory clock": CauseInfo(
        "memory clock",
        True,
        {"straggler": 0.03},
        "compare application clocks with a healthy node's; reset the GPU",
    ),
    "uncorrectable ECC errors": CauseInfo(
        "ECC",
        True,
        {"straggler": 0.04, "hang": 0.12},
        "drain the node and reset the GPU; replace it if rows cannot be remapped",
    ),
    "correctable ECC errors": CauseInfo(
        "ECC",
        True,
        {"straggler": 0.03},
        "watch it; a storm of corrections precedes an uncorrectable error",
    ),
    "row remapping": CauseInfo(
        "row remapping",
        True,
        {"straggler": 0.02, "hang": 0.03},
        "drain the node and reset the GPU, which completes the remapping",
    ),
    "GPU error (XID)": CauseInfo(
        "XID",
        True,
        {"straggler": 0.04, "hang": 0.22},
        "look the number up in NVIDIA's XID catalogue; 48, 63, 64, 74, 79, 94, 95: drain the node",
    ),
    "GPU lost": CauseInfo(
        "lost GPU",
        True,
        {"straggler": 0.003, "hang": 0.08},
        "drain the node, power-cycle it, reseat or replace the GPU",
    ),
    "GPU hung": CauseInfo(
        "hung GPU",
        True,
        {"straggler": 0.002, "hang": 0.06},
        "read the kernel's log for XIDs and GSP timeouts; reset the GPU, or power-cycle the node",
    ),
    "NVLink errors": CauseInfo(
        "NVLink",
        True,
        {"straggler": 0.02, "slow_link": 0.10, "hang": 0.03},
        "reset the GPU; check the NVLink bridge or baseboard if links stay down",
    ),
    "degraded PCIe link": CauseInfo(
        "PCIe",
        True,
        {"straggler": 0.06, "slow_link": 0.04, "slow_data": 0.03},
        "reseat the GPU or its riser; a link that trains down is a bad contact",
    ),
    "PCIe replays": CauseInfo(
        "PCIe",
        True,
        {"straggler": 0.02, "slow_link": 0.02},
        "reseat the GPU or its riser",
    ),
    "PCIe errors": CauseInfo(
        "PCIe errors",
        True,
        {"straggler": 0.02, "slow_link": 0.01, "slow_data": 0.01, "hang": 0.03},
        "reseat the device or its riser; if the errors go on, replace it",
    ),
    "degraded PCIe link of the NIC": CauseInfo(
        "PCIe of the NIC",
        True,
        {"slow_link": 0.08, "checkpoint_stall": 0.02},
        "reseat the NIC; compare `LnkSta` with `LnkCap` of `lspci -vv`",
    ),
    "NIC error": CauseInfo(
        "NIC",
        True,
        {"straggler": 0.005, "slow_link": 0.02, "hang": 0.04, "checkpoint_stall": 0.01},
        "update the adapter's firmware and driver; power-cycle the node, replace the NIC",
    ),
    "low link rate": CauseInfo(
        "link rate",
        True,
        {"slow_link": 0.15, "checkpoint_stall": 0.02},
        "the port trained to a lower speed: clean or replace the cable or transceiver",
    ),
    "link down": CauseInfo(
        "link state",
        True,
        {"slow_link": 0.10, "straggler": 0.01, "hang": 0.10, "checkpoint_stall": 0.02},
        "check cable, transceiver and switch port; a flapping link is as bad as a lost one",
    ),
    "link errors": CauseInfo(
        "link errors",
        True,
        {"slow_link": 0.15, "checkpoint_stall": 0.01},
        "clean or replace the cable or transceiver",
    ),
    "packet loss": CauseInfo(
        "packet loss",
        True,
        {"slow_link": 0.12, "hang": 0.02, "slow_data": 0.04, "checkpoint_stall": 0.05},
        "look for drops on the path (`ethtool -S`, switch counters) and at PFC/ECN settings",
    ),
    "network congestion": CauseInfo(
        "congestion",
        False,
        {"slow_link": 0.15, "slow_data": 0.02, "checkpoint_stall": 0.05},
        "look at who shares the switch; check adaptive routing, ECN and PFC settings",
    ),
    "host hardware errors": CauseInfo(
        "host hardware",
        True,
        {"straggler": 0.01, "host_noise": 0.03, "hang": 0.02},
        "drain the node; find the memory module or CPU (`ras-mc-ctl --errors`) and replace it",
    ),
    "kernel lockup": CauseInfo(
        "kernel",
        True,
        {"straggler": 0.01, "host_noise": 0.02, "hang": 0.03},
        "read the trace in the kernel's log (`dmesg -T`); reboot the node, update what it names",
    ),
    "NUMA misbinding": CauseInfo(
        "NUMA",
        False,
        {"straggler": 0.05, "slow_data": 0.03, "slow_link": 0.02},
        "bind each rank to the CPUs of its GPU's NUMA node",
    ),
    "CPU contention": CauseInfo(
        "CPU contention",
        True,
        {
            "straggler": 0.10,
            "slow_data": 0.15,
            "host_noise": 0.50,
            "slow_link": 0.03,
            "checkpoint_stall": 0.03,
        },
        "find what else runs there; reserve CPUs for the ranks, or lower the loader's workers",
        may_pass=True,
    ),
    "memory pressure": CauseInfo(
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
        may_pass=True,
    ),
    "swapping": CauseInfo(
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
        may_pass=True,
    ),
    "slow disk": CauseInfo(
        "disk",
        True,
        {
            "straggler": 0.01,
            "slow_data": 0.25,
            "host_noise": 0.05,
            "hang": 0.02,
            "checkpoint_stall": 0.30,
        },
        "check the disk's health (`smartctl`, `nvme smart-log`) and who else reads or writes it",
    ),
    "disk full": CauseInfo(
        "disk space",
        True,
        {"slow_data": 0.02, "checkpoint_stall": 0.10, "hang": 0.01},
        "delete old checkpoints or logs, or point them elsewhere",
    ),
    "blocked on I/O": CauseInfo(
        "I/O wait of the process",
        True,
        {"straggler": 0.02, "slow_data": 0.10, "hang": 0.12, "checkpoint_stall": 0.10},
        "look at the file system it waits for (`cat /proc/PID/stack`, dmesg)",
        may_pass=True,
    ),
}


def may_pass(cause: str) -> bool:
    info = CAUSES.get(cause)
    return info is not None and info.may_pass
