"""Checks of GPUs: equal in number, model and limits; healthy and free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline_cli.preflight.facts import NodeFacts, PreflightGpu
from paceline_cli.preflight.verdict import Check, equal, faults, listing, skipped

_BAD_THROTTLING = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown"}
_BUSY_PERCENT = 5.0
_BUSY_RATIO = 0.02  # share of memory in use, above what a driver reserves

# check: (fields of a GPU, unit, fix)
_LIMITS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "GPU model": (("name",), "", "take nodes of one kind, or leave the odd one out"),
    "GPU memory": (("memory_total_mebibytes",), " MiB", "compare ECC and MIG modes of the nodes"),
    "GPU clock limits": (
        ("sm_clock_max_mhz", "memory_clock_max_mhz"),
        " MHz",
        "nvidia-smi -rgc; nvidia-smi -rac; compare VBIOS versions",
    ),
    "GPU power limit": (("power_limit_watts",), " W", "nvidia-smi -pl WATTS, the same on all"),
    "GPU VBIOS": (("vbios",), "", "flash the same VBIOS"),
    "GPU modes (ECC, MIG, persistence)": (
        ("ecc_mode", "mig_mode", "persistence_mode"),
        "",
        "nvidia-smi -e, -mig, -pm: the same on all",
    ),
}


def checks(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    yield _answers(nodes)
    if not any(node.gpus for node in nodes):
        return
    fix = "look for XID 79 (fallen off the bus) in the kernel log, then reboot; leave the node out"
    counts = {node.node: len(_answering(node)) for node in nodes}
    yield equal("GPU count", counts, fix)
    for name, (fields, unit, fix) in _LIMITS.items():
        yield _same(name, nodes, fields, unit, fix)
    yield _each(nodes, "GPU memory health", _memory_wrong, "reset the GPU; if it stays, replace it")
    yield _each(nodes, "GPU PCIe width", _width_wrong, "reseat the card or the riser; power-cycle")
    yield _nvlinks(nodes)
    yield _each(
        nodes, "GPU throttling", _throttled, "look after cooling and power supplies of the node"
    )
    yield _each(
        nodes, "GPU idle", _busy, "end what is left there: nvidia-smi shows it", status="warn"
    )


def _answers(nodes: Sequence[NodeFacts]) -> Check:
    found = {
        node.node: [
            *([node.gpu_problem] if node.gpu_problem else []),
            *[f"GPU {gpu.index} {gpu.trouble}" for gpu in node.gpus if gpu.trouble],
        ]
        for node in nodes
    }
    if not any(node.gpus for node in nodes) and not any(found.values()):
        reasons = sorted({node.gpu_absence for node in nodes if node.gpu_absence})
        return skipped("GPUs answer", listing(reasons) or "no node has one")
    return faults("GPUs answer", found, "reboot the node, or leave it out", "every GPU answers")


def _answering(node: NodeFacts) -> list[PreflightGpu]:
    return [gpu for gpu in node.gpus if gpu.trouble is None]


def _same(
    name: str, nodes: Sequence[NodeFacts], fields: tuple[str, ...], unit: str, fix: str
) -> Check:
    """Compare nodes; GPUs of one node are listed only if they differ."""
    values: dict[str, tuple[object, ...] | None] = {}
    for node in nodes:
        rows = [
            tuple(getattr(gpu, each) for each in fields) for gpu in node.gpus if gpu.trouble is None
        ]
        rows = [row for row in rows if None not in row]
        same = len(set(rows)) == 1
        values[node.node] = None if not rows else rows[0] if same else _spelled(rows)
    return equal(name, values, fix, unit=unit)


def _spelled(groups: Sequence[tuple[object, ...]]) -> tuple[object, ...]:
    """Return text such as `1980, 3201 (7 GPUs), 1410, 3201 (1 GPU)`."""
    words = []
    for each in dict.fromkeys(groups):
        count = groups.count(each)
        shown = "/".join(f"{value:g}" if isinstance(value, float) else str(value) for value in each)
        words.append(f"{shown} ({count} GPU{'s' if count > 1 else ''})")
    return tuple(words)


def _each(
    nodes: Sequence[NodeFacts],
    name: str,
    wrong: Callable[[PreflightGpu], Sequence[str]],
    fix: str,
    *,
    status: str = "fail",
) -> Check:
    found = {
        node.node: [
            f"GPU {gpu.index}: {words}"
            for gpu in node.gpus
            if gpu.trouble is None
            for words in wrong(gpu)
        ]
        for node in nodes
    }
    count = sum(len(node.gpus) for node in nodes)
    passed = f"no problem found on {count} GPUs"
    return faults(name, found, fix, passed, status="warn" if status == "warn" else "fail")


def _memory_wrong(gpu: PreflightGpu) -> list[str]:
    reasons = (
        (gpu.remap_failure, "row remapping has failed"),
        (gpu.remap_pending, "row remapping is pending"),
        (gpu.ecc_uncorrected_volatile, "uncorrected ECC errors since the driver was loaded"),
    )
    return [words for value, words in reasons if value]


def _width_wrong(gpu: PreflightGpu) -> list[str]:
    if gpu.pcie_width is None or gpu.pcie_width_max is None:
        return []
    if gpu.pcie_width >= gpu.pcie_width_max:
        return []
    return [f"x{gpu.pcie_width:g} of x{gpu.pcie_width_max:g}"]


def _throttled(gpu: PreflightGpu) -> list[str]:
    return [reason for reason in gpu.throttle_reasons if reason in _BAD_THROTTLING]


def _busy(gpu: PreflightGpu) -> list[str]:
    words = []
    if gpu.utilization_percent is not None and gpu.utilization_percent > _BUSY_PERCENT:
        words.append(f"{gpu.utilization_percent:g}% busy")
    used, total = gpu.memory_used_mebibytes, gpu.memory_total_mebibytes
    if used is not None and total and used / total > _BUSY_RATIO:
        words.append(f"{used:.0f} MiB in use")
    return words


def _nvlinks(nodes: Sequence[NodeFacts]) -> Check:
    """Compare the number of links with the largest of any GPU here: NVML does not report the
    expected number."""
    links = [gpu.nvlinks_active for node in nodes for gpu in node.gpus]
    most = max((links for links in links if links is not None), default=None)
    if not most:
        return skipped("NVLink", "no GPU has an active link")
    found = {
        node.node: [
            f"GPU {gpu.index}: {gpu.nvlinks_active:g} of {most:g} links"
            for gpu in node.gpus
            if gpu.nvlinks_active is not None and gpu.nvlinks_active < most
        ]
        for node in nodes
    }
    fix = "restart the fabric manager; look for XIDs 74 and 155; reset all GPUs of the node"
    return faults("NVLink", found, fix, f"{most:g} links up on every GPU that has them")
