"""GPU memory: ECC errors, and rows that were or will be remapped."""

from __future__ import annotations

from paceline_server.detect.causes.catalog import (
    CORRECTABLE_ECC_ERRORS,
    ROW_REMAPPING,
    UNCORRECTABLE_ECC_ERRORS,
)
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, weigh_symptoms
from paceline_wire import metric_names


def _counter(cause: str, metric: str, name: str, tolerance: float) -> Symptom:
    return Symptom(cause, metric, Scope.GPU, name, "", "events", tolerance)


SYMPTOMS = (
    _counter(
        UNCORRECTABLE_ECC_ERRORS,
        metric_names.GPU_ECC_DBE_VOL_TOTAL,
        UNCORRECTABLE_ECC_ERRORS,
        0.25,
    ),
    # A few corrected errors cost nothing. A burst of them costs time.
    _counter(
        CORRECTABLE_ECC_ERRORS, metric_names.GPU_ECC_SBE_VOL_TOTAL, CORRECTABLE_ECC_ERRORS, 8.0
    ),
    _counter(
        ROW_REMAPPING,
        metric_names.GPU_UNCORRECTABLE_REMAPPED_ROWS,
        "rows remapped for uncorrectable errors",
        0.25,
    ),
    _counter(
        ROW_REMAPPING,
        metric_names.GPU_CORRECTABLE_REMAPPED_ROWS,
        "rows remapped for correctable errors",
        0.25,
    ),
    _counter(ROW_REMAPPING, metric_names.GPU_ROW_REMAP_PENDING, "pending row remappings", 0.25),
    _counter(ROW_REMAPPING, metric_names.GPU_ROW_REMAP_FAILURE, "failed row remappings", 0.25),
)


def check(suspect: Suspect) -> list[WeighedEvidence]:
    return weigh_symptoms(suspect, SYMPTOMS)
