"""PCIe links of GPUs and NICs: width, speed, replays. An idle link trains down: peers tell."""

from __future__ import annotations

from dataclasses import replace

from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import (
    MetricObservation,
    Symptom,
    inverse,
    look_at,
    looks_at,
    together,
)


def _link(cause: str, metric: str, scope: Scope, what: str, unit: str) -> Symptom:
    return Symptom(
        cause, metric, scope, what, unit, "level", 0.0, relative=0.1, rises=False,
        predicts=inverse,
    )  # fmt: skip


_GPU, _NIC = "degraded PCIe link", "degraded PCIe link of the NIC"
LINKS = (
    _link(_GPU, "paceline_gpu_pcie_width", Scope.GPU, "PCIe width", "lanes"),
    _link(_GPU, "paceline_gpu_pcie_generation", Scope.GPU, "PCIe generation", ""),
    _link(_NIC, "paceline_device_pcie_width", Scope.DEVICE, "PCIe width", "lanes"),
    _link(
        _NIC, "paceline_device_pcie_transfers_per_second", Scope.DEVICE, "PCIe speed", "T/s"
    ),
)  # fmt: skip
SYMPTOMS = (
    *LINKS,
    Symptom(
        "PCIe replays", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", Scope.GPU, "PCIe replays", "",
        "events", 20.0,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[MetricObservation]:
    looks = looks_at(suspect, SYMPTOMS[len(LINKS) :])
    for cause in (_GPU, _NIC):
        found = [
            each
            for link in LINKS
            if link.cause == cause
            for place in suspect.places(link.scope, link.metric)
            if (each := _look(suspect, link, place)) is not None
        ]
        if found:
            looks.append(together(cause, found))
    return looks


def _look(suspect: Suspect, link: Symptom, place: MeasuredDevice) -> MetricObservation | None:
    """Without a past and peers, what the device could do is what it should do."""
    limit = suspect.seen.telemetry.latest(place.node, f"{link.metric}_max", **place.labels)
    return look_at(suspect, replace(link, normal=limit), place)
