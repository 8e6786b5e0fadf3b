"""Advice on how often a job should save, from its cost of a checkpoint and the fleet's failures.

*Failures.* The rate per node has a Gamma distribution: 6.5 failures in 1,000 node-days (Kokolis et
al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024) with the
weight of one failure, and then what this fleet has shown: Gamma(1 + failures, 3692 h + node hours).
A job on n nodes fails n times as often.

*Interval.* The one that costs least (`paceline_wire.intervals`). If the policy allows it, ranks
that leave the interval to Paceline get the mean time between failures, and apply it themselves.
"""

from __future__ import annotations

import math

import msgspec

from paceline_server.decide.types import Experience, FailureHistory
from paceline_server.decide.wording import steps_text, time_text
from paceline_wire.intervals import best_interval_seconds

PRIOR_FAILURES = 1.0
PRIOR_NODE_SECONDS = PRIOR_FAILURES * 1000 * 86_400 / 6.5
_Z_90 = 1.6449  # quantile of the normal distribution for an interval of 90%
_NOTABLE_RATIO = 1.5  # between the interval and the best one; closer ones cost nearly the same


class IntervalAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The best interval between two checkpoints of a job, and the figures that it follows from."""

    interval_steps: int
    interval_seconds: float
    overhead_ratio: float  # share of the time that checkpoints and repeated steps cost with it
    overhead_now_ratio: float  # with the interval of now
    checkpoint_seconds: float  # time that a checkpoint blocks the training
    mttf_seconds: float  # mean time between failures of this job
    mttf_low_seconds: float  # the interval that holds it with a probability of 90%
    mttf_high_seconds: float
    failures: int  # failures and hangs of all jobs
    node_hours: float  # in which they were seen
    text: str


def interval_advice(shown: Experience, step_seconds: float | None) -> IntervalAdvice | None:
    """Return the advice for a job; None if a figure is not known."""
    cost, now = shown.checkpoint_seconds, shown.checkpoint_interval_steps
    if not cost or not now or not step_seconds or not shown.nodes or shown.fleet is None:
        return None
    fleet = shown.fleet
    shape, node_seconds = _posterior(fleet)
    mttf = node_seconds / shape / shown.nodes
    low, high = (node_seconds / gamma_quantile(shape, z) / shown.nodes for z in (_Z_90, -_Z_90))
    best = best_interval_seconds(cost, mttf)
    steps = max(1, round(best / step_seconds))
    found = IntervalAdvice(
        interval_steps=steps,
        interval_seconds=steps * step_seconds,
        overhead_ratio=overhead_ratio(cost, steps * step_seconds, mttf),
        overhead_now_ratio=overhead_ratio(cost, now * step_seconds, mttf),
        checkpoint_seconds=cost,
        mttf_seconds=mttf,
        mttf_low_seconds=low,
        mttf_high_seconds=high,
        failures=fleet.failures,
        node_hours=fleet.node_seconds / 3600,
        text="",
    )
    return msgspec.structs.replace(found, text=_text(found, now))


def mttf_environment(shown: Experience, nodes: int) -> dict[str, str]:
    """Return the variable with the mean time between failures of a job on so many nodes."""
    shape, node_seconds = _posterior(shown.fleet or FailureHistory(0, 0.0))
    return {"PACELINE_MTTF_SECONDS": f"{node_seconds / shape / nodes:.0f}"}


def _posterior(fleet: FailureHistory) -> tuple[float, float]:
    """Return the parameters of the distribution of the failures per node and second."""
    return PRIOR_FAILURES + fleet.failures, PRIOR_NODE_SECONDS + fleet.node_seconds


def overhead_ratio(cost: float, interval: float, mttf: float) -> float:
    """Return the share of the time that checkpoints and repeated steps cost, at most 1.

    Args are seconds; `interval` is the training between two checkpoints, without their cost.
    """
    period = interval + cost
    return min(cost / period + period / (2.0 * mttf), 1.0)


def gamma_quantile(shape: float, z: float) -> float:
    """Return the quantile of Gamma(shape, 1) at the normal quantile z (Wilson and Hilferty, 1931).

    Between 5% and 95% it is right within 1% for shapes from 3 on, and within a quarter for shape 1.
    """
    root = 1.0 - 1.0 / (9.0 * shape) + z / (3.0 * math.sqrt(shape))
    return shape * max(root, 0.05) ** 3


def _text(found: IntervalAdvice, now: int) -> str:
    best = f"every {steps_text(found.interval_steps)} ({time_text(found.interval_seconds)})"
    why = (
        f"a checkpoint takes {_short(found.checkpoint_seconds)}, and a failure is expected every "
        f"{time_text(found.mttf_seconds)} (90%: {time_text(found.mttf_low_seconds)} to "
        f"{time_text(found.mttf_high_seconds)}; {found.failures} failures in "
        f"{found.node_hours:,.0f} node hours of this fleet)"
    )
    ratio = found.interval_steps / now
    if 1.0 / _NOTABLE_RATIO < ratio < _NOTABLE_RATIO:
        return f"The interval of {steps_text(now)} is about right: {why}."
    return (
        f"Saving {best} instead of every {steps_text(now)} would cost "
        f"{found.overhead_ratio:.1%} of the time instead of {found.overhead_now_ratio:.1%}: {why}."
    )


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else time_text(seconds)
