"""The share of time for which ranks were ready to run but had no CPU."""

from __future__ import annotations

import math
from statistics import median

from paceline_server.detect.observation import Generation, Observation
from paceline_wire import metric_names

WAIT = metric_names.RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL
RECENT_NS = 10_000_000_000
MOST_RANKS = 64  # enough for a median
# A smaller share does not matter: ranks of a job without any other load wait that long.
LEAST_SHARE = 0.1
# Schedulers even out over this time, so that differences between ranks shrink with its multiples.
_EVENS_OUT_SECONDS = 5.0


def cpu_wait_share(observation: Observation, generation: Generation) -> float | None:
    """Return the median over ranks of the share of recent time in which they waited for a CPU.

    None if it is not measured.
    """
    telemetry, since_ns = observation.telemetry, observation.now_ns - RECENT_NS
    rates = []
    for rank, node in list(generation.nodes.items())[:MOST_RANKS]:
        labels = {"job": generation.job, "rank": str(rank)}
        series = telemetry.find(node, WAIT, **labels) or telemetry.find(node, WAIT, rank=str(rank))
        rate = None if series is None else series.rate_since(since_ns)
        if rate is not None:
            rates.append(min(rate, 1.0))
    return median(rates) if rates else None


def largest_accident(share: float | None, seconds: float, own_share: float | None = None) -> float:
    """Return the largest slowdown that waiting for a CPU explains, for this median share.

    A rank that works for a small share of the step, and waits for its peers in the rest, may wait
    for a CPU just while it works: its few milliseconds then become many times as long.

    Args:
        share: as `cpu_wait_share` returns it.
        seconds: how long the slowdown has lasted.
        own_share: usual time of the slow work as a share of the step; None if it is unknown.
    """
    if share is None or share < LEAST_SHARE:
        return 1.0
    excess = share / max(1.0 - share, 0.05)
    if own_share is not None:
        excess = max(excess, share / max(own_share, 0.01))
    return 1.0 + excess * min(1.0, math.sqrt(_EVENS_OUT_SECONDS / max(seconds, 1e-9)))
