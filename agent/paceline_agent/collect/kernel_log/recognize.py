"""Kernel messages to events."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline_agent.collect.kernel_log.relevance import RuleMatcher
from paceline_agent.collect.kernel_log.rules import AER_OF_FIRMWARE, OFF_BUS, RULES, Rule
from paceline_agent.collect.kernel_log.xids import Severity, explain

_DETAIL_CHARACTERS = 300
_MESSAGE_CHARACTERS = 2000  # a record of the kernel has 1,000 (printk.c, LOG_LINE_MAX)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)( GPU-I:\w+)?\): (\d{1,9})(?:, *(.*))?$")
_PID = re.compile(r"pid=(?:'?(\d+)'?|[^,]*)(?:, *|$)")
_NAME = re.compile(r"name=(?:'?<[^>]*>'?|([^,]*))(?:, *|$)")
_RECOVERY = re.compile(r"changed from .* to 0x\w+ \(([^)]+)\)")
_SXID = re.compile(
    r"(nvidia-nvswitch\d+): SXid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),"
    r"(?! *(?:Severity|Data) ) *(.*)"
)
_MACHINE_CHECK = re.compile(
    r"(?:mce: )?\[Hardware Error\]: CPU (\d+): Machine Check(?: Exception)?: \S+ "
    r"Bank (\d+): ([0-9a-f]{1,16})\b"
)
_UNCORRECTED = 1 << 61  # MCi_STATUS.UC: Intel SDM vol. 3B, 17.3.2.2; AMD APM vol. 2, 9.3.2
_DIMM = re.compile(r" on (?!(?:any|unknown) )(\S+)")  # "any memory": the controller does not know
# Logged once per GPU before its first XID: the serial number, which NVML no longer reports for a
# lost GPU.
_GPU_IS = re.compile(r"NVRM: GPU at (?:PCI:)?([0-9a-fA-F:.]+): (GPU-[0-9a-f-]{36})")
_SERIAL = re.compile(
    r"NVRM: GPU (?:(?P<of>[0-9a-fA-F:.]+): GPU serial number is|Board Serial Number:) (?P<is>\w+)"
)
_GPUS_AT_MOST = 64
# Class of each device, logged when it is found; only classes that matter for training.
_PCI_CLASS = re.compile(r"pci ([0-9a-f:.]+): \[\w{4}:\w{4}\] type \w+ class 0x(\w{4})")
_NETWORK_OR_GPU = ("02", "03", "12", "0b40")  # also accelerators: pci_ids.h
# An interface gets its first link after it was opened; until then drivers log "down", also for a
# port without a cable.
_APPEARED = re.compile(r"([\w.-]+): renamed from |mlx5_core ([0-9a-f:.]+): firmware version: ")
_CONNECTED = re.compile(
    r"([\w.-]+):? (?:NIC |Device )?link (?:is )?(?:up|becomes ready)\b"
    r"|mlx5_core ([0-9a-f:.]+): Port module event.*, Cable plugged",
    re.IGNORECASE,
)
# Linux before 5.1 logs which limit was reached, and in the next message which process was killed.
_IS_FULL = re.compile(r"(Memory cgroup )?out of memory.*: Kill process ", re.IGNORECASE)
_FOUND_AT_MOST = 4096
# The last part names no device: the driver logs three messages, or one message of three lines.
_OFF_BUS_BEGINS = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)$")
_OFF_BUS_ENDS = re.compile(r"NVRM: fallen off the bus")
_LINES_APART = 8  # messages from other CPUs may be in between


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """An event; `device` is a PCI address, the kernel's name of it, or "host"."""

    kind: str
    severity: Severity
    code: str
    device: str
    detail: str
    pid: int | None = None
    process: str | None = None
    count: int = 1


_appeared = lru_cache(maxsize=1024)(_APPEARED.search)
_connected = lru_cache(maxsize=1024)(_CONNECTED.search)


