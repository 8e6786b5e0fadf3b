from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.ethtool import EthtoolCollector, metric_name, wanted
from paceline_agent.collect.contract import CollectorUnavailable

MLX5 = """NIC statistics:
     rx_packets: 500
     rx_vport_rdma_unicast_bytes: 123456789012
     rx_out_of_buffer: 7
     rx_prio3_bytes: 10
     rx_prio3_pause: 42
     rx_prio3_pause_duration: 4242
     tx_prio3_pause: 41
     tx_prio3_pause_duration: 18446744073709551615
     rx_prio0_discards: 3
     rx_pause_ctrl_phy: 1
     rx_discards_phy: 9
     rx_symbol_err_phy: 5
     link_down_events_phy: 2
     rx_ecn_mark: 6
     module_high_temp: 0
     rx_xdp_drop: 8
     rx_cache_full: 8
     ch0_events: 11
     rx0_buff_alloc_err: 12
     tx17_dropped: 13
"""


@pytest.fixture
def mlx5(sysfs, write):
    write(
        sysfs,
        {
            "class/net/eth0/ethtool_statistics": MLX5,
            "class/net/eth0/device/vendor": "0x15b3\n",
            "class/net/lo/mtu": "65536\n",
        },
    )


def test_golden(context, mlx5, series):
    assert series(EthtoolCollector(context).collect(1)) == {
        f"node_ethtool_{name}{{device=eth0}}": value
        for name, value in {
            "received_vport_rdma_unicast_bytes": 123456789012,
            "received_out_of_buffer": 7,
            "received_prio3_pause": 42,
            "received_prio3_pause_duration": 4242,
            "transmitted_prio3_pause": 41,
            "received_prio0_discards": 3,
            "received_pause_ctrl_phy": 1,
            "received_discards_phy": 9,
            "received_symbol_err_phy": 5,
            "link_down_events_phy": 2,
            "received_ecn_mark": 6,
            "module_high_temp": 0,
        }.items()
    }


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("rx_prio3_pause", "received_prio3_pause"),
        ("tx_priority_0_xoff.nic", "transmitted_priority_0_xoff_nic"),
        ("pfc_pri3_rx_duration_us", "pfc_pri3_received_duration_us"),
        ("rx_errors", "received_errors_total"),
        ("port.tx_timeout", "port_transmitted_timeout"),
        ("bw_in_allowance_exceeded", "bw_in_allowance_exceeded"),
    ],
)
def test_names_of_other_drivers(name, metric):
    assert metric_name(name) == f"node_ethtool_{metric}"
    assert list(wanted([name])) == [(0, f"node_ethtool_{metric}")]


@pytest.mark.parametrize(
    "name",
    ["rx_queue_3_drops", "tx-12.tx_errors", "[5]: rx_discards", "queue_0_rx_cnt_drop",
     "rx_bytes", "veb.tc_1_rx_drops", "vf_3_errors", "q7_rx_dropped"],
)  # fmt: skip
def test_what_there_is_one_of_for_each_queue_is_left_out(name):
    assert list(wanted([name])) == []


def test_a_driver_with_thousands_stays_bounded_and_keeps_its_pauses():
    names = [f"rx_drop_reason_{letter}{n}" for letter in "abc" for n in range(1000)]
    names += [f"rx_prio{n}_pause" for n in range(8)]
    found = [metric for _, metric in wanted(names)]
    assert len(found) == 96
    assert sum(metric.endswith("_pause") for metric in found) == 8


def test_a_node_whose_drivers_tell_nothing_is_unavailable(context, sysfs, write):
    write(sysfs, {"class/net/eth0/device/vendor": "0x1\n"})
    with pytest.raises(CollectorUnavailable):
        EthtoolCollector(context).collect(1)


def test_a_driver_of_this_machine(context, series):
    real = dataclasses.replace(context, sysfs_root=Path("/sys"))
    collector = EthtoolCollector(real)
    try:
        found = series(collector.collect(1))
    except CollectorUnavailable as unavailable:
        pytest.skip(str(unavailable))
    finally:
        collector.close()
    (information, *_) = (name for name in found if name.startswith("node_ethtool_info"))
    assert "driver=," not in information
