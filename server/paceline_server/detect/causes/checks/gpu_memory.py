"""The GPU's memory: ECC errors and rows that are, or wait to be, remapped."""

from __future__ import annotations

from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, looks_at


def _counts(cause: str, metric: str, what: str, no_deviation: float) -> Symptom:
    return Symptom(cause, metric, Scope.GPU, what, "", "events", no_deviation)


SYMPTOMS = (
    _counts(
        "uncorrectable ECC errors",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "uncorrectable ECC errors",
        0.25,
    ),
    # A handful of corrected errors costs nothing; a storm of them costs time.
    _counts(
        "correctable ECC errors", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "correctable ECC errors", 8.0
    ),
    _counts(
        "row remapping",
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "rows remapped for uncorrectable errors",
        0.25,
    ),
    _counts(
        "row remapping",
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "rows remapped for correctable errors",
        0.25,
    ),
    _counts("row remapping", "DCGM_FI_DEV_ROW_REMAP_PENDING", "pending row remappings", 0.25),
    _counts("row remapping", "DCGM_FI_DEV_ROW_REMAP_FAILURE", "failed row remappings", 0.25),
)


def check(suspect: Suspect) -> list[MetricObservation]:
    return looks_at(suspect, SYMPTOMS)
