"""Real gloo processes, one of which does not do what the others do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline_server.flight_recorder import HangReport, report
from tests.forked_python import ForkedPython

SCRIPT = Path(__file__).parent / "gloo_rank.py"


def dumped(directory: Path, fault: str, world_size: int = 3) -> HangReport:
    (directory / "dumps").mkdir()
    environment = os.environ | {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        ForkedPython([SCRIPT, rank, world_size, fault, directory], environment)
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            assert rank.wait(timeout=120) == 0, rank.errors()
    finally:
        for rank in ranks:
            rank.kill()
    return report(directory / "dumps")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("skip", "host"),
        pytest.param("other operation", "mismatch", marks=pytest.mark.campaign),
        ("none", None),
    ],
)
def test_the_rank_that_differs_is_named(tmp_path: Path, fault: str, kind: str | None) -> None:
    found = dumped(tmp_path, fault)
    assert found.kind == kind
    assert found.culprits == (() if kind is None else (1,))
    if kind is not None:
        assert found.first_missing is not None
        assert found.first_missing.op == "all_reduce"
        assert found.first_missing.sequence_id == 4
        assert found.first_missing.process_group.ranks == (0, 1, 2)
