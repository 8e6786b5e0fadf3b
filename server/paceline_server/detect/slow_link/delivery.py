"""How long TCP took to deliver what ranks sent, as the kernels of their nodes count it.

A transfer has threads on both nodes. If they wait for CPUs it takes longer, and the network is not
to blame: what was sent is acknowledged nearly as fast as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline_server.detect.host_load import MOST_RANKS, ONSET_NS, RECENT_NS, USUAL_SECONDS
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.telemetry import MetricSeries
from paceline_wire import metric_names

# A rank that sends less does not communicate over TCP: these are heartbeats and logs.
LEAST_BYTES_PER_SECOND = 1e6


def delivery_slowdown(
    observation: Observation, generation: Generation, ranks: Sequence[int], onset_ns: int
) -> float | None:
    """Return the seconds per byte until what ranks sent was acknowledged, relative to before.

    Of the rank where the ratio is largest. NaN if it is not measured yet; None if the ranks do not
    communicate over TCP.
    """
    found = [_slowdown(observation, generation, rank, onset_ns) for rank in ranks[:MOST_RANKS]]
    over_tcp = [each for each in found if each is not None]
    if not over_tcp:
        return None
    return max((each for each in over_tcp if not math.isnan(each)), default=math.nan)


def sending_share(
    observation: Observation, generation: Generation, ranks: Sequence[int], onset_ns: int
) -> float:
    """Return the share of recent time in which something that a rank sent was not acknowledged.

    Of the rank where it is largest; 0 if it is not measured. A network that makes transfers longer
    makes this time as much longer, also where few bytes are sent.
    """
    since_ns = max(onset_ns, observation.now_ns - RECENT_NS)
    name, telemetry = metric_names.RANK_TCP_SENDING_SECONDS_TOTAL, observation.telemetry
    found = (
        telemetry.find(generation.nodes.get(rank, ""), name, job=generation.job, rank=str(rank))
        for rank in ranks[:MOST_RANKS]
    )
    shares = (_rate_after(series, since_ns) for series in found if series is not None)
    return max((share for share in shares if share is not None), default=0.0)


def _slowdown(
    observation: Observation, generation: Generation, rank: int, onset_ns: int
) -> float | None:
    node, labels = generation.nodes.get(rank, ""), {"job": generation.job, "rank": str(rank)}
    sent = observation.telemetry.find(node, metric_names.RANK_TCP_SENT_BYTES_TOTAL, **labels)
    sending = observation.telemetry.find(
        node, metric_names.RANK_TCP_SENDING_SECONDS_TOTAL, **labels
    )
    if sent is None or sending is None or not sending.latest():  # old kernels count nothing
        return None
    both = (sending, sent)
    if (sent.rate_since(0) or 0.0) < LEAST_BYTES_PER_SECOND:
        return None
    since_ns = max(onset_ns, observation.now_ns - RECENT_NS)
    now = _seconds_per_byte(*(_rate_after(each, since_ns) for each in both))
    for before_ns in (onset_ns - ONSET_NS, since_ns - ONSET_NS):
        usual = _seconds_per_byte(*(each.rate_before(before_ns, USUAL_SECONDS) for each in both))
        if usual > 0:
            return now / usual
    return math.nan


def _seconds_per_byte(seconds: float | None, sent_bytes: float | None) -> float:
    return seconds / sent_bytes if seconds is not None and sent_bytes else math.nan


def _rate_after(series: MetricSeries, onset_ns: int) -> float | None:
    """Return the growth per second from the first sample after the onset to the newest."""
    times, _ = series.columns()
    after = times[times >= onset_ns]
    return series.rate_since(int(after[1])) if after.size > 1 else None
