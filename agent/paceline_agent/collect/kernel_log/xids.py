"""NVIDIA's XID codes: what each means and what to do about it.

Actions are the resolution buckets of NVIDIA's "Analyzing Xid Errors with the Xid Catalog"
(docs.nvidia.com/deploy/xid-errors, Ampere and newer); codes it lists as unused there have the
meaning of the older "XID Errors" document. Mnemonics: nverror.h of the open kernel modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "critical"]

# bucket: (severity unless a code has its own, what to do)
_ACTIONS: Mapping[str, tuple[Severity, str]] = {
    "IGNORE": ("info", "nothing by itself; watch whether it repeats or others follow"),
    "RESTART_APP": ("warning", "restart the application; suspect its code if it repeats there"),
    "RESET_GPU": ("critical", "drain the node and reset the GPU; replace it if that recurs"),
    "RESTART_BM": ("critical", "drain and power-cycle the node; then check power and PCIe seating"),
    "RESTART_VM": ("critical", "restart the virtual machine"),
    "CHECK_MECHANICALS": ("critical", "check the board's power connectors and seating"),
    "CHECK_UVM": ("warning", "look for the memory error it follows from; report it if alone"),
    "UPDATE_SWFW": ("warning", "update driver and firmware"),
    "CONTACT_SUPPORT": ("warning", "collect nvidia-bug-report.sh and contact the vendor"),
    "WORKFLOW_XID_45": ("warning", "follow the XID before it; alone: the application was ended"),
    "WORKFLOW_XID_48": (
        "critical",
        "drain the node and reset the GPU; then check its remapped rows",
    ),
    "WORKFLOW_NVLINK_ERR": ("critical", "reset the GPU; if it recurs, check the link's two ends"),
    "WORKFLOW_NVLINK5_ERR": (
        "critical",
        "if fatal or if XID 154 asks for it, reset the GPU; check the link's two ends",
    ),
    "XID_154": ("critical", "do what the message says"),
    "UNKNOWN": ("warning", "look it up in the catalog of the installed driver"),
}


@dataclass(frozen=True, slots=True)
class Xid:
    meaning: str
    action: str  # bucket in the catalog
    severity: Severity

    @property
    def advice(self) -> str:
        return _ACTIONS[self.action][1]


def _xid(meaning: str, action: str, severity: Severity | None = None) -> Xid:
    return Xid(meaning, action, severity or _ACTIONS[action][0])


def _each(codes: Iterable[int], meaning: str, action: str) -> dict[int, Xid]:
    return {code: _xid(meaning, action) for code in codes}


_SUPPORT, _APP, _RESET, _IGNORE = "CONTACT_SUPPORT", "RESTART_APP", "RESET_GPU", "IGNORE"
_NVLINK5 = "WORKFLOW_NVLINK5_ERR"

CATALOG: Mapping[int, Xid] = {
    **_each((*range(1, 8), 9, 10, 12), "invalid commands in the push buffer", _SUPPORT),
    8: _xid("the GPU stopped processing", _APP),
    11: _xid("invalid or corrupted push buffer stream", _APP),
    13: _xid("graphics engine exception: usually an illegal access of a kernel", _APP),
    14: _xid("unused", _IGNORE),
    **_each((15, 17, *range(19, 24)), "display or video engine error", _SUPPORT),
    16: _xid("the display engine hung", _SUPPORT),
    18: _xid("bus mastering is off in the PCI configuration", _SUPPORT),
    24: _xid("GPU semaphore timeout", _SUPPORT),
    25: _xid("invalid or illegal push buffer stream", _APP),
    26: _xid("frame buffer timeout", _SUPPORT),
    **_each((27, 28, 29, *range(34, 37), 42), "video processor exception", _SUPPORT),
    30: _xid("GPU semaphore access error", _SUPPORT),
    31: _xid("GPU memory page fault: an illegal address", _APP),
    32: _xid("invalid or corrupted push buffer stream", _APP),
    33: _xid("internal micro-controller error", _SUPPORT),
    **_each((37, 38), "driver firmware error", _IGNORE),
    **_each((39, 40, 41), "copy engine exception", _APP),
    43: _xid("the GPU stopped processing: a fault of the application, others go on", _IGNORE),
    44: _xid("graphics engine fault during context switch", _IGNORE),
    45: _xid("preemptive clean-up of a channel after an earlier error", "WORKFLOW_XID_45"),
    46: _xid("the GPU stopped processing", _RESET),
    48: _xid("uncorrectable (double-bit) ECC error", "WORKFLOW_XID_48"),
    **_each((47, 65, 73), "video encoder exception", _SUPPORT),
    **_each((49, 50, 51, 52, 53, 55), "internal power or thermal test", _SUPPORT),
    54: _xid("auxiliary power is not connected to the board", "CHECK_MECHANICALS"),
    56: _xid("display engine error", _SUPPORT),
    57: _xid("error in programming the video memory interface", _SUPPORT),
    58: _xid("unstable video memory interface, or an EDC error", _SUPPORT),
    59: _xid("internal micro-controller error", _SUPPORT),
    60: _xid("video processor exception", _APP),
    61: _xid("internal micro-controller breakpoint or warning", _SUPPORT),
    62: _xid("internal micro-controller halt", _RESET),
    63: _xid("row remapping (or page retirement) recorded", _IGNORE, "warning"),
    64: _xid("row remapping (or page retirement) failed to be recorded", _RESET),
    **_each((66, 67), "illegal access by the driver", _IGNORE),
    68: _xid("video decoder exception", _APP),
    69: _xid("graphics engine class error", _APP),
    **_each((70, 71, 72, 75, 76, 77, 85), "copy engine exception", _APP),
    74: _xid("NVLink error", "WORKFLOW_NVLINK_ERR"),
    78: _xid("vGPU start error", "UPDATE_SWFW"),
    79: _xid("the GPU has fallen off the bus", "RESTART_BM"),
    80: _xid("corrupted data was sent to the GPU", _APP),
    81: _xid("VGA subsystem error", _SUPPORT),
    **_each((82, *range(99, 106)), "JPEG engine exception", _APP),
    **_each((83, 84, 88, 89, 96, 97, 98), "video decoder exception", _APP),
    **_each((86, 139), "optical flow engine exception", _APP),
    **_each((87, 91), "reserved", _SUPPORT),
    90: _xid("L2 cache error", _SUPPORT),
    92: _xid("high rate of corrected (single-bit) ECC errors", _IGNORE, "warning"),
    93: _xid("the InfoROM's wear limit is exceeded", _IGNORE),
    94: _xid("contained memory error: the application that used it ends", _APP),
    95: _xid("uncontained memory error", _RESET),
    **_each((106, 107), "SMBus test message", _IGNORE),
    108: _xid("NVLink remote translation error", _IGNORE),
    109: _xid("context switch timeout", _RESET),
    110: _xid("security fault", _RESET),
    111: _xid("display bundle error", _SUPPORT),
    **_each(range(112, 119), "display engine error", _SUPPORT),
    119: _xid("timeout of a call to the GPU's system processor (GSP)", _RESET),
    120: _xid("error of the GPU's system processor (GSP)", _RESET),
    121: _xid("corrected error of the chip-to-chip link (C2C)", _IGNORE, "warning"),
    **_each((122, 123, 124), "access to the board's flash failed", _SUPPORT),
    125: _xid("InfoROM file system error", _SUPPORT),
    **_each(range(126, 136), "copy engine exception", _APP),
    136: _xid("NVLink training failed", _RESET),
    137: _xid("NVLink privilege error: an illegal access through the fabric", _IGNORE, "warning"),
    138: _xid("DLA error", _SUPPORT),
    140: _xid("unrecovered ECC error", _RESET),
    141: _xid("CUDA fast path error", _IGNORE),
    142: _xid("video encoder exception", _SUPPORT),
    143: _xid("GPU initialization error", _RESET),
    144: _xid("NVLink error (SAW)", _NVLINK5),
    145: _xid("NVLink error (RLW)", _NVLINK5),
    146: _xid("NVLink error (TLW)", _NVLINK5),
    147: _xid("NVLink error (TREX)", _NVLINK5),
    148: _xid("NVLink error (NVLPW_CTRL)", _NVLINK5),
    149: _xid("NVLink error (NETIR)", _NVLINK5),
    150: _xid("NVLink error (MSE)", _NVLINK5),
    151: _xid("key rotation error", "RESTART_VM"),
    **_each((152, 153), "DLA error", _IGNORE),
    154: _xid("the driver asks for another recovery action", "XID_154"),
    155: _xid("NVLink error found by software", _RESET),
    156: _xid("a part of the GPU was retired", _RESET),
    157: _xid("a part of the GPU could not be retired", _IGNORE, "warning"),
    158: _xid("fatal timeout of the GPU", _RESET),
    159: _xid("CHI non-data error", "CHECK_UVM"),
    **_each((160, 161), "channel retirement", _IGNORE),
    162: _xid("power smoothing hardware is in use again", _IGNORE),
    163: _xid("power smoothing hardware is out of use: heat, or a timeout", _IGNORE, "warning"),
    164: _xid("power smoothing hardware is near the end of its life", _IGNORE, "warning"),
    165: _xid("power smoothing hardware is worn out: replace the GPU to have it", _SUPPORT),
    **_each((166, 170), "NVLink encryption error", _SUPPORT),
    167: _xid("fatal PCIe timeout", _SUPPORT, "critical"),
    168: _xid("errors in protected memory: less of it is usable", _SUPPORT, "critical"),
    169: _xid("internal micro-controller halt", _SUPPORT, "critical"),
    171: _xid("uncorrectable DRAM error (details of XID 48)", "WORKFLOW_XID_48"),
    172: _xid("uncorrectable SRAM error (details of XID 48)", "WORKFLOW_XID_48"),
}
_UNKNOWN = _xid("unknown to this version", "UNKNOWN")


def explain(code: int) -> Xid:
    return CATALOG.get(code, _UNKNOWN)
