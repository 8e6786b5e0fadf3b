"""NVLink: state and destination of each link, its traffic and its errors.

Drivers and generations count in different fields. Every field is read once, those that respond are
kept, and of two fields with the same meaning the first is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from paceline_agent.collect.nvml.driver import function, pynvml
from paceline_agent.collect.nvml.fields import ALL_LINKS, FieldReading, FieldRow, Fields
from paceline_agent.collect.nvml.gpu import NvmlGpu, Value
from paceline_wire import metric_names

_KIBIBYTE = 1024.0
_TRANSMITTED = "paceline_gpu_nvlink_transmitted_bytes_total"
_RECEIVED = "paceline_gpu_nvlink_received_bytes_total"
_REPLAYS = "paceline_gpu_nvlink_replay_errors_total"
_RECOVERIES = "paceline_gpu_nvlink_recovery_errors_total"
_CRC = "paceline_gpu_nvlink_crc_errors_total"
_MEGABYTE = 1e6

# nvml.h: (name, first field, scale) of fields whose scope is the link; later ones are NVLink 5's.
_BY_SCOPE = (
    ("paceline_gpu_nvlink_link_bytes_per_second", 164, _MEGABYTE),
    (_TRANSMITTED, 138, _KIBIBYTE),
    (_RECEIVED, 139, _KIBIBYTE),
    (_TRANSMITTED, 202, 1.0),
    (_RECEIVED, 204, 1.0),
    (_REPLAYS, 161, 1.0),
    (_RECOVERIES, 162, 1.0),
    (_CRC, 163, 1.0),
    (_RECOVERIES, 215, 1.0),
    ("paceline_gpu_nvlink_receive_errors_total", 208, 1.0),
    ("paceline_gpu_nvlink_symbol_errors_total", 221, 1.0),
)
# (name, field of link 0, field of link 6) if each of at most 12 links has its own field.
_BY_FIELD = ((_REPLAYS, 46, 108), (_RECOVERIES, 53, 114), (_CRC, 32, 96))

_TOTALS = (
    FieldRow(metric_names.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 38),
    FieldRow("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", 45),
    FieldRow(metric_names.NVLINK_REPLAY_ERROR_COUNT_TOTAL, 52),
    FieldRow(metric_names.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 59),
    FieldRow(_TRANSMITTED, 138, _KIBIBYTE, ALL_LINKS),
    FieldRow(_RECEIVED, 139, _KIBIBYTE, ALL_LINKS),
)
# Fields that are summed if the driver has no total.
_SUMMED = {
    metric_names.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: _CRC,
    metric_names.NVLINK_REPLAY_ERROR_COUNT_TOTAL: _REPLAYS,
    metric_names.NVLINK_RECOVERY_ERROR_COUNT_TOTAL: _RECOVERIES,
    _TRANSMITTED: _TRANSMITTED,
    _RECEIVED: _RECEIVED,
}
_ALL = (("link", "all"),)
SWITCH = "switch"
_ENDS = {1: "cpu", 2: SWITCH}  # nvml.h, nvmlIntNvLinkDeviceType_t; 0 is a GPU, 255 unknown


class Links:
    """The NVLinks of one GPU."""

    def __init__(self) -> None:
        self._states = {link: _state_of(link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)}
        self._counters: Fields | None = None
        self._totals = Fields(_TOTALS)
        # total bytes, and seconds of the driver's clock
        self._moved: tuple[float, float] | None = None
        self._ends = {link: _end_of(link) for link in self._states}
        self._active: list[int] = []
        self.ends: dict[str, int] = {}  # active links by PCI bus id, SWITCH or "cpu"

    def read(self, gpu: NvmlGpu) -> Iterator[Value]:
        up = self._up(gpu)
        self._read_ends(gpu, [link for link, active in up.items() if active])
        if self._counters is None:
            return
        if up:
            yield Value(metric_names.GPU_NVLINK_ACTIVE_LINKS, sum(up.values()))
        for link, active in up.items():
            yield Value("paceline_gpu_nvlink_up", active, _of(link))
        totals: list[FieldReading] = gpu.ask(self._totals) or []
        sums = {answer.name: answer.number for answer in totals}
        by_link = _by_link(gpu.ask(self._counters) or [], sums)
        for name, links in by_link.items():
            for link, number in links.items():
                yield Value(name, number, _of(link))
        for name, summed in _SUMMED.items():
            if name not in sums and summed in by_link:
                sums[name] = sum(by_link[summed].values())
        for name, number in sums.items():
            yield Value(name, number, None if name.startswith("DCGM") else _ALL)
        time_us = totals[0].time_us if totals else 0
        if time_us and _TRANSMITTED in sums and _RECEIVED in sums:
            yield from self._rate(sums[_TRANSMITTED] + sums[_RECEIVED], time_us / 1e6)

    def _up(self, gpu: NvmlGpu) -> dict[int, int]:
        """Return 1 for each link that is up, else 0.

        Links that the GPU lacks are not read again.
        """
        answers = {link: gpu.ask(state) for link, state in self._states.items()}
        self._states = {
            link: state for link, state in self._states.items() if state not in gpu.refused
        }
        if self._counters is None and self._states:
            self._counters = Fields(_rows(list(self._states)))
        return {link: answer for link, answer in answers.items() if answer is not None}

    def _read_ends(self, gpu: NvmlGpu, active: list[int]) -> None:
        """Read the destinations of links; they change only with the state of a link."""
        if active != self._active:
            self._active = active
            ends = (gpu.ask(self._ends[link]) for link in active)
            self.ends = dict(Counter(end for end in ends if end is not None))

    def _rate(self, moved_bytes: float, seconds: float) -> Iterator[Value]:
        """Yield the rate as DCGM computes it: thousands of KiB per second, both directions."""
        before, self._moved = self._moved, (moved_bytes, seconds)
        if before is not None and moved_bytes >= before[0] and seconds > before[1]:
            rate = (moved_bytes - before[0]) / (seconds - before[1])
            yield Value("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", rate / _KIBIBYTE / 1000)


def _rows(links: list[int]) -> list[FieldRow]:
    rows = [
        FieldRow(name, field, scale, link, _of(link))
        for name, field, scale in _BY_SCOPE
        for link in links
    ]
    for name, of_first, of_seventh in _BY_FIELD:
        for link in links:
            if link < 12:
                field = of_first + link if link < 6 else of_seventh + link - 6
                rows.append(FieldRow(name, field, 1.0, link, _of(link)))
    return rows


def _by_link(answers: list[FieldReading], totals: dict[str, float]) -> dict[str, dict[int, float]]:
    """Return the number of each link by name.

    Some drivers return the sum of all links for each link; such values are left out.
    """
    found: dict[str, dict[int, float]] = {}
    for answer in answers:
        found.setdefault(answer.name, {}).setdefault(answer.scope, answer.number)
    for name, total in totals.items():
        if sum(found.get(name, {}).values()) > 1.5 * total > 0:
            del found[name]
    return found


def _of(link: int) -> tuple[tuple[str, str], ...]:
    return (("link", str(link)),)


def _state_of(link: int) -> Callable[[Any], int]:
    def read(handle: Any) -> int:
        active: int = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        return active

    return read


def _end_of(link: int) -> Callable[[Any], str]:
    """Return the call for the PCI bus id at the end of a link; switches have none on NVLink 5."""

    def read(handle: Any) -> str:
        kind = function("nvmlDeviceGetNvLinkRemoteDeviceType")(handle, link)
        if kind in _ENDS:
            return _ENDS[kind]
        bus_id = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
        return bus_id.decode() if isinstance(bus_id, bytes) else bus_id

    return read
