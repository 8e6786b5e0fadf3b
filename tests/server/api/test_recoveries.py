"""Distributions of recovery times."""

from __future__ import annotations

from typing import Any

import pytest

from paceline_server.api.recoveries import DAY_NS, groups, nearest_rank
from paceline_server.store.models import RecoveryRow

MONDAY_NS = 20_423 * DAY_NS  # 2025-12-01


def row(number: int, total: float | None, **changes: Any) -> RecoveryRow:
    values = {"kind": "failure", "launcher": "paceline", "resumed_ns": MONDAY_NS, **changes}
    return RecoveryRow(incident_id=f"inc-{number}", job_id="job-1", total_seconds=total, **values)


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(1, 0.5, 1), (1, 0.99, 1), (10, 0.5, 5), (100, 0.99, 99)]
)
def test_quantiles_are_values_that_occurred(count: int, share: float, expected: int) -> None:
    assert nearest_rank([float(value) for value in range(1, count + 1)], share) == expected


def test_groups_are_by_kind_launcher_and_week() -> None:
    rows = [row(number, float(number)) for number in range(1, 11)]
    rows.append(row(11, 100.0, resumed_ns=MONDAY_NS - 1))
    rows.append(row(12, 7.0, launcher="slurm", detect_seconds=2.0))
    found = {(one.launcher, str(one.week)): one for one in groups(rows)}
    assert {key: one.count for key, one in found.items()} == {
        ("paceline", "None"): 11,
        ("paceline", "2025-11-24"): 1,
        ("paceline", "2025-12-01"): 10,
        ("slurm", "None"): 1,
        ("slurm", "2025-12-01"): 1,
    }
    total = found["paceline", "2025-12-01"].parts["total"]
    assert (total.count, total.p50_seconds, total.p90_seconds) == (10, 5.0, 9.0)
    assert "detect" not in found["paceline", "None"].parts, "unknown is not zero"
    assert found["slurm", "None"].parts["detect"].p50_seconds == 2.0
