"""The network interfaces that the job may use; other interfaces explain nothing."""

from __future__ import annotations

import re

from paceline_server.detect.telemetry import Telemetry
from paceline_wire import metric_names

# Interfaces of containers, virtual machines and tunnels on the node, by the names that their
# software gives them.
_VIRTUAL = re.compile(
    r"lo$|veth|docker|br-|cni|cali|cilium|lxc|flannel|weave|virbr|vnet|vmnet|tun|tap|macvtap|ifb"
    r"|dummy|nodelocal|kube|podman|nerdctl|vxlan|geneve|gre|sit|ip6tnl|wg|ovs"
)
# An interface that carries a smaller share of the node's traffic than this is not the job's.
_LEAST_SHARE = 0.05
_LEAST_BYTES_PER_SECOND = 1000.0  # the background noise of an idle network
_TRAFFIC = (metric_names.NETWORK_RECEIVE_BYTES_TOTAL, metric_names.NETWORK_TRANSMIT_BYTES_TOTAL)


def may_be_used(telemetry: Telemetry, node: str, device: str, onset_ns: int) -> bool:
    """Return whether the job may use the device.

    An interface has to carry traffic before the onset, or after it if it was not measured before.
    A device whose traffic is not measured, such as an RDMA port, may be used.
    """
    if _VIRTUAL.match(device):
        return False
    rates: dict[str, float] = {}
    for metric in _TRAFFIC:
        for labels, series in telemetry.all_of(node, metric):
            rate = series.rate_before(onset_ns)
            rate = series.rate_since(onset_ns) if rate is None else rate
            name = labels.get("device", "")
            if rate is not None and not _VIRTUAL.match(name):
                rates[name] = rates.get(name, 0.0) + rate
    if device not in rates:
        return True
    return rates[device] >= max(_LEAST_BYTES_PER_SECOND, _LEAST_SHARE * sum(rates.values()))
