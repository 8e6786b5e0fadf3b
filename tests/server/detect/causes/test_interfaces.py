"""Only a network interface that may carry the job's traffic explains a slow rank."""

from __future__ import annotations

import pytest
from measured_fleet import JOB, START_NS, Fleet

from paceline_server.detect.causes.catalog import LINK_DOWN, UNKNOWN
from paceline_wire.batch import Sample
from paceline_wire.metric_names import RANK_TCP_INTERFACE_INFO

SECONDS = 75
ONSET = 60
BUSY = 1e8  # bytes per second


def with_interface(fleet: Fleet, name: str, bytes_per_second: float) -> Fleet:
    """Let an interface of node-1 that the job does not use lose its carrier at the onset."""
    fleet.play(SECONDS)
    for at in range(0, SECONDS, 5):
        time_ns = START_NS + at * 10**9
        up = at < ONSET
        for device, rate, carrier in (("eth0", BUSY, True), (name, bytes_per_second, up)):
            labels = {"device": device}
            moved = rate * min(at, ONSET if not carrier else at)
            for metric, value in (
                ("receive_bytes_total", moved),
                ("transmit_bytes_total", moved),
                ("carrier", float(carrier)),
                ("carrier_changes_total", 0.0 if carrier else 3.0),
            ):
                sample = Sample(f"node_network_{metric}", labels, value, time_ns)
                fleet.telemetry.add("node-1", sample)
    return fleet


@pytest.mark.parametrize(
    ("name", "bytes_per_second"),
    [("ens9", 0.0), ("ens9", 500.0), ("ens9", BUSY / 1000)]
    + [(name, BUSY) for name in ("veth12ab", "docker0", "br-9f", "cni0", "virbr0", "tun0", "tap3")],
)
def test_an_interface_of_another_program_that_goes_down_explains_nothing(
    name: str, bytes_per_second: float
) -> None:
    fleet = with_interface(Fleet(seed=4), name, bytes_per_second)
    found = fleet.diagnose(2, kind="slow_link", peer=5)
    assert found.cause != LINK_DOWN
    assert not any(name in line.text for line in found.evidence)


def test_an_interface_with_traffic_that_goes_down_is_the_cause() -> None:
    fleet = with_interface(Fleet(seed=4), "ens9", BUSY)
    found = fleet.diagnose(2, kind="slow_link", peer=5)
    assert (found.cause, found.on_node) == (LINK_DOWN, True)
    assert any("ens9" in line.text for line in found.evidence)


@pytest.mark.parametrize(("used", "cause"), [("eth0", UNKNOWN), ("ens9", LINK_DOWN)])
def test_only_an_interface_of_the_ranks_connections_is_the_cause(used: str, cause: str) -> None:
    fleet = with_interface(Fleet(seed=4), "ens9", BUSY)
    for rank in range(8):
        labels = {"job": JOB, "rank": str(rank), "device": used}
        sample = Sample(RANK_TCP_INTERFACE_INFO, labels, 1.0, START_NS)
        fleet.telemetry.add(f"node-{rank // 2}", sample)
    assert fleet.diagnose(2, kind="slow_link", peer=5).cause == cause
