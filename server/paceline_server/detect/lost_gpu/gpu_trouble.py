"""What a collector's event says of a GPU: does it fail, does it go on, and what is to be done?

The kernel's log says how bad an XID is and what NVIDIA advises ("critical: XID 95: uncontained
memory error; RESET_GPU: drain the node ..."); NVML says the number only, and a table here the rest.
A GPU that does not answer NVML is no failure yet: drivers are busy at times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline_wire.batch import DeviceEvent

_DETAIL = re.compile(
    r"(?:(?P<severity>info|warning|critical): )?XID (?P<code>\d{1,9})\b[^:;]*"
    r"(?:: (?P<meaning>[^;]+)(?:; (?P<action>[^;:]+): (?P<advice>[^;]+))?)?"
)
# NVIDIA's catalogue of XIDs: immediate actions that end what runs on the GPU.
_FATAL_ACTIONS = frozenset(
    {"RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS", "WORKFLOW_XID_48"}
)
# The same for NVML, which tells no action.
_FATAL = frozenset({46, 48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_WARNED = frozenset({13, 31, 63, 74, 92, 94, *range(144, 151), 167, 168, 169, 171, 172})
# What follows from a process that was killed, or from an error that is told by itself.
_CONSEQUENCES = frozenset({43, 45, 154})
_MEANINGS: Mapping[int, str] = {
    31: "GPU memory page fault",
    48: "uncorrectable (double-bit) ECC error",
    63: "row remapping recorded",
    64: "row remapping failed to be recorded",
    74: "NVLink error",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "timeout of the GPU's system processor (GSP)",
    120: "error of the GPU's system processor (GSP)",
}
_OFF_THE_BUS = 79


@dataclass(frozen=True, slots=True)
class GpuTrouble:
    """`what` and `short` complete "gpu3 ..." and "node-1 reported gpu3 ..."."""

    code: str
    what: str
    short: str
    is_fatal: bool
    is_lost: bool = False
    is_hung: bool = False  # its ranks may go on, or stand still: then they are found to hang
    is_of_node: bool = False  # of what all its GPUs share
    advice: str | None = None
    is_plain: bool = False  # NVML's: the kernel's log says more of it


def trouble_of(event: DeviceEvent) -> GpuTrouble | None:
    """None: no news of a GPU, or nothing to worry about."""
    if event.kind == "gpu_lost":
        return GpuTrouble("79", "is lost", "lost", is_fatal=True, is_lost=True)
    if event.kind == "gpu_hung":
        return GpuTrouble(
            "hung", "does not answer its driver", "hung", is_fatal=False, is_hung=True
        )
    if event.kind == "xid":
        return _xid(event.detail)
    if event.kind == "sxid" and event.detail.startswith("critical: "):
        return GpuTrouble(
            "sxid", "reported a fatal NVSwitch error", "with a fatal error", is_fatal=True,
            is_of_node=True, advice="drain the node and reset its GPUs and NVSwitches together",
        )  # fmt: skip
    return None


def _xid(detail: str) -> GpuTrouble | None:
    match = _DETAIL.match(detail)
    if match is None:
        return None
    number, severity, action = int(match["code"]), match["severity"], match["action"]
    if number in _CONSEQUENCES and severity != "critical":
        return None
    if severity is None:
        is_fatal, is_worth = number in _FATAL, number in _FATAL | _WARNED
    else:
        is_worth = severity != "info"
        is_fatal = severity == "critical" and _ends_what_runs(action, match["advice"])
    if not is_worth:
        return None
    meaning = match["meaning"] or _MEANINGS.get(number)
    told = f"XID {number}" + (f" ({meaning})" if meaning else "")
    is_lost = number == _OFF_THE_BUS
    return GpuTrouble(
        code=str(number),
        what="has fallen off the bus (XID 79)" if is_lost else f"reported {told}",
        short="lost" if is_lost else "in error",
        is_fatal=is_fatal,
        is_lost=is_lost,
        advice=match["advice"],
        is_plain=severity is None,
    )


def _ends_what_runs(action: str | None, advice: str | None) -> bool:
    """XID 154 names the action itself: `recovery action: GPU Reset Required`."""
    if action == "recovery action":
        return advice is not None and not advice.lower().startswith("drain")
    return action in _FATAL_ACTIONS
