"""InfiniBand, RoCE and Ethernet ports: rate, state, errors, losses, congestion."""

from __future__ import annotations

from dataclasses import replace

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, inverse, looks_at

_IB = "node_infiniband_"
# Counters that stop at their width (InfiniBand 1.x): at its end one counts no more.
_WIDTH_BITS: dict[str, int] = {
    f"{_IB}link_downed_total": 8,
    f"{_IB}link_error_recovery_total": 8,
    f"{_IB}local_link_integrity_errors_total": 4,
    f"{_IB}symbol_error_total": 16,
    f"{_IB}port_errors_received_total": 16,
    f"{_IB}port_discards_transmitted_total": 16,
    f"{_IB}port_transmit_wait_total": 32,
}


def _rate(metric: str) -> Symptom:
    return Symptom(
        "low link rate", metric, Scope.DEVICE, "link rate", "Gbit/s", "level",
        0.0, relative=0.05, rises=False, scale=8e-9, predicts=inverse,
    )  # fmt: skip


def _end(metric: str) -> float | None:
    bits = _WIDTH_BITS.get(metric)
    return None if bits is None else float((1 << bits) - 1)


def _state(metric: str, what: str) -> Symptom:
    return Symptom("link down", metric, Scope.DEVICE, what, "", "level", 0.2, rises=False)


def _events(cause: str, metric: str, what: str, no_deviation: float) -> Symptom:
    return Symptom(
        cause, metric, Scope.DEVICE, what, "", "events", no_deviation, ends_at=_end(metric)
    )


def _per_second(
    cause: str, metric: str, what: str, no_deviation: float, scope: Scope = Scope.DEVICE
) -> Symptom:
    """What also happens on a healthy network, at some rate."""
    return Symptom(
        cause, metric, scope, what, "/s", "rate", no_deviation, relative=1.0, normal=0.0,
        ends_at=_end(metric),
    )  # fmt: skip


SYMPTOMS = (
    _rate(f"{_IB}rate_bytes_per_second"),
    _rate("node_network_speed_bytes"),
    _state(f"{_IB}state_id", "port state"),
    _state("node_network_carrier", "carrier"),
    _events("link down", f"{_IB}link_downed_total", "losses of the link", 0.25),
    _events("link down", "node_network_carrier_changes_total", "changes of the carrier", 0.25),
    _events("link errors", f"{_IB}symbol_error_total", "symbol errors", 5.0),
    _events("link errors", f"{_IB}port_errors_received_total", "receive errors", 5.0),
    _events("link errors", f"{_IB}link_error_recovery_total", "link recoveries", 0.5),
    _events("link errors", f"{_IB}local_link_integrity_errors_total", "integrity errors", 1.0),
    _events("link errors", "node_network_receive_errs_total", "receive errors", 5.0),
    _events("link errors", "node_network_transmit_errs_total", "transmit errors", 5.0),
    _per_second(
        "packet loss",
        f"{_IB}out_of_sequence_packets_received_total",
        "rate of packets out of sequence",
        1.0,
    ),
    _per_second(
        "packet loss", f"{_IB}packet_sequence_errors_total", "rate of sequence errors", 1.0
    ),
    _per_second(
        "packet loss", f"{_IB}local_ack_timeout_errors_total", "rate of lost acknowledgements", 0.2
    ),
    _per_second(
        "packet loss", f"{_IB}roce_adp_retransmits_total", "rate of adaptive retransmits", 1.0
    ),
    _per_second(
        "packet loss", f"{_IB}port_discards_transmitted_total", "rate of discarded packets", 1.0
    ),
    _per_second("packet loss", "node_network_receive_drop_total", "rate of dropped packets", 20.0),
    _per_second(
        "packet loss", "node_network_transmit_drop_total", "rate of packets not sent", 20.0
    ),
    _per_second(
        "packet loss", "node_netstat_Tcp_RetransSegs", "rate of TCP retransmits", 5.0, Scope.NODE
    ),
    _per_second(
        "network congestion",
        f"{_IB}np_cnp_packets_sent_total",
        "rate of congestion notifications sent",
        50.0,
    ),
    _per_second(
        "network congestion",
        f"{_IB}rp_cnp_packets_handled_total",
        "rate of congestion notifications received",
        50.0,
    ),
    _per_second(
        "network congestion",
        f"{_IB}np_ecn_marked_roce_packets_received_total",
        "rate of packets marked for congestion",
        50.0,
    ),
    # Ticks of the port's clock; some waiting is normal on a busy port.
    _per_second(
        "network congestion",
        f"{_IB}port_transmit_wait_total",
        "rate of ticks with data that could not be sent",
        1e5,
    ),
)
# A link that goes down makes errors, and both lose packets: the first of these that holds.
_BY_DEPTH = ("link down", "link errors", "packet loss", "network congestion")


def check(suspect: Suspect) -> list[MetricObservation]:
    looks = {each.cause: each for each in looks_at(suspect, SYMPTOMS)}
    deeper = False
    for cause in _BY_DEPTH:
        found = looks.get(cause)
        if found is not None and found.weight > 0:
            if deeper:
                looks[cause] = replace(found, weight=found.weight + weighing.EXPLAINED_AWAY)
            deeper = True
    return list(looks.values())
