"""InfiniBand, RoCE and Ethernet ports: rate, state, errors, packet loss, congestion."""

from __future__ import annotations

from dataclasses import replace

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import (
    LINK_DOWN,
    LINK_ERRORS,
    LOW_LINK_RATE,
    NETWORK_CONGESTION,
    PACKET_LOSS,
)
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence, inverse, weigh_symptoms
from paceline_wire import metric_names

_IB = "node_infiniband_"
# InfiniBand counters that stop at their maximum value instead of wrapping.
_WIDTH_BITS: dict[str, int] = {
    f"{_IB}link_downed_total": 8,
    f"{_IB}link_error_recovery_total": 8,
    f"{_IB}local_link_integrity_errors_total": 4,
    f"{_IB}symbol_error_total": 16,
    f"{_IB}port_errors_received_total": 16,
    f"{_IB}port_discards_transmitted_total": 16,
    f"{_IB}port_transmit_wait_total": 32,
}


def _scope(metric: str) -> Scope:
    """Return the scope of a port: RDMA devices belong to the job, interfaces may belong to
    others."""
    return Scope.DEVICE if metric.startswith(_IB) else Scope.INTERFACE


def _rate(metric: str) -> Symptom:
    return Symptom(
        LOW_LINK_RATE, metric, _scope(metric), "link rate", "Gbit/s", "level",
        0.0, relative_tolerance=0.05, rises=False, scale=8e-9, predicts=inverse,
    )  # fmt: skip


def _maximum(metric: str) -> float | None:
    bits = _WIDTH_BITS.get(metric)
    return None if bits is None else float((1 << bits) - 1)


def _state(metric: str, name: str) -> Symptom:
    return Symptom(LINK_DOWN, metric, _scope(metric), name, "", "level", 0.2, rises=False)


def _events(cause: str, metric: str, name: str, tolerance: float) -> Symptom:
    return Symptom(
        cause, metric, _scope(metric), name, "", "events", tolerance, saturates_at=_maximum(metric)
    )


def _per_second(
    cause: str, metric: str, name: str, tolerance: float, scope: Scope | None = None
) -> Symptom:
    """Return the symptom of a rate that is above zero on a healthy network too."""
    return Symptom(
        cause, metric, scope or _scope(metric), name, "/s", "rate", tolerance,
        relative_tolerance=1.0, normal=0.0, saturates_at=_maximum(metric),
    )  # fmt: skip


SYMPTOMS = (
    _rate(f"{_IB}rate_bytes_per_second"),
    _rate(metric_names.NETWORK_SPEED_BYTES),
    _state(f"{_IB}state_id", "port state"),
    _state(metric_names.NETWORK_CARRIER, "carrier"),
    _events(LINK_DOWN, f"{_IB}link_downed_total", "link losses", 0.25),
    _events(LINK_DOWN, metric_names.NETWORK_CARRIER_CHANGES_TOTAL, "carrier changes", 0.25),
    _events(LINK_ERRORS, f"{_IB}symbol_error_total", "symbol errors", 5.0),
    _events(LINK_ERRORS, f"{_IB}port_errors_received_total", "receive errors", 5.0),
    _events(LINK_ERRORS, f"{_IB}link_error_recovery_total", "link recoveries", 0.5),
    _events(LINK_ERRORS, f"{_IB}local_link_integrity_errors_total", "integrity errors", 1.0),
    _events(LINK_ERRORS, metric_names.NETWORK_RECEIVE_ERRS_TOTAL, "receive errors", 5.0),
    _events(LINK_ERRORS, metric_names.NETWORK_TRANSMIT_ERRS_TOTAL, "transmit errors", 5.0),
    _per_second(
        PACKET_LOSS,
        f"{_IB}out_of_sequence_packets_received_total",
        "rate of packets out of sequence",
        1.0,
    ),
    _per_second(PACKET_LOSS, f"{_IB}packet_sequence_errors_total", "rate of sequence errors", 1.0),
    _per_second(
        PACKET_LOSS, f"{_IB}local_ack_timeout_errors_total", "rate of lost acknowledgments", 0.2
    ),
    _per_second(
        PACKET_LOSS, f"{_IB}roce_adp_retransmits_total", "rate of adaptive retransmits", 1.0
    ),
    _per_second(
        PACKET_LOSS, f"{_IB}port_discards_transmitted_total", "rate of discarded packets", 1.0
    ),
    _per_second(
        PACKET_LOSS, metric_names.NETWORK_RECEIVE_DROP_TOTAL, "rate of dropped packets", 20.0
    ),
    _per_second(
        PACKET_LOSS, metric_names.NETWORK_TRANSMIT_DROP_TOTAL, "rate of packets not sent", 20.0
    ),
    _per_second(
        PACKET_LOSS,
        metric_names.NETSTAT_TCP_RETRANSSEGS,
        "rate of TCP retransmits",
        5.0,
        Scope.NODE,
    ),
    _per_second(
        PACKET_LOSS,
        metric_names.RANK_TCP_RETRANSMITTED_SEGMENTS_TOTAL,
        "rate of TCP retransmits",
        5.0,
        Scope.RANK,
    ),
    _per_second(
        NETWORK_CONGESTION,
        f"{_IB}np_cnp_packets_sent_total",
        "rate of congestion notifications sent",
        50.0,
    ),
    _per_second(
        NETWORK_CONGESTION,
        f"{_IB}rp_cnp_packets_handled_total",
        "rate of congestion notifications received",
        50.0,
    ),
    _per_second(
        NETWORK_CONGESTION,
        f"{_IB}np_ecn_marked_roce_packets_received_total",
        "rate of packets marked for congestion",
        50.0,
    ),
    # Ticks of the port's clock. Some waiting is normal on a busy port.
    _per_second(
        NETWORK_CONGESTION,
        f"{_IB}port_transmit_wait_total",
        "rate of ticks with data that could not be sent",
        1e5,
    ),
)
# Each cause explains those after it: a lost link causes errors, and both lose packets.
_BY_DEPTH = (LINK_DOWN, LINK_ERRORS, PACKET_LOSS, NETWORK_CONGESTION)


def check(suspect: Suspect) -> list[WeighedEvidence]:
    results = {each.cause: each for each in weigh_symptoms(suspect, SYMPTOMS)}
    is_explained = False
    for cause in _BY_DEPTH:
        found = results.get(cause)
        if found is not None and found.weight > 0:
            if is_explained:
                results[cause] = replace(found, weight=found.weight + weighing.EXPLAINED_AWAY)
            is_explained = True
    return list(results.values())
