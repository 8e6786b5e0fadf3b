"""Data that the kernel allows this process to read about other processes."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

from paceline_agent.collect.cached_files import read_once, read_text_once
from paceline_agent.expose.check.report import NO, PARTLY, YES, CheckRow

_CAP_SYS_PTRACE = 19  # linux/capability.h
_HIDING = re.compile(r"\bhidepid=(\w+)")
_READABLE_BY_ALL = {"0", "off"}


def pressure(procfs: Path) -> CheckRow:
    found = [name for name in ("cpu", "memory", "io") if _reads(procfs / "pressure" / name)]
    if len(found) == 3:
        return CheckRow("pressure (PSI)", YES, "cpu, memory, io")
    remedy = "boot with psi=1, on a kernel 4.20 or later with CONFIG_PSI"
    return CheckRow(
        "pressure (PSI)", PARTLY if found else NO, ", ".join(found) or "not there", remedy
    )


def other_processes(procfs: Path) -> CheckRow:
    """Check counters of other users' ranks: `io` and `environ` need ptrace rights."""
    hiding = _HIDING.search(_proc_mount(procfs))
    if hiding is not None and hiding[1] not in _READABLE_BY_ALL and not _sees(procfs, "stat"):
        remedy = "mount /proc with hidepid=0, or put the agent into the group of gid="
        return CheckRow("other users' /proc", NO, f"hidden by hidepid={hiding[1]}", remedy)
    if has_capability(procfs, _CAP_SYS_PTRACE) or _sees(procfs, "environ"):
        return CheckRow("other users' /proc", YES, "all of it")
    return CheckRow(
        "other users' /proc",
        PARTLY,
        "CPU, memory and context switches, not I/O and environment",
        "run as the ranks' user or as root, or grant CAP_SYS_PTRACE",
    )


def stacks(procfs: Path) -> CheckRow:
    """Check whether py-spy may read ranks; the rules are those of a debugger."""
    what = "stacks of ranks (py-spy)"
    scripts = sysconfig.get_path("scripts")
    if shutil.which("py-spy", path=scripts) is None and shutil.which("py-spy") is None:
        return CheckRow(what, NO, "py-spy is not installed", "pip install 'paceline[agent]'")
    scope = _text(procfs / "sys/kernel/yama/ptrace_scope") or "0"
    setting = f"kernel.yama.ptrace_scope={scope}"
    if scope == "3":
        return CheckRow(what, NO, setting, "reboot with kernel.yama.ptrace_scope at most 2")
    if has_capability(procfs, _CAP_SYS_PTRACE):
        return CheckRow(what, YES, f"of all users: CAP_SYS_PTRACE, {setting}")
    if scope == "2":
        return CheckRow(what, NO, setting, "grant CAP_SYS_PTRACE")
    return CheckRow(
        what,
        PARTLY,
        f"of this user's ranks, {setting}",
        "grant CAP_SYS_PTRACE for other users' ranks",
    )


def has_capability(procfs: Path, number: int) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(procfs / "self/status"), re.MULTILINE)
    return bool(match and int(match[1], 16) >> number & 1)


def _sees(procfs: Path, name: str) -> bool:
    """Return whether a file of process 1, as an example of another user's process, can be read."""
    return os.geteuid() != 0 and _reads(procfs / "1" / name)


def _proc_mount(procfs: Path) -> str:
    lines = _text(procfs / "self/mounts").splitlines()
    return next((line for line in lines if line.split()[1:3] == [str(procfs), "proc"]), "")


def _reads(path: Path) -> bool:
    try:
        read_once(path, 1)
    except OSError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return read_text_once(path).strip()
    except OSError:
        return ""
