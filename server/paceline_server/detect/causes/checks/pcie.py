"""PCIe links of GPUs and NICs: width, speed, replays.

An idle link trains down, so the peers are compared.
"""

from __future__ import annotations

from dataclasses import replace

from paceline_server.detect.causes.catalog import DEGRADED_GPU_PCIE, DEGRADED_NIC_PCIE, PCIE_REPLAYS
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.symptom import (
    Symptom,
    WeighedEvidence,
    combine,
    inverse,
    weigh_series,
    weigh_symptoms,
)
from paceline_wire import metric_names


def _link(cause: str, metric: str, scope: Scope, name: str, unit: str) -> Symptom:
    return Symptom(
        cause, metric, scope, name, unit, "level", 0.0, relative_tolerance=0.1, rises=False,
        predicts=inverse,
    )  # fmt: skip


LINKS = (
    _link(DEGRADED_GPU_PCIE, metric_names.GPU_PCIE_WIDTH, Scope.GPU, "PCIe width", "lanes"),
    _link(DEGRADED_GPU_PCIE, metric_names.GPU_PCIE_GENERATION, Scope.GPU, "PCIe generation", ""),
    _link(DEGRADED_NIC_PCIE, metric_names.DEVICE_PCIE_WIDTH, Scope.DEVICE, "PCIe width", "lanes"),
    _link(
        DEGRADED_NIC_PCIE, metric_names.DEVICE_PCIE_TRANSFERS_PER_SECOND, Scope.DEVICE,
        "PCIe speed", "T/s",
    ),
)  # fmt: skip
SYMPTOMS = (
    *LINKS,
    Symptom(
        PCIE_REPLAYS, metric_names.PCIE_REPLAY_COUNTER, Scope.GPU, PCIE_REPLAYS, "",
        "events", 20.0,
    ),
)  # fmt: skip


def check(suspect: Suspect) -> list[WeighedEvidence]:
    results = weigh_symptoms(suspect, SYMPTOMS[len(LINKS) :])
    for cause in (DEGRADED_GPU_PCIE, DEGRADED_NIC_PCIE):
        links = [
            weighed
            for link in LINKS
            if link.cause == cause
            for device in suspect.devices(link.scope, link.metric)
            if (weighed := _weigh_link(suspect, link, device)) is not None
        ]
        if links:
            results.append(combine(cause, links))
    return results


def _weigh_link(suspect: Suspect, link: Symptom, device: MeasuredDevice) -> WeighedEvidence | None:
    """Weigh the link; without past values and peers, the maximum of the device is expected."""
    limit = suspect.observation.telemetry.latest(device.node, f"{link.metric}_max", **device.labels)
    return weigh_series(suspect, replace(link, normal=limit), device)
