"""The GPUs of the node, including those that the driver no longer lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from paceline_agent.collect.contract import Collected
from paceline_wire.batch import CollectorEvent, DeviceEvent, GpuInfo


def gpu_labels(gpu: GpuInfo, hostname: str) -> dict[str, str]:
    """Return the labels of a GPU's metrics, named as dcgm-exporter does."""
    return {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": f"nvidia{gpu.index}",
        "modelName": gpu.name,
        "Hostname": hostname,
    }


class Gpus:
    """Tracks the GPUs that the nvml collector reports.

    A GPU that the driver no longer lists (it was dropped from the bus, the driver was unloaded) is
    lost until its UUID is listed again. While NVML as a whole hangs, all GPUs count as hung.
    """

    def __init__(self) -> None:
        self._known: dict[str, GpuInfo] = {}  # by UUID
        self._unnamed: list[GpuInfo] = []  # GPUs that have not responded yet
        self._silent: set[str] = set()  # UUIDs of GPUs that do not respond, as detected here

    @property
    def all(self) -> list[GpuInfo]:
        return sorted([*self._known.values(), *self._unnamed], key=lambda gpu: gpu.index)

    def slots(self, requested: int | None) -> int:
        """Return how many ranks the node can hold; `requested` if no GPU has a problem."""
        gpus = self.all
        lost = sum(gpu.trouble is not None for gpu in gpus)
        if requested is None:
            return len(gpus) - lost if gpus else 1
        spare = max(0, len(gpus) - requested)
        return max(0, requested - max(0, lost - spare))

    def update(self, collected: Collected, time_ns: int) -> list[DeviceEvent]:
        """Update the GPUs; return events in addition to the collector's own."""
        if collected.gpus is not None:
            return [*self._list(collected.gpus, time_ns), *self._miss(collected.gpus, time_ns)]
        return self._hang(time_ns) if _is_quarantined(collected) else []

    def _list(self, gpus: Sequence[GpuInfo], time_ns: int) -> list[DeviceEvent]:
        events = []
        for gpu in gpus:
            if gpu.uuid in self._silent and gpu.trouble is None:
                events.append(_event("gpu_back", gpu, "is listed again", time_ns))
            self._silent.discard(gpu.uuid)
            if gpu.uuid:
                self._known[gpu.uuid] = gpu
        self._unnamed = [gpu for gpu in gpus if not gpu.uuid]
        return events

    def _miss(self, gpus: Sequence[GpuInfo], time_ns: int) -> list[DeviceEvent]:
        missing = self._known.keys() - {gpu.uuid for gpu in gpus}
        return self._trouble(missing, "lost", "the driver does not list it any more", time_ns)

    def _hang(self, time_ns: int) -> list[DeviceEvent]:
        return self._trouble(set(self._known), "hung", "NVML does not answer", time_ns)

    def _trouble(
        self, uuids: set[str], trouble: Literal["lost", "hung"], why: str, time_ns: int
    ) -> list[DeviceEvent]:
        events = []
        for uuid in sorted(uuids, key=lambda uuid: self._known[uuid].index):
            gpu = self._known[uuid]
            if gpu.trouble != trouble:
                events.append(_event(f"gpu_{trouble}", gpu, why, time_ns))
                self._known[uuid] = msgspec.structs.replace(gpu, trouble=trouble)
            self._silent.add(uuid)
        return events


def _event(kind: str, gpu: GpuInfo, detail: str, time_ns: int) -> DeviceEvent:
    return DeviceEvent(time_ns=time_ns, kind=kind, device=f"gpu{gpu.index}", detail=detail)


def _is_quarantined(collected: Collected) -> bool:
    return any(
        isinstance(event, CollectorEvent) and event.collector == "nvml"
        and event.kind == "quarantined"
        for event in collected.events
    )  # fmt: skip
