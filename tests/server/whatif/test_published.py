"""The analysis of the published example trace yields the published results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline_server.whatif.analysis import Analysis, analyze
from paceline_server.whatif.reader import read_metadata, read_trace
from paceline_server.whatif.verdict import judge

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyze(read_trace(DATA / "trace-ST.parquet", read_metadata(DATA / "meta-ST.yaml")))


def published(name: str) -> Any:
    return json.loads((DATA / f"{name}-ST.json").read_text())


@pytest.mark.parametrize(
    ("name", "published_name"),
    [("slowdown", "blocking_slowdown"), ("launch_slowdown", "launch_slowdown")],
)
def test_slowdown_equals_the_published_one(
    analysis: Analysis, name: str, published_name: str
) -> None:
    expected = published("result")[published_name]
    assert getattr(analysis, name) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "published_name"),
    [
        ("slowdown_by_step", "blocking_step_slowdown"),
        ("slowdown_by_optype", "blocking_decompose_by_optype"),
        ("slowdown_by_dp_rank", "blocking_decompose_by_dp_rank"),
        ("slowdown_by_stage", "blocking_decompose_by_stage"),
    ],
)
def test_slowdowns_of_parts_equal_the_published_ones(
    analysis: Analysis, name: str, published_name: str
) -> None:
    found = {str(key): value for key, value in getattr(analysis, name).items()}
    assert found == pytest.approx(published("result")[published_name], abs=TOLERANCE)


def test_slowdown_of_a_worker_is_the_smaller_of_its_dp_rank_and_stage(analysis: Analysis) -> None:
    result = published("result")
    by_dp_rank = result["blocking_decompose_by_dp_rank"]
    by_stage = result["blocking_decompose_by_stage"]
    assert len(analysis.slowdown_by_worker) == 8
    for rank, (dp_rank, stage) in analysis.places.items():
        expected = min(by_dp_rank[str(dp_rank)], by_stage[str(stage)])
        assert analysis.slowdown_by_worker[rank] == pytest.approx(expected, abs=TOLERANCE)


def test_shares_of_last_stage_and_slowest_workers_equal_the_published_ones(
    analysis: Analysis,
) -> None:
    assert analysis.m_s == pytest.approx(published("ms")["Ms"], abs=TOLERANCE)
    assert analysis.m_w == pytest.approx(published("mw")["Mw"], abs=TOLERANCE)
    assert analysis.original_seconds == pytest.approx(published("ms")["tori"], abs=TOLERANCE)
    assert analysis.ideal_seconds == pytest.approx(published("ms")["tideal"], abs=TOLERANCE)


def test_verdict_names_the_last_stage(analysis: Analysis) -> None:
    verdict = judge(analysis)
    assert (verdict.kind, verdict.target) == ("stage_imbalance", "stage 3")
    assert verdict.text.count(". ") == 0
