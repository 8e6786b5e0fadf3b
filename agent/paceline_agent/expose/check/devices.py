"""Devices found by a sweep of the collectors, and counters that it could not read."""

from __future__ import annotations

import errno
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline_agent.collect.cached_files import entries, read_text_once
from paceline_agent.collect.contract import Context
from paceline_agent.expose import catalog
from paceline_agent.expose.check.report import NO, PARTLY, YES, CheckRow
from paceline_agent.expose.once import CollectorResult
from paceline_agent.printable import printable
from paceline_wire import metric_names
from paceline_wire.batch import GpuInfo

_GPU_PREFIXES = ("DCGM_FI_DEV_", "paceline_gpu_")
# Signals that exist only in certain states (an XID, a process, MIG), after two sweeps, or with a
# certain topology: their absence is not a problem.
_NOT_ALWAYS = re.compile(
    r"XID_ERRORS|_process_|_processes|_mig_|_distance$|nearest_nic|NVLINK_BANDWIDTH_TOTAL"
)
_COUNTER_BYTES = 4096  # a file of sysfs is one page at most
_A_FAMILY = 4  # number of missing signals from which they are listed as a family
_REASONS = {
    errno.EACCES: ("access denied", "run the agent as root"),
    errno.EPERM: ("restricted", "grant CAP_NET_ADMIN, or ask who set the port up"),
    errno.EINVAL: ("the port keeps no such counter", ""),
    errno.EIO: ("the adapter does not answer", "look for mlx5 health messages in the kernel's log"),
}
_NO_PMA = ("no performance agent (N/A)", "a firmware that implements the PMA")


def gpus(outcome: CollectorResult) -> Iterator[CheckRow]:
    if outcome.collected is None:
        remedy = (
            "install the NVIDIA driver; in a container, pass libnvidia-ml.so.1 and /dev/nvidia*"
        )
        yield CheckRow("GPUs (NVML)", NO, outcome.trouble or "", remedy)
        return
    found = outcome.collected.gpus or []
    versions = next((s.labels for s in outcome.samples if s.name == metric_names.DRIVER_INFO), {})
    drivers = ", ".join(
        f"{name.removesuffix('_version')} {text}" for name, text in versions.items()
    )
    yield CheckRow("GPUs (NVML)", YES if found else NO, f"{len(found)} GPUs; {drivers}")
    for missing, alike in _by_missing(outcome, found).items():
        evidence = f"all {len(_gpu_signals())} signals"
        if missing:
            evidence = f"without {', '.join(missing)}"
        yield CheckRow(
            f"  {', '.join(f'gpu{gpu.index}' for gpu in alike)}",
            PARTLY if missing else YES,
            f"{alike[0].name}: {evidence}",
            "a GPU, mode or driver that has them" if missing else "",
        )


def _by_missing(
    outcome: CollectorResult, found: Sequence[GpuInfo]
) -> Mapping[tuple[str, ...], list[GpuInfo]]:
    brought: dict[str, set[str]] = defaultdict(set)
    for sample in outcome.samples:
        brought[sample.labels.get("gpu", "")].add(sample.name)
    groups: dict[tuple[str, ...], list[GpuInfo]] = defaultdict(list)
    for gpu in found:
        groups[_summed_up(_gpu_signals() - brought[str(gpu.index)])].append(gpu)
    return groups


def _gpu_signals() -> set[str]:
    names = catalog.load().exact
    return {
        name for name in names if name.startswith(_GPU_PREFIXES) and not _NOT_ALWAYS.search(name)
    }


def _summed_up(missing: set[str]) -> tuple[str, ...]:
    """Return names without prefix; `nvlink_*` for a GPU without any NVLink signal."""
    families: dict[str, set[str]] = defaultdict(set)
    for name in _gpu_signals():
        short = _shortened(name)
        families[short.partition("_")[0]].add(short)
    names = {_shortened(name) for name in missing}
    for family, members in families.items():
        if len(members) >= _A_FAMILY and members <= names:
            names = names - members | {f"{family}_*"}
    return tuple(sorted(names))


def _shortened(name: str) -> str:
    return name.removeprefix("DCGM_FI_DEV_").removeprefix("paceline_gpu_")


def rdma(context: Context) -> Iterator[CheckRow]:
    """Yield the state of each port, and the counters that cannot be read, with the reason."""
    what = "InfiniBand and RoCE"
    root = context.sysfs_root / "class" / "infiniband"
    ports = [
        (device, number) for device in entries(root) for number in entries(root / device / "ports")
    ]
    if not ports:
        remedy = "load the adapter's driver; in a container, mount the host's /sys"
        yield CheckRow(what, NO, f"no ports in {root}", remedy)
        return
    yield CheckRow(what, YES, f"{len(ports)} ports")
    for device, number in ports:
        name = f"{device}/{number}"
        if context.excludes_rdma(device) or context.excludes_rdma(name):
            yield CheckRow(f"  {name}", NO, "excluded by --exclude-rdma, never opened")
        else:
            yield _port(name, root / device / "ports" / number)


def _port(name: str, directory: Path) -> CheckRow:
    unread: dict[tuple[str, str], int] = defaultdict(int)
    readable = 0
    for folder in ("counters", "counters_ext", "hw_counters"):
        for file in entries(directory / folder):
            reason = _why_unread(directory / folder / file)
            if reason is None:
                readable += 1
            else:
                unread[reason] += 1
    state = [_first_line(directory / file) for file in ("link_layer", "state", "rate")]
    names = ", ".join(text for text in state if text)
    counters = [f"{readable} counters"]
    counters += [f"{count} not: {reason}" for (reason, _), count in unread.items()]
    return CheckRow(
        f"  {name}",
        YES if readable and not unread else PARTLY if readable or names else NO,
        "; ".join([names, *counters] if names else counters),
        "; ".join(sorted({remedy for _, remedy in unread if remedy})),
    )


def _why_unread(path: Path) -> tuple[str, str] | None:
    """Return why a counter cannot be read, and the remedy; None if it can."""
    try:
        text = read_text_once(path, _COUNTER_BYTES).strip()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        return _REASONS.get(error.errno or 0, (reason, ""))
    if text.removeprefix("-").isdecimal():
        return None
    return _NO_PMA if text.startswith("N/A") else ("no number", "")


def _first_line(path: Path) -> str:
    try:
        return printable(read_text_once(path, _COUNTER_BYTES).strip().partition("\n")[0])
    except OSError:
        return ""


def kernel_log(outcome: CollectorResult, path: Path) -> CheckRow:
    if outcome.collected is None:
        return CheckRow(f"kernel log ({path})", NO, *_evidence_and_remedy(outcome.trouble or ""))
    return CheckRow(f"kernel log ({path})", YES, "XIDs, link, memory and disk errors are reported")


def _evidence_and_remedy(trouble: str) -> tuple[str, str]:
    """Split a sentence such as `/dev/kmsg may not be read: run as root`."""
    evidence, _, remedy = trouble.partition(": ")
    return evidence, remedy


def others(outcomes: Sequence[CollectorResult], *, besides: set[str]) -> Iterator[CheckRow]:
    """Yield a row for each remaining collector."""
    for outcome in outcomes:
        if outcome.collector in besides:
            continue
        what = f"collector {outcome.collector}"
        if outcome.trouble is not None:
            yield CheckRow(what, NO, outcome.trouble)
        else:
            yield CheckRow(what, YES, f"{outcome.series} series")
