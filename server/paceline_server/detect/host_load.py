"""The share of time for which ranks were ready to run but had no CPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median, median_low

from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.telemetry import MetricSeries
from paceline_wire import metric_names

WAIT = metric_names.RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL
NODE_WAIT = metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL
RECENT_NS = 10_000_000_000
MOST_RANKS = 64  # enough for a median
# A smaller share does not matter: ranks of a job without any other load wait that long.
LEAST_SHARE = 0.1
# Share of a node's pressure that counts as waits of threads and processes that are not measured,
# such as those of a transfer and the workers of a data loader.
OF_PRESSURE = 0.5
USUAL_SECONDS = 60.0  # before an onset
ONSET_NS = 3_000_000_000  # what is sampled may have changed as long before the onset
# Ranks are sampled every two seconds: then one interval is after the onset.
SAMPLED_NS = 2_000_000_000
# Schedulers even out over this time, so that differences between ranks shrink with its multiples.
_EVENS_OUT_SECONDS = 5.0


def cpu_wait_share(
    observation: Observation, generation: Generation, ranks: Iterable[int] | None = None
) -> float | None:
    """Return the median over ranks of the share of recent time in which they waited for a CPU.

    Of all ranks, or these. None if it is not measured.
    """
    since_ns = observation.training_since_ns(RECENT_NS / 1e9)
    # In an evaluation or a checkpoint ranks wait for one another, and hardly for a CPU.
    seconds = observation.training_seconds
    series = _waits(observation, generation, ranks)
    return _median_share(one.rate_since(since_ns, seconds) for one in series)


def wait_share_since(
    observation: Observation,
    generation: Generation,
    onset_ns: int,
    ranks: Iterable[int] | None = None,
) -> float | None:
    """Return the same share, or that of the time since `onset_ns` if it is larger.

    The host may have become busy then, of which recent time has little, or be no longer busy. Of
    two ranks, the one that waits less counts for that: the other one may have lost its CPU.
    Infinite as long as the time since then is not sampled, but not for longer than that recent
    time.
    """
    recent = cpu_wait_share(observation, generation, ranks)
    if recent is None:
        return None
    series = list(_waits(observation, generation, ranks))
    if observation.now_ns - onset_ns >= RECENT_NS:
        rates = [one.rate_since(onset_ns, observation.training_seconds) for one in series]
        since = [rate for rate in rates if rate is not None]
        return max(recent, min(median_low(since), 1.0)) if since else recent
    if median(one.latest_ns() or 0.0 for one in series) < onset_ns + SAMPLED_NS:
        return math.inf
    newest = [rate for one in series if (rate := one.newest_rate()) is not None]
    return max(recent, min(median_low(newest), 1.0)) if newest else recent


def usual_wait_share(
    observation: Observation, generation: Generation, before_ns: int
) -> float | None:
    """Return the median share of time in which ranks waited for a CPU in the minute before."""
    before_ns -= ONSET_NS
    series = _waits(observation, generation)
    return _median_share(one.rate_before(before_ns, USUAL_SECONDS) for one in series)


def pressure_share(observation: Observation, generation: Generation, ranks: Sequence[int]) -> float:
    """Return the share of recent time in which any task of a node waited for a CPU.

    Of the node of these ranks where it is largest; 0 if the kernel does not measure it.
    """
    return max(_pressure_shares(observation, generation, ranks), default=0.0)


def median_pressure_share(
    observation: Observation, generation: Generation, ranks: Sequence[int]
) -> float:
    """Return the same of the median node of these ranks."""
    return _median_share(_pressure_shares(observation, generation, ranks)) or 0.0


def _pressure_shares(
    observation: Observation, generation: Generation, ranks: Sequence[int]
) -> list[float]:
    since_ns = observation.now_ns - RECENT_NS
    pressures = _pressures(observation, generation, ranks)
    return [min(one.rate_since(since_ns) or 0.0, 1.0) for one in pressures]


def rise_of_waits(
    observation: Observation, generation: Generation, ranks: Sequence[int], onset_ns: int
) -> float:
    """Return by how much more of the recent time is spent waiting for CPUs than before `onset_ns`.

    The largest of the shares of time in which one of these ranks waits for a CPU, or any task of
    its node, which no chain of threads can exceed.
    """
    own = rise_of_own_waits(observation, generation, ranks, onset_ns)
    return max(
        own, _largest_rise(_pressures(observation, generation, ranks), observation, onset_ns)
    )


def rise_of_own_waits(
    observation: Observation, generation: Generation, ranks: Sequence[int], onset_ns: int
) -> float:
    """Return the same without the other tasks of the node."""
    return _largest_rise(_waits(observation, generation, ranks), observation, onset_ns)


def _pressures(
    observation: Observation, generation: Generation, ranks: Sequence[int]
) -> list[MetricSeries]:
    nodes = {generation.nodes[rank] for rank in ranks if rank in generation.nodes}
    found = (observation.telemetry.find(node, NODE_WAIT) for node in nodes)
    return [series for series in found if series is not None]


def _largest_rise(series: Iterable[MetricSeries], observation: Observation, onset_ns: int) -> float:
    since_ns = max(onset_ns, observation.now_ns - RECENT_NS)
    return max((_rise(one, onset_ns, since_ns) for one in series), default=0.0)


def _rise(series: MetricSeries, onset_ns: int, since_ns: int) -> float:
    before = series.rate_before(onset_ns - ONSET_NS, USUAL_SECONDS)
    since = series.rate_since(since_ns)
    return 0.0 if before is None or since is None else max(min(since, 1.0) - before, 0.0)


def _waits(
    observation: Observation, generation: Generation, ranks: Iterable[int] | None = None
) -> Iterator[MetricSeries]:
    """Yield the series of the ranks' waits for CPUs."""
    telemetry = observation.telemetry
    for rank in list(generation.nodes if ranks is None else ranks)[:MOST_RANKS]:
        node = generation.nodes.get(rank, "")
        labels = {"job": generation.job, "rank": str(rank)}
        series = telemetry.find(node, WAIT, **labels) or telemetry.find(node, WAIT, rank=str(rank))
        if series is not None:
            yield series


def _median_share(rates: Iterable[float | None]) -> float | None:
    known = [min(rate, 1.0) for rate in rates if rate is not None]
    return median(known) if known else None


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
    return 1.0 + excess * uneven_share(seconds)


def uneven_share(seconds: float) -> float:
    """Return which share of its waits for a CPU an operation may have by accident for so long."""
    return min(1.0, math.sqrt(_EVENS_OUT_SECONDS / max(seconds, 1e-9)))