class Recognizer:
    """Recognizes messages in their order; some belong to the previous one."""

    def __init__(self, rules: Iterable[Rule] = RULES) -> None:
        self._matcher = RuleMatcher(rules)
        self._lines = 0
        self._xid_79_at: dict[str, int] = {}  # by PCI address: line
        self._off_bus: tuple[str, int] | None = None  # PCI address, first line
        self._identities: dict[str, dict[str, str]] = {}  # by PCI address: UUID, serial number
        self._others: set[str] = set()  # PCI addresses of devices that are neither GPUs nor NICs
        # interfaces and adapters that appeared in this log and have had no link yet
        self._not_yet_up: set[str] = set()
        self._firmware: KernelEvent | None = None  # its last message
        self._cgroup_is_full = False  # the next killed process was in that cgroup
        self._introduced = ""  # PCI address of the GPU whose serial number comes next

    def recognize(self, message: str, times: int = 1) -> KernelEvent | None:
        event = self._recognize(message[:_MESSAGE_CHARACTERS])
        if event is None or times == 1:
            return event
        return replace(event, count=event.count * times)

    def skip(self, lines: int) -> None:
        """Count lines that were not worth recognizing."""
        self._lines += lines

    def _recognize(self, message: str) -> KernelEvent | None:
        self._lines += 1
        self._introduce(message)
        for special in (self._xid, self._sxid, self._machine_check, self._three_lines):
            event = special(message)
            if event is not None:
                return event
        event = self._by_rule(message)
        if event is not None and event.kind == OFF_BUS:
            return self._fallen(event.device, event.detail)
        if event is not None and event.kind == "oom_kill":
            of_full, self._cgroup_is_full = self._cgroup_is_full, False
            return replace(event, code="cgroup") if of_full else event
        if event is not None and event.kind == "hardware_error":
            self._firmware = event
        elif event is not None and event.code == AER_OF_FIRMWARE and self._firmware is not None:
            return replace(event, code=self._firmware.code, severity=self._firmware.severity)
        return event

    def _by_rule(self, message: str) -> KernelEvent | None:
        found = self._matcher.find(message)
        if found is None or found[0].kind is None:
            return None
        rule, groups = found
        event = _event(rule, found[0].kind, groups, message)
        return None if self._is_usual(event) else event

    def _is_usual(self, event: KernelEvent) -> bool:
        if event.kind == "nic_link_down" or event.code == "cable_unplugged":
            # "definitely": a bond's message
            return event.device in self._not_yet_up and "definitely" not in event.detail
        return event.kind == "pcie_bandwidth_limited" and event.device in self._others

    def _introduce(self, message: str) -> None:
        if message.startswith("pci ") and (found := _PCI_CLASS.match(message)):
            if not found[2].startswith(_NETWORK_OR_GPU) and len(self._others) < _FOUND_AT_MOST:
                self._others.add(found[1])
        elif "Kill process " in message and (found := _IS_FULL.match(message)):
            self._cgroup_is_full = found[1] is not None
        elif (": renamed from " in message or ": firmware version: " in message) and (
            found := _appeared(message)
        ):
            if len(self._not_yet_up) < _FOUND_AT_MOST:
                self._not_yet_up.add(found[1] or found[2])
        elif ("ink " in message or "Cable plugged" in message) and (found := _connected(message)):
            self._not_yet_up.discard(found[1] or found[2])
        if not message.startswith("NVRM: GPU "):
            return
        if gpu := _GPU_IS.match(message):
            self._introduced = pci_address(gpu[1])
            self._identity(self._introduced)["uuid"] = gpu[2]
        elif serial := _SERIAL.match(message):
            whose = pci_address(serial["of"]) if serial["of"] else self._introduced
            self._identity(whose)["serial"] = f"serial number {serial['is']}"

    def _identity(self, device: str) -> dict[str, str]:
        if device not in self._identities and len(self._identities) >= _GPUS_AT_MOST:
            self._identities.clear()
        return self._identities.setdefault(device, {})

    def _known_as(self, device: str) -> str:
        return "".join(f"; {part}" for part in self._identities.get(device, {}).values())

    def _xid(self, message: str) -> KernelEvent | None:
        match = _XID.match(message) if "Xid" in message else None
        if match is None:
            return None
        device, code, rest = pci_address(match[1]), int(match[3]), match[4] or ""
        if code == 79:
            self._xid_79_at[device] = self._lines
        pid, rest = _take(_PID, rest)
        process, rest = _take(_NAME, rest)
        xid = explain(code)
        severity: Severity = xid.severity
        advice = f"{xid.action}: {xid.advice}"
        if recovery := _RECOVERY.search(rest):
            advice = f"recovery action: {recovery[1]}"
            severity = "info" if recovery[1].lower() == "none" else severity
        elif 144 <= code <= 150 and "nonfatal" in rest.lower().replace("-", ""):
            severity = "warning"
        who = "" if pid is None else f"; pid {pid}" + (f" ({process})" if process else "")
        instance = match[2] or ""
        text = f"; {rest}" if rest else ""
        detail = f"XID {code}{instance}: {xid.meaning}; {advice}{who}{self._known_as(device)}{text}"
        return KernelEvent(
            "xid", severity, str(code), device, detail[:_DETAIL_CHARACTERS], _number(pid),
            process,
        )  # fmt: skip

    def _sxid(self, message: str) -> KernelEvent | None:
        match = _SXID.match(message) if "SXid" in message else None
        if match is None:
            return None
        text = match[4].lower()
        severity: Severity = "critical" if text.startswith("fatal") else "warning"
        detail = f"SXid {match[3]} of {match[1]}: {match[4]}"[:_DETAIL_CHARACTERS]
        return KernelEvent("sxid", severity, match[3], pci_address(match[2]), detail)

    def _machine_check(self, message: str) -> KernelEvent | None:
        match = _MACHINE_CHECK.match(message) if "Machine Check" in message else None
        if match is None:
            return None
        uncorrected = bool(int(match[3], 16) & _UNCORRECTED)
        return KernelEvent(
            "machine_check", "critical" if uncorrected else "info",
            "uncorrected" if uncorrected else "corrected", f"bank{match[2]}",
            message[:_DETAIL_CHARACTERS],
        )  # fmt: skip

    def _three_lines(self, message: str) -> KernelEvent | None:
        if not message.startswith("NVRM: "):
            return None
        if begins := _OFF_BUS_BEGINS.match(message):
            self._off_bus = (pci_address(begins[1]), self._lines)
        elif _OFF_BUS_ENDS.match(message) and self._off_bus is not None:
            (device, line), self._off_bus = self._off_bus, None
            if self._lines - line <= _LINES_APART:
                return self._fallen(device, "it does not respond to commands")
        return None

    def _fallen(self, device: str, text: str) -> KernelEvent | None:
        """Return XID 79 for a GPU that fell off the bus, unless the driver has just logged that
        XID."""
        if self._was_reported_as_xid(device):
            return None
        self._xid_79_at[device] = self._lines
        xid = explain(79)
        who = self._known_as(device)
        detail = f"XID 79: {xid.meaning}; {xid.action}: {xid.advice}{who}; {text}"
        return KernelEvent("xid", xid.severity, "79", device, detail[:_DETAIL_CHARACTERS])

    def _was_reported_as_xid(self, device: str) -> bool:
        """Return whether the driver has just logged the same event as XID 79."""
        if device == "host":
            return any(self._lines - line <= _LINES_APART for line in self._xid_79_at.values())
        line = self._xid_79_at.get(device)
        return line is not None and self._lines - line <= _LINES_APART


def _event(rule: Rule, kind: str, found: dict[str, str | None], message: str) -> KernelEvent:
    device = found.get("device") or "host"
    if ":" in device:
        device = pci_address(device)
    elif device.isdecimal():
        device = f"cpu{device}" if "lockup" in kind else f"gpu{device}"
    if kind == "edac" and (dimm := _DIMM.search(message)):
        device = dimm[1]
    return KernelEvent(
        kind, rule.severity, _code(found.get("code") or rule.code), device,
        message[:_DETAIL_CHARACTERS], _number(found.get("pid")), found.get("process"),
        int(found.get("count") or 1),
    )  # fmt: skip


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _code(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text.lower()).strip("_")[:40]


def _take(pattern: re.Pattern[str], text: str) -> tuple[str | None, str]:
    match = pattern.match(text)
    return (match[1], text[match.end() :]) if match else (None, text)


def pci_address(text: str) -> str:
    """Return 0000:9b:00.0 for `0000:9b:00`, `00000000:9B:00.0` or `9b:00.0`."""
    text = text.lower()
    if text.count(":") == 1:
        text = f"0000:{text}"
    domain, _, rest = text.partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}" + ("" if "." in rest else ".0")
