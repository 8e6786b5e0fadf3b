"""The analysis finds the slowdowns that were injected into synthetic traces."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from synthetic_trace import SyntheticRun, Times, coded

from paceline_server.whatif import analysis as whatif
from paceline_server.whatif.analysis import Analysis, analyze, prepare
from paceline_server.whatif.replay import replay, step_seconds
from paceline_server.whatif.trace import Trace, align
from paceline_server.whatif.verdict import judge

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 4, "microbatches": 8, "dp": 3},
    "gpipe": {"pp": 4, "gpipe": True},
    "fewer microbatches than stages": {"pp": 4, "microbatches": 2},
    "interleaved": {"pp": 4, "microbatches": 8, "chunks": 2},
    "interleaved, overlapped": {"pp": 4, "microbatches": 8, "chunks": 3, "overlap": True},
    "two stages, interleaved": {"chunks": 2, "microbatches": 2},
    "overlapped": {"pp": 3, "overlap": True},
    "zero-bubble": {"pp": 4, "microbatches": 8, "split": True},
    "zero-bubble, overlapped": {"pp": 4, "microbatches": 8, "split": True, "overlap": True},
    "no data parallelism": {"dp": 1, "pp": 3, "data_parallel": False},
    "one stage": {"pp": 1},
    "one stage, one microbatch": {"pp": 1, "microbatches": 1},
    "many dp ranks": {"dp": 32, "steps": 2},
}


def recorded(**options: Any) -> Trace:
    return align(*coded(SyntheticRun(**options).columns()))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_takes_as_long_as_the_recording(shape: str) -> None:
    found = analyze(recorded(jitter=0.1, transfer_jitter=0.2, **SHAPES[shape]))
    assert found.launch_slowdown == pytest.approx(1, abs=1e-9)
    assert found.slowdown > 1


@pytest.mark.parametrize("shape", SHAPES)
def test_run_without_slowdowns_has_no_straggler(shape: str) -> None:
    found = analyze(recorded(**SHAPES[shape]))
    assert found.slowdown == pytest.approx(1, abs=1e-3)
    assert judge(found).kind == "none"


def test_shares_are_unknown_without_a_slowdown() -> None:
    found = analyze(recorded(pp=1, microbatches=1))
    assert (found.m_s, found.m_w) == (None, None)
    assert judge(found).kind == "none"


def slow_worker(slow_stage: int, slow_dp: int, factor: float) -> Any:
    def pace(stage: int, microbatch: int) -> Times:
        factors = np.ones((3, 4))
        factors[:, slow_dp] = factor if stage == slow_stage else 1.0
        return factors

    return pace


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_slow_worker_explains_the_slowdown(stage: int, chunks: int) -> None:
    trace = recorded(
        dp=4,
        pp=4,
        tp=2,
        microbatches=8,
        chunks=chunks,
        pace=slow_worker(stage, 2, 1.5),
        jitter=0.01,
    )
    found = analyze(trace)
    rank = (stage * 4 + 2) * 2
    assert found.m_w == pytest.approx(1, abs=0.15)
    assert max(found.slowdown_by_worker, key=found.slowdown_by_worker.__getitem__) == rank
    verdict = judge(found)
    assert (verdict.kind, verdict.target) == ("slow_worker", f"rank {rank}")
    assert f"rank {rank} (dp rank 2, stage {stage})" in verdict.text


@pytest.mark.parametrize(("m_w", "target"), [(0.4, "rank 14"), (0.2, "stage 1")])
def test_a_worker_that_explains_most_of_its_stage_is_named_instead_of_the_stage(
    m_w: float, target: str
) -> None:
    """Noise of other workers leaves less than half of the slowdown to the slow one."""
    slow = recorded(dp=4, pp=2, tp=2, microbatches=8, pace=slow_worker(1, 3, 1.5))
    found = dataclasses.replace(analyze(slow), m_w=m_w, m_s=0.55)
    assert judge(found).target == target


def test_last_stage_with_more_work_explains_the_slowdown() -> None:
    found = analyze(
        recorded(
            dp=4,
            pp=4,
            microbatches=8,
            pace=lambda stage, microbatch: 1.5 if stage == 3 else 1.0,
            jitter=0.01,
        )
    )
    assert found.m_s is not None
    assert found.m_w is not None
    assert found.m_s > 0.9
    assert found.m_w < 0.1
    assert judge(found).target == "stage 3"


def test_verdict_names_a_middle_stage_with_more_work() -> None:
    found = analyze(
        recorded(
            dp=4, pp=4, microbatches=8, pace=lambda stage, microbatch: 1.5 if stage == 1 else 1.0
        )
    )
    verdict = judge(found)
    assert (verdict.kind, verdict.target) == ("stage_imbalance", "stage 1")


def test_verdict_names_a_slow_dp_rank() -> None:
    def pace(stage: int, microbatch: int) -> Times:
        factor = np.ones((3, 8))
        factor[:, 5] = 1.4
        return factor

    verdict = judge(analyze(recorded(dp=8, pp=4, microbatches=8, pace=pace)))
    assert (verdict.kind, verdict.target) == ("slow_dp_rank", "dp rank 5")


def test_uneven_sequences_are_not_attributed_to_a_worker_or_stage() -> None:
    random = np.random.default_rng(7)
    lengths = random.lognormal(0, 0.5, (16, 3, 8))
    found = analyze(
        recorded(dp=8, pp=4, microbatches=16, pace=lambda stage, microbatch: lengths[microbatch])
    )
    assert found.m_s is not None
    assert found.m_w is not None
    assert found.m_s < 0.5
    assert found.m_w < 0.5
    verdict = judge(found)
    assert (verdict.kind, verdict.target) == ("sequence_variance", "backward-compute")


def test_random_compute_times_are_not_attributed_to_sequence_lengths() -> None:
    found = analyze(recorded(dp=8, pp=4, microbatches=16, jitter=0.4))
    assert found.by_microbatch == pytest.approx(0.0, abs=0.02)
    verdict = judge(found)
    assert (verdict.kind, verdict.target) == ("unexplained", "backward-compute")
    assert "sequence lengths are not the cause" in verdict.text


@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_uneven_sequences_are_found_with_noise_and_virtual_stages(jitter: float) -> None:
    lengths = np.random.default_rng(7).lognormal(0, 0.4, (8, 3, 4))
    found = analyze(
        recorded(
            dp=4,
            pp=2,
            chunks=2,
            microbatches=8,
            jitter=jitter,
            pace=lambda stage, microbatch: lengths[microbatch],
        )
    )
    assert judge(found).kind == "sequence_variance"


def test_congested_transfers_are_attributed_to_the_network() -> None:
    run = SyntheticRun(dp=4, pp=2, microbatches=8, steps=6)
    run._noise = lambda sigma: np.where(  # type: ignore[method-assign]
        run.random.random((6, 4)) < 0.2, 1 + 400 * (sigma > 0), 1.0
    )
    run.transfer_jitter = 1.0
    verdict = judge(analyze(align(*coded(run.columns()))))
    assert verdict.kind == "slow_communication"
    assert verdict.target in ("forward-pp-comm", "backward-pp-comm")


def step_seconds_by_dp_rank(trace: Trace) -> list[float]:
    """Return mean step times with one dp rank as recorded, with all dp ranks replayed."""
    step = prepare(trace)
    found = []
    for dp_rank in range(len(trace.dp_ranks)):
        times = np.repeat(step.ideal, step.recorded[0].size).reshape(step.recorded.shape)
        times[:, :, dp_rank] = step.recorded[:, :, dp_rank]
        found.append(float(step_seconds(step.model, replay(step.model, times)).mean()))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_replaying_one_idealized_dp_rank_equals_replaying_all(shape: str) -> None:
    trace = recorded(jitter=0.3, **SHAPES[shape])
    found: Analysis = analyze(trace)
    expected = [seconds / found.ideal_seconds for seconds in step_seconds_by_dp_rank(trace)]
    assert list(found.slowdown_by_dp_rank.values()) == pytest.approx(expected, abs=1e-12)


def test_batch_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded(dp=5, pp=3, microbatches=6, jitter=0.2)
    at_once = analyze(trace)
    monkeypatch.setattr(whatif, "BATCH_BYTES", 1)
    assert analyze(trace) == at_once


def test_lowest_of_equally_slow_workers_comes_first() -> None:
    found = analyze(recorded(dp=2, pp=2, pace=lambda stage, microbatch: 2.0 if stage == 1 else 1.0))
    assert found.slowest_workers == (2,)
