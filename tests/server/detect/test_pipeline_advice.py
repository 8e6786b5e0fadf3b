"""The gain of another pipeline schedule."""

import dataclasses

import pytest
from simulated_step import SimulatedStep, gpipe, interleaved, one_forward_one_backward

from paceline_server.detect.bubble.pipeline_advice import advice_text, advise_step
from paceline_wire.topology import Topology


def advised(job, **metadata):
    return {
        one.schedule if one.microbatches == 8 else "more": one
        for one in advise_step(job.play(), job.topology, metadata)
    }


def seconds(job):
    return float(job.play().ranks.step_seconds[0])


JOB = SimulatedStep(Topology(1, 4, 1), one_forward_one_backward(4, 8), jitter=0.0)


def test_twice_the_microbatches_halve_the_bubble():
    advice = advised(JOB, schedule="1f1b")["more"]
    half = dataclasses.replace(
        JOB,
        order=one_forward_one_backward(4, 16),
        forward_seconds=JOB.forward_seconds / 2,
        backward_seconds=JOB.backward_seconds / 2,
    )
    assert advice.microbatches == 16
    assert advice.bubble_ratio == pytest.approx(3 / 19)
    assert advice.bubble_ratio_now == pytest.approx(3 / 11)
    assert advice.speedup == pytest.approx(seconds(JOB) / seconds(half), rel=1e-3)
    assert advice.memory_ratio == pytest.approx(0.5)


def test_interleaving_costs_memory():
    advice = advised(JOB, schedule="1f1b", stage_layers="4,4,4,4")["interleaved"]
    halves = dataclasses.replace(
        JOB,
        order=interleaved(4, 8, 2),
        forward_seconds=JOB.forward_seconds / 2,
        backward_seconds=JOB.backward_seconds / 2,
    )
    assert advice.virtual_stages == 2
    assert advice.speedup == pytest.approx(seconds(JOB) / seconds(halves), rel=1e-3)
    # The first stage holds 2 (p - 1) + p + 1 half microbatches instead of p whole ones.
    assert advice.memory_ratio == pytest.approx((2 * 3 + 4 + 1) / 2 / 4)
    assert "virtual stages per rank gives" in advice_text(advice)


def test_stages_of_one_layer_cannot_be_interleaved():
    assert "interleaved" not in advised(JOB, schedule="1f1b", stage_layers="1,1,1,1")


def test_zero_bubble_fills_what_is_idle():
    advice = advised(JOB, schedule="1f1b")["zero_bubble"]
    assert advice.bubble_ratio < advice.bubble_ratio_now / 1.5
    assert advice.speedup > 1.1


def test_gpipe_wastes_memory():
    advice = advised(dataclasses.replace(JOB, order=gpipe(4, 8)), schedule="gpipe")["1f1b"]
    assert advice.speedup == pytest.approx(1.0)
    assert advice.memory_ratio == pytest.approx(4 / 8)


def test_slow_transfers_reduce_the_gain_of_small_microbatches():
    slow = dataclasses.replace(JOB, transfer_seconds=0.01)
    fast, slower = (advised(job, schedule="1f1b") for job in (JOB, slow))
    assert "interleaved" not in slower or (
        slower["interleaved"].speedup < fast["interleaved"].speedup
    )


def test_an_unknown_schedule_is_not_extrapolated():
    assert "more" not in advised(JOB)


def test_without_a_pipeline_there_is_no_advice():
    job = SimulatedStep(Topology(2, 1, 1), gpipe(1, 8))
    assert advise_step(job.play(), job.topology, {"schedule": "gpipe"}) == []
