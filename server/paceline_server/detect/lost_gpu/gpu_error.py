"""The GPU error in a collector's event: is it fatal, and what is NVIDIA's advice?

A message from the kernel log has the severity of an XID and NVIDIA's advice ("critical: XID 95:
uncontained memory error; RESET_GPU: drain the node ..."). NVML reports only the number; the tables
here have the rest. A GPU that does not respond to NVML has not failed yet: the driver may be busy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline_server.detect.causes.checks.gpu_errors import PROGRAM_XIDS
from paceline_wire.batch import OF_ANOTHER_PROCESS, DeviceEvent

_DETAIL = re.compile(
    r"(?:(?P<severity>info|warning|critical): )?XID (?P<code>\d{1,9})\b[^:;]*"
    r"(?:: (?P<meaning>[^;]+)(?:; (?P<action>[^;:]+): (?P<advice>[^;]+))?)?"
)
# NVIDIA's XID catalog: immediate actions that end all processes on the GPU.
_FATAL_ACTIONS = frozenset(
    {"RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS", "WORKFLOW_XID_48"}
)
# The XIDs with these actions, for NVML, which reports no action.
_FATAL = frozenset({46, 48, 54, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_WARNINGS = frozenset({13, 31, 63, 74, 92, 94, *range(144, 151), 167, 168, 169, 171, 172})
# XIDs that follow from a killed process, or from an error that is reported separately.
_CONSEQUENCES = frozenset({43, 45, 154})
_RANK = re.compile(r"\[rank \d+ of (?P<job>[^]]*)\]")
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
class GpuError:
    """One error of a GPU.

    `what` completes "gpu3 ...", `short` completes "node-1 reported gpu3 ...".
    """

    code: str
    what: str
    short: str
    is_fatal: bool
    is_lost: bool = False
    is_hung: bool = False  # its ranks may continue; otherwise the hang detector reports them
    is_of_node: bool = False  # the error is in a component that all GPUs of the node share
    advice: str | None = None
    is_from_nvml: bool = False  # the kernel log has more details


def gpu_error_of(event: DeviceEvent) -> GpuError | None:
    """Return the GPU error of an event; None if there is none, or it is harmless."""
    if event.kind == "gpu_lost":
        return GpuError("79", "is lost", "lost", is_fatal=True, is_lost=True)
    if event.kind == "gpu_hung":
        return GpuError(
            "hung", "does not respond to its driver", "hung", is_fatal=False, is_hung=True
        )
    if event.kind == "xid":
        return _xid(event.detail)
    if event.kind == "sxid" and event.detail.startswith("critical: "):
        return GpuError(
            "sxid", "reported a fatal NVSwitch error", "with a fatal error", is_fatal=True,
            is_of_node=True, advice="drain the node and reset its GPUs and NVSwitches together",
        )  # fmt: skip
    return None


def is_of_another_job(event: DeviceEvent, job: str) -> bool:
    """Return whether an XID is the fault of a process that belongs to no rank of the job."""
    match = _DETAIL.match(event.detail) if event.kind == "xid" else None
    if match is None or str(int(match["code"])) not in PROGRAM_XIDS:
        return False
    rank = _RANK.search(event.detail)
    return OF_ANOTHER_PROCESS in event.detail or (rank is not None and rank["job"] != job)


def _xid(detail: str) -> GpuError | None:
    match = _DETAIL.match(detail)
    if match is None:
        return None
    number, severity, action = int(match["code"]), match["severity"], match["action"]
    if number in _CONSEQUENCES and severity != "critical":
        return None
    if severity is None:
        is_fatal, is_reported = number in _FATAL, number in _FATAL | _WARNINGS
    else:
        is_reported = severity != "info"
        is_fatal = severity == "critical" and _ends_processes(action, match["advice"])
    if not is_reported:
        return None
    meaning = match["meaning"] or _MEANINGS.get(number)
    xid = f"XID {number}" + (f" ({meaning})" if meaning else "")
    is_lost = number == _OFF_THE_BUS
    return GpuError(
        code=str(number),
        what="has fallen off the bus (XID 79)" if is_lost else f"reported {xid}",
        short="lost" if is_lost else "in error",
        is_fatal=is_fatal,
        is_lost=is_lost,
        advice=match["advice"],
        is_from_nvml=severity is None,
    )


def _ends_processes(action: str | None, advice: str | None) -> bool:
    """Return whether the action ends the processes. XID 154 names it: `recovery action: ...`."""
    if action == "recovery action":
        return advice is not None and not advice.lower().startswith("drain")
    return action in _FATAL_ACTIONS
