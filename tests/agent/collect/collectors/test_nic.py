from __future__ import annotations

import pytest

from paceline_agent.collect.collectors.nic import NicCollector
from tests.open_files import no_free_descriptors

SECOND_NS = 1_000_000_000
ETH0 = {
    "class/net/eth0/statistics/rx_bytes": "1000\n",
    "class/net/eth0/statistics/tx_bytes": "2000\n",
    "class/net/eth0/statistics/rx_errors": "3\n",
    "class/net/eth0/statistics/rx_dropped": "4\n",
    "class/net/eth0/mtu": "9000\n",
    "class/net/eth0/speed": "100000\n",
    "class/net/eth0/carrier": "1\n",
    "class/net/eth0/carrier_changes": "2\n",
    "class/net/eth0/carrier_down_count": "1\n",
    "class/net/eth0/operstate": "up\n",
    "class/net/eth0/duplex": "full\n",
    "class/net/eth0/address": "02:00:00:00:00:01\n",
    "class/net/eth0/broadcast": "ff:ff:ff:ff:ff:ff\n",
    "class/net/eth0/ifalias": "uplink\n",
    "class/net/lo/statistics/rx_bytes": "9\n",
}


@pytest.fixture
def eth0(sysfs, write):
    write(sysfs, ETH0)
    return sysfs / "class/net/eth0"


def test_golden(context, eth0, series):
    assert series(NicCollector(context).collect(1)) == {
        "node_network_receive_bytes_total{device=eth0}": 1000,
        "node_network_transmit_bytes_total{device=eth0}": 2000,
        "node_network_receive_errs_total{device=eth0}": 3,
        "node_network_receive_drop_total{device=eth0}": 4,
        "node_network_mtu_bytes{device=eth0}": 9000,
        "node_network_carrier{device=eth0}": 1,
        "node_network_carrier_changes_total{device=eth0}": 2,
        "node_network_speed_bytes{device=eth0}": 12_500_000_000,
        "node_network_carrier_down_changes_total{device=eth0}": 1,
        "node_network_up{device=eth0}": 1,
        "node_network_info{address=02:00:00:00:00:01,broadcast=ff:ff:ff:ff:ff:ff,device=eth0,"
        "duplex=full,ifalias=uplink,operstate=up}": 1,
        "paceline_network_jumbo{device=eth0}": 1,
    }


SNMP = """Ip: Forwarding DefaultTTL
Ip: 2 64
Tcp: RtoAlgorithm MaxConn OutSegs RetransSegs InErrs
Tcp: 1 -1 19043252 13561 0
"""


def test_tcp_retransmits(context, eth0, procfs, write, series):
    write(procfs, {"net/snmp": SNMP})
    found = series(NicCollector(context).collect(1))
    assert found["node_netstat_Tcp_RetransSegs"] == 13561
    assert found["node_netstat_Tcp_OutSegs"] == 19043252


@pytest.mark.parametrize("text", ["", "Tcp: OutSegs\n", "Tcp: OutSegs RetransSegs\nTcp: x\n"])
def test_what_tcp_does_not_tell_is_absent(context, eth0, procfs, write, series, text):
    write(procfs, {"net/snmp": text})
    assert not any(
        name.startswith("node_netstat") for name in series(NicCollector(context).collect(1))
    )


@pytest.mark.parametrize("value", ["-1", "18446744073709551615"])
def test_what_no_counter_can_reach_is_absent(context, eth0, series, value):
    (eth0 / "statistics/rx_bytes").write_text(f"{value}\n")
    found = series(NicCollector(context).collect(1))
    assert "node_network_receive_bytes_total{device=eth0}" not in found


@pytest.mark.parametrize("unknown", ["-1", "65535", "4294967295"])
def test_an_unknown_speed_is_absent_and_asked_again(context, eth0, series, unknown):
    (eth0 / "speed").write_text(f"{unknown}\n")
    collector = NicCollector(context)
    assert "node_network_speed_bytes{device=eth0}" not in series(collector.collect(1))
    (eth0 / "speed").write_text("25000\n")
    after = series(collector.collect(1 + 10 * SECOND_NS))
    assert after["node_network_speed_bytes{device=eth0}"] == 3.125e9


def test_what_changes_seldom_is_asked_seldom(context, eth0, series):
    collector = NicCollector(context)
    collector.collect(0)
    (eth0 / "speed").write_text("25000\n")
    (eth0 / "duplex").write_text("unknown\n")
    found = series(collector.collect(9 * SECOND_NS))
    assert found["node_network_speed_bytes{device=eth0}"] == 12_500_000_000
    assert any("duplex=full" in name for name in found)
    found = series(collector.collect(10 * SECOND_NS))
    assert found["node_network_speed_bytes{device=eth0}"] == 3.125e9
    assert any("duplex=unknown" in name for name in found)


