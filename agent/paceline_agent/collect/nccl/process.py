"""A process that uses NCCL, from /proc: its settings, its library, the files it writes."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_agent.collect.cached_files import read_once, read_text_once
from paceline_agent.collect.processes import namespace_pids, real_user, started_ns

_SETTINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "UCX_", "FI_EFA_")
_OTHERS = ("SLURM_JOBID", "HOME", "XDG_CACHE_HOME")
_SETTINGS_AT_MOST = 64
_VALUE_CHARACTERS = 128
_ENVIRON_BYTES = 1 << 20
_LIBRARY = re.compile(r"(/\S*/libnccl\.so\S*)(?: \(deleted\))?$", re.MULTILINE)
_VERSION = re.compile(r"(?:libnccl\.so\.|nvidia_nccl_cu\d+-)(\d+\.\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class NcclProcess:
    """A process that uses NCCL.

    `version`: from the name of the library's file; None if it does not contain one."""

    environment: Mapping[str, str]  # NCCL's settings and the variables that name its files
    pids: frozenset[int]  # its pid in the agent's PID namespace and in nested ones
    version: str | None
    root: Path  # root of its file system, as the agent sees it
    directory: Path | None  # its working directory
    user: int = 0
    started_ns: int = 0  # CLOCK_REALTIME
    descriptors: Path | None = None  # links to its open files

    @property
    def settings(self) -> dict[str, str]:
        named = {
            name: value[:_VALUE_CHARACTERS]
            for name, value in sorted(self.environment.items())
            if name.startswith(_SETTINGS)
        }
        return dict(list(named.items())[:_SETTINGS_AT_MOST])

    @property
    def inspector_directory(self) -> Path | None:
        """The directory that the Inspector's genDumpDir chooses."""
        if self.environment.get("NCCL_INSPECTOR_ENABLE", "0") == "0":
            return None
        named = self.environment.get("NCCL_INSPECTOR_DUMP_DIR")
        job = self.environment.get("SLURM_JOBID", "unknown-jobid")
        return self.seen_from_here(named or f"nccl-inspector-{job}")

    @property
    def debug_file(self) -> Path | None:
        """NCCL_DEBUG_FILE with its %h and %p filled in."""
        named = self.environment.get("NCCL_DEBUG_FILE")
        if not named:
            return None
        for pid in sorted(self.pids):
            path = self.seen_from_here(named.replace("%p", str(pid)))
            if path is None:
                continue
            if "%h" not in path.name:
                return path
            found = glob.glob(path.name.replace("%h", "*"), root_dir=path.parent)
            if found:
                return path.parent / min(found)
        return None

    @property
    def debugs(self) -> bool:
        return self.environment.get("NCCL_DEBUG", "").upper() in (
            "VERSION",
            "WARN",
            "INFO",
            "TRACE",
        )

    def seen_from_here(self, named: str) -> Path | None:
        """Return the agent's path for a path of the process.

        None for a relative path if the process's directory is unknown."""
        path = Path(named)
        if path.is_absolute():
            return self.root / path.relative_to("/")
        return None if self.directory is None else self.directory / path


def read_process(procfs_root: Path, pid: int) -> NcclProcess | None:
    """Return the process; None if it is gone or not accessible."""
    directory = procfs_root / str(pid)
    try:
        content = read_once(directory / "environ", _ENVIRON_BYTES)
    except OSError:
        return None
    user = real_user(procfs_root, pid)
    if user is None:
        return None
    pairs = (entry.partition("=") for entry in content.decode(errors="replace").split("\0"))
    environment = {
        name: value for name, _, value in pairs if name.startswith(_SETTINGS) or name in _OTHERS
    }
    root = directory / "root"
    if not os.path.exists(root):  # also False without the permission to see it
        root = Path("/")
    working = directory / "cwd"
    return NcclProcess(
        environment=environment,
        pids=frozenset({pid, *namespace_pids(procfs_root, pid)}),
        version=library_version(directory, root),
        root=root,
        directory=working if os.path.exists(working) else None,
        user=user,
        started_ns=started_ns(procfs_root, pid) or 0,
        descriptors=directory / "fd",
    )


def library_version(directory: Path, root: Path) -> str | None:
    """Return the version from the name of the mapped file or of its wheel.

    No file is opened and nothing is run."""
    try:
        maps = read_text_once(directory / "maps")
    except OSError:
        return None
    found = _LIBRARY.search(maps)
    if found is None:
        return None
    path = root / found[1].lstrip("/")
    named = _VERSION.search(found[1])
    if named is not None:
        return named[1]
    if len(path.parents) < 4:
        return None
    for wheel in sorted(glob.glob("nvidia_nccl_cu*.dist-info", root_dir=path.parents[3])):
        if named := _VERSION.search(wheel):
            return named[1]
    return None
