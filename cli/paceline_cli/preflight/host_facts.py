"""Facts of the host: versions, limits, shared memory, clock, CPUs, checkpoint paths."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline_agent.collect import clock_sync
from paceline_agent.collect.cached_files import entries
from paceline_cli.preflight.facts import PEER_MEMORY_MODULES, CheckpointPath

_DISTRIBUTIONS = ("torch", "paceline")
_NCCL_DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_MODULES = (*PEER_MEMORY_MODULES, "nvidia", "mlx5_ib", "gdrdrv")
_VERSIONED_MODULES = ("mlx5_core", "gdrdrv")
_ENVIRONMENT = ("NCCL_", "GLOO_", "UCX_", "TORCH_NCCL_")
_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}
_WRITTEN_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_KERNEL_DOES_NOT_KNOW_SECONDS = 16.0  # maxerror stops at 16 s if no daemon synchronizes the clock


def versions(sysfs_root: Path) -> dict[str, str]:
    found: dict[str, str | None] = {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "nccl": _nccl(),
    }
    found |= {name: _distribution(name) for name in _DISTRIBUTIONS}
    for module in _VERSIONED_MODULES:
        found[module] = _text(sysfs_root / "module" / module / "version")
    return {name: version for name, version in found.items() if version is not None}


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    """Return the NCCL version of torch's wheel, otherwise of the system's library."""
    for name in _NCCL_DISTRIBUTIONS:
        version = _distribution(name)
        if version is not None:
            return version
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    major, rest = divmod(number.value, 10_000)  # nccl.h, NCCL_VERSION, since 2.9
    return f"{major}.{rest // 100}.{rest % 100}"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}


def modules(sysfs_root: Path) -> list[str]:
    """Return the loaded modules; `nvidia-open` for open kernel modules, which support dma-buf."""
    root = sysfs_root / "module"
    loaded = [name for name in _MODULES if (root / name).is_dir()]
    if "Open" in (_text(Path("/proc/driver/nvidia/version")) or ""):
        loaded.append("nvidia-open")
    return loaded


def limits() -> dict[str, int | None]:
    soft = {name: resource.getrlimit(which)[0] for name, which in _LIMITS.items()}
    return {n: None if value == resource.RLIM_INFINITY else value for n, value in soft.items()}


def shared_memory(path: Path = Path("/dev/shm")) -> dict[str, Any]:
    try:
        found = os.statvfs(path)
    except OSError:
        return {}
    return {
        "shm_size_bytes": found.f_blocks * found.f_frsize,
        "shm_available_bytes": found.f_bavail * found.f_frsize,
    }


def clock() -> dict[str, Any]:
    try:
        clock = clock_sync.read()
    except OSError:
        return {}
    error = clock.maximum_error_seconds
    known = error < _KERNEL_DOES_NOT_KNOW_SECONDS
    return {
        "clock_synchronised": clock.is_synchronised,
        "clock_error_seconds": error if known else None,
    }


def machine(sysfs_root: Path, procfs_root: Path) -> dict[str, Any]:
    cpus = sysfs_root / "devices" / "system" / "cpu"
    governors = {
        _text(cpus / name / "cpufreq" / "scaling_governor")
        for name in entries(cpus)
        if name.removeprefix("cpu").isdecimal()
    }
    balancing = _text(procfs_root / "sys" / "kernel" / "numa_balancing")
    return {
        "cpu_count": len(os.sched_getaffinity(0)),
        "cpu_governors": sorted(each for each in governors if each is not None),
        "memory_bytes": _memory_bytes(procfs_root),
        "numa_nodes": _numa_nodes(sysfs_root),
        "numa_balancing": None if balancing is None else balancing != "0",
    }


def _numa_nodes(sysfs_root: Path) -> int | None:
    names = entries(sysfs_root / "devices" / "system" / "node")
    return len([name for name in names if name.removeprefix("node").isdecimal()]) or None


def _memory_bytes(procfs_root: Path) -> int | None:
    for line in (_text(procfs_root / "meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return None


def checkpoint(path: Path, procfs_root: Path) -> CheckpointPath:
    """Measure free space, and the throughput of one file that is written, synced and removed."""
    try:
        space = os.statvfs(path)
        speed = _write_speed(path)
    except OSError as error:
        return CheckpointPath(path=str(path), problem=error.strerror or str(error))
    return CheckpointPath(
        path=str(path),
        filesystem=_filesystem(path, procfs_root),
        size_bytes=space.f_blocks * space.f_frsize,
        available_bytes=space.f_bavail * space.f_frsize,
        write_bytes_per_second=speed,
    )


def _write_speed(directory: Path) -> float:
    chunk = os.urandom(
        _CHUNK_BYTES
    )  # random: compression or deduplication would distort the result
    started = time.perf_counter()
    with tempfile.TemporaryFile(dir=directory, prefix=".paceline-preflight-") as file:
        for _ in range(_WRITTEN_BYTES // _CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return _WRITTEN_BYTES / (time.perf_counter() - started)


def _filesystem(path: Path, procfs_root: Path) -> str | None:
    """Return `nfs4`, `lustre`, `ext4` ...: the type of the longest mount point above the path."""
    real = Path(os.path.realpath(path))
    best: tuple[int, str] | None = None
    for line in (_text(procfs_root / "self" / "mounts") or "").splitlines():
        with contextlib.suppress(ValueError, IndexError):
            _, point, kind = line.split()[:3]
            depth = len(Path(point).parts)
            if real.is_relative_to(point) and (best is None or depth >= best[0]):
                best = (depth, kind)
    return None if best is None else best[1]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