def test_a_link_that_comes_up_is_asked_at_once(context, eth0, series):
    collector = NicCollector(context)
    (eth0 / "operstate").write_text("down\n")
    (eth0 / "speed").write_text("-1\n")
    collector.collect(0)
    (eth0 / "operstate").write_text("up\n")
    (eth0 / "speed").write_text("25000\n")
    found = series(collector.collect(SECOND_NS))
    assert found["node_network_speed_bytes{device=eth0}"] == 3.125e9
    assert any("operstate=up" in name for name in found)


def test_a_lost_carrier_is_one_event(context, eth0):
    collector = NicCollector(context)
    assert collector.collect(1).events == []
    (eth0 / "carrier").write_text("0\n")
    assert [event.kind for event in collector.collect(2).events] == ["link_down"]
    assert collector.collect(3).events == []
    (eth0 / "carrier").write_text("1\n")
    assert [event.kind for event in collector.collect(4).events] == ["link_up"]


def test_a_link_is_not_down_for_lack_of_file_descriptors(context, eth0, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (0, 0))  # keep no file open
    collector = NicCollector(context)
    collector.collect(1)
    with no_free_descriptors():
        assert collector.collect(2).events == []
        assert collector.collect(1 + 6 * SECOND_NS).events == []
    (eth0 / "carrier").write_text("0\n")
    lost = collector.collect(2 + 6 * SECOND_NS).events
    assert [(event.kind, event.device) for event in lost] == [("link_down", "eth0")]


def test_an_interface_that_is_turned_off_is_down(context, eth0, monkeypatch, refusing):
    monkeypatch.setattr("resource.getrlimit", lambda _: (0, 0))
    collector = NicCollector(context)
    collector.collect(1)
    (eth0 / "operstate").write_text("down\n")
    (eth0 / "carrier").unlink()
    (eth0 / "carrier").symlink_to(refusing)
    assert [event.kind for event in collector.collect(2).events] == ["link_down"]


NETSTAT = """TcpExt: SyncookiesSent ListenDrops TCPTimeouts TCPSynRetrans
TcpExt: 0 3 4 5
IpExt: InOctets
IpExt: 7
"""


def test_tcp_timeouts(context, eth0, procfs, write, series):
    write(procfs, {"net/netstat": NETSTAT})
    found = series(NicCollector(context).collect(1))
    assert {name: value for name, value in found.items() if name.startswith("node_netstat")} == {
        "node_netstat_TcpExt_ListenDrops": 3,
        "node_netstat_TcpExt_TCPTimeouts": 4,
        "node_netstat_TcpExt_TCPSynRetrans": 5,
    }


@pytest.mark.parametrize(("mtu", "jumbo"), [("1500", 0), ("1400", 0), ("4200", 1), ("9000", 1)])
def test_jumbo_frames(context, eth0, series, mtu, jumbo):
    (eth0 / "mtu").write_text(f"{mtu}\n")
    assert series(NicCollector(context).collect(1))["paceline_network_jumbo{device=eth0}"] == jumbo


def test_a_recreated_interface_starts_from_zero(context, eth0, sysfs, write, series):
    collector = NicCollector(context)
    collector.collect(1)
    eth0.rename(eth0.with_name("wasp0"))
    write(sysfs, {**ETH0, "class/net/eth0/statistics/rx_bytes": "5\n"})
    found = series(collector.collect(2))
    assert found["node_network_receive_bytes_total{device=eth0}"] == 5
    assert found["node_network_receive_bytes_total{device=wasp0}"] == 1000


def test_a_name_that_begins_like_the_loopbacks_is_no_loopback(context, eth0, sysfs, write, series):
    write(sysfs, {f"class/net/{name}/statistics/rx_bytes": "5\n" for name in ("lo", "lom1")})
    found = series(NicCollector(context).collect(1))
    assert found["node_network_receive_bytes_total{device=lom1}"] == 5
    assert "node_network_receive_bytes_total{device=lo}" not in found


def test_a_node_full_of_virtual_functions_keeps_its_cards(context, sysfs, write, series):
    for number in range(80):
        name = f"enp1s0v{number}"
        write(sysfs, {f"class/net/{name}/statistics/rx_bytes": "1\n"})
        (sysfs / "class/net" / name / "device/physfn").mkdir(parents=True)
    write(sysfs, {f"class/net/{name}/statistics/rx_bytes": "1\n" for name in ("bond0", "hsn0")})
    (sysfs / "class/net/hsn0/device").mkdir()
    found = series(NicCollector(context).collect(1))
    received = [name for name in found if name.startswith("node_network_receive_bytes_total")]
    assert received[:2] == [
        "node_network_receive_bytes_total{device=hsn0}",
        "node_network_receive_bytes_total{device=bond0}",
    ]
    assert len(received) == 64
