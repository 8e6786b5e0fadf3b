from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.rdma import RdmaCollector
from paceline_agent.collect.contract import CollectorUnavailable
from tests.open_files import no_free_descriptors

MINUTE_NS = 60 * 1_000_000_000
PORT = "device=mlx5_1,port=1"
FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_a_real_port_reads_in_base_units(context, infiniband, series):
    found = series(RdmaCollector(context).collect(1))
    assert found[f"node_infiniband_state_id{{{PORT}}}"] == 4
    assert found[f"node_infiniband_physical_state_id{{{PORT}}}"] == 5
    assert found[f"node_infiniband_rate_bytes_per_second{{{PORT}}}"] == 400e9 / 8
    words = int((infiniband / "mlx5_1/ports/1/counters/port_rcv_data").read_text())
    assert found[f"node_infiniband_port_data_received_bytes_total{{{PORT}}}"] == 4 * words
    assert found[f"node_infiniband_out_of_sequence_packets_received_total{{{PORT}}}"] == 0
    assert "node_infiniband_state_id{device=mlx5_bond_0,port=1}" in found
    assert len(found) == 107


def test_a_counter_at_its_end_says_so(context, infiniband, series):
    found = series(RdmaCollector(context).collect(1))
    assert found[f"node_infiniband_link_downed_total{{{PORT}}}"] == 255
    saturated = "paceline_rdma_counter_saturated{counter=%s,device=%s,port=1}"
    assert {name for name in found if "saturated" in name} == {
        saturated % ("link_downed", "mlx5_1"),
        saturated % ("excessive_buffer_overrun_errors", "mlx5_1"),
        saturated % ("excessive_buffer_overrun_errors", "mlx5_bond_0"),
    }


@pytest.mark.parametrize("content", ["N/A (no PMA)\n", "", "-\n"])
def test_what_is_no_number_is_absent(context, infiniband, series, content):
    (infiniband / "mlx5_1/ports/1/counters/port_xmit_wait").write_text(content)
    assert f"node_infiniband_port_transmit_wait_total{{{PORT}}}" not in series(
        RdmaCollector(context).collect(1)
    )


def test_a_file_that_fails_is_read_less_and_less_often_until_it_can_be_read(
    context, infiniband, series
):
    path = infiniband / "mlx5_1/ports/1/counters/symbol_error"
    name = f"node_infiniband_symbol_error_total{{{PORT}}}"
    path.unlink()
    path.mkdir()  # reading it fails with EISDIR
    collector = RdmaCollector(context)
    for minute in (0, 1, 3):  # then not before minute 7
        assert name not in series(collector.collect(1 + minute * MINUTE_NS))
    path.rmdir()
    path.write_text("7\n")
    assert name not in series(collector.collect(6 * MINUTE_NS))
    assert series(collector.collect(8 * MINUTE_NS))[name] == 7


WATCHED = """
import json, sys
from pathlib import Path
from paceline_agent.collect.contract import Context
from paceline_agent.collect.collectors.rdma import RdmaCollector

sysfs, excluded = sys.argv[1:]
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
context = Context(Path(sysfs), sysfs_root=Path(sysfs), excluded_rdma=frozenset({excluded}))
found = RdmaCollector(context).collect(1).everything()
print(json.dumps([opened, [one.labels.get("device") for one in found]]))
"""


@pytest.mark.parametrize("excluded", ["mlx5_1", "mlx5_1/1", "mlx5_[0-9]", "mlx5_?/*"])
def test_an_excluded_port_is_not_opened(sysfs, infiniband, excluded):
    """This runs in its own process, because an audit hook cannot be removed."""
    command = [sys.executable, "-c", WATCHED, str(sysfs), excluded]
    opened, devices = json.loads(subprocess.check_output(command))
    assert set(devices) == {"mlx5_bond_0"}
    assert any("mlx5_bond_0/ports/1" in path for path in opened)
    assert not any("mlx5_1" in path for path in opened)


def test_a_port_that_goes_down_is_an_event(context, infiniband):
    collector = RdmaCollector(context)
    state = infiniband / "mlx5_1/ports/1/state"
    assert collector.collect(1).events == []
    state.write_text("1: DOWN\n")
    (event,) = collector.collect(2).events
    assert (event.kind, event.device) == ("link_down", "mlx5_1/1")
    assert collector.collect(3).events == []
    state.write_text("4: ACTIVE\n")
    assert [event.kind for event in collector.collect(4).events] == ["link_up"]


def test_a_port_is_not_down_for_lack_of_file_descriptors(context, infiniband, series):
    collector = RdmaCollector(context)
    before = series(collector.collect(1))
    with no_free_descriptors():
        during = collector.collect(1 + 31 * 1_000_000_000)
    assert (during.events, series(during)) == ([], before)


def test_a_device_that_goes_takes_only_its_own_series(context, infiniband, series):
    collector = RdmaCollector(context)
    collector.collect(1)
    shutil.rmtree(infiniband / "mlx5_1")
    found = series(collector.collect(2))
    assert found
    assert not any("mlx5_1," in name for name in found)


def test_a_node_without_devices_is_unavailable(context, sysfs: Path):
    with pytest.raises(CollectorUnavailable, match="no RDMA ports"):
        RdmaCollector(context).collect(1)


@pytest.fixture
def h100(sysfs):
    """All nine adapters of the recorded node."""
    archive = FIXTURES / "infiniband-h100.tar.gz"
    (sysfs / "class").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", sysfs / "class"], check=True)
    return sysfs / "class" / "infiniband"


def test_every_counter_of_the_recorded_node_has_its_series(context, h100, series):
    found = series(RdmaCollector(context).collect(1))
    for port in h100.glob("*/ports/1"):
        labels = f"{{device={port.parent.parent.name},port=1}}"
        assert found[f"node_infiniband_state_id{labels}"] == 4
        received = found[f"node_infiniband_port_data_received_bytes_total{labels}"]
        assert received == 4 * int((port / "counters/port_rcv_data").read_text())
        values = [value for name, value in found.items() if name.endswith(labels)]
        files = [int(path.read_text()) for path in port.glob("*counters/*")]
        assert len(files) == 47  # 21 classic and 26 hardware counters
        assert len(values) == len(files) + 3  # state, physical state, rate
    saturated = {name for name in found if name.startswith("paceline_rdma_counter_saturated")}
    assert {name for name in saturated if "link_downed" in name} == {
        "paceline_rdma_counter_saturated{counter=link_downed,device=mlx5_1,port=1}"
    }
    info = "node_infiniband_info{board_id=MT_0000000838,device=mlx5_0,"
    assert any(name.startswith(info) for name in found)
    assert len(found) == 9 * (47 + 3 + 2) + len(saturated)


@pytest.mark.parametrize(
    ("counter", "end", "metric"),
    [
        ("port_xmit_wait", 4_294_967_295, "port_transmit_wait_total"),
        ("symbol_error", 65_535, "symbol_error_total"),
        ("link_error_recovery", 255, "link_error_recovery_total"),
        ("local_link_integrity_errors", 15, "local_link_integrity_errors_total"),
    ],
)
def test_each_width_has_its_end(context, infiniband, series, counter, end, metric):
    path = infiniband / "mlx5_1/ports/1/counters" / counter
    flag = f"paceline_rdma_counter_saturated{{counter={counter},{PORT}}}"
    collector = RdmaCollector(context)
    for value, saturated in ((end - 1, False), (end, True), (0, False), (end + 1, False)):
        path.write_text(f"{value}\n")
        found = series(collector.collect(1))
        assert (flag in found) is saturated
        assert found[f"node_infiniband_{metric}{{{PORT}}}"] == value
    path.write_text(f"{end}\n")  # the counter exceeds its width: this adapter counts with more bits
    assert flag not in series(collector.collect(1))


@pytest.mark.parametrize("value", [255, 65_535, 4_294_967_295])
def test_a_wider_counter_stops_as_well(context, infiniband, series, value):
    (infiniband / "mlx5_1/ports/1/counters/link_downed").write_text(f"{value}\n")
    found = series(RdmaCollector(context).collect(1))
    assert found[f"node_infiniband_link_downed_total{{{PORT}}}"] == value
    assert found[f"paceline_rdma_counter_saturated{{counter=link_downed,{PORT}}}"] == 1


@pytest.mark.parametrize("value", [2**63 - 1, 2**64 - 2, 2**64 - 1, -1])
def test_what_no_counter_can_reach_is_absent(context, infiniband, series, value):
    (infiniband / "mlx5_1/ports/1/counters/port_rcv_data").write_text(f"{value}\n")
    found = series(RdmaCollector(context).collect(1))
    assert f"node_infiniband_port_data_received_bytes_total{{{PORT}}}" not in found


BNXT = "class/infiniband/bnxt_re0/ports/1"
IRDMA = "class/infiniband/irdma0/ports/1"
EFA = "class/infiniband/rdmap16s27"
HFI = "class/infiniband/hfi1_0/ports/1"
MANA = "class/infiniband/mana_0/ports"
ERDMA = "class/infiniband/erdma_0/ports"
OTHER_VENDORS = {
    f"{BNXT}/state": "4: ACTIVE\n",
    f"{BNXT}/phys_state": "5: LinkUp\n",
    f"{BNXT}/rate": "400 Gb/sec (4X NDR)\n",
    f"{BNXT}/link_layer": "Ethernet\n",
    f"{BNXT}/hw_counters/active_qps": "12\n",
    f"{BNXT}/hw_counters/rx_cnp_pkts": "7\n",
    f"{BNXT}/hw_counters/seq_err_naks_rcvd": "8\n",
    f"{BNXT}/hw_counters/rx_roce_discards": "9\n",
    f"{BNXT}/hw_counters/rx_out_of_sequence": "18446744073709551615\n",  # -1: not supported
    f"{IRDMA}/state": "1: DOWN\n",
    f"{IRDMA}/phys_state": "3: Disabled\n",
    f"{IRDMA}/rate": "1.2.3 Gb/sec\n",
    f"{IRDMA}/hw_counters/cnpHandled": "5\n",
    f"{IRDMA}/hw_counters/tcpRetransSegs": "6\n",
    f"{EFA}/ports/1/state": "4: ACTIVE\n",
    f"{EFA}/ports/1/rate": "200 Gb/sec (4X HDR)\n",
    f"{EFA}/ports/1/hw_counters/rx_drops": "3\n",
    f"{EFA}/ports/1/hw_counters/rx_bytes": "9000\n",
    f"{EFA}/hw_counters/no_completion_cmds": "4\n",
    f"{HFI}/state": "garbage\n",
    f"{HFI}/counters/symbol_error": "N/A (no PMA)\n",
    f"{HFI}/counters/link_downed": "1\n",
    f"{HFI}/counters_ext/port_xmit_data_64": "1000\n",
    f"{HFI}/hw_counters/TxWait": "11\n",
    f"{MANA}/1/hw_counters/received_cnps": "12\n",
    f"{MANA}/2/hw_counters/requester_timeout": "13\n",
    f"{MANA}/2/hw_counters/num_qps_congested": "14\n",
    f"{ERDMA}/1/hw_counters/tx_bytes_cnt": "15\n",
    f"{ERDMA}/.DS_Store": "no port\n",
    **{f"{HFI}/hw_counters/RxErr{number}": "1\n" for number in range(300)},
    **{f"{HFI}/hw_counters/Other{number}": "1\n" for number in range(300)},
}


def test_other_vendors_drivers(context, sysfs, write, infiniband, series):
    write(sysfs, OTHER_VENDORS)
    (sysfs / "class/infiniband/not_a_device").write_text("")
    collected = RdmaCollector(context).collect(1)
    found = series(collected)
    assert len(found) == len(collected.everything()), "no series is emitted twice"
    other = "paceline_rdma_hardware_counter_total"
    of_bnxt = {name: value for name, value in found.items() if "device=bnxt_re0" in name}
    bnxt = "device=bnxt_re0,port=1"
    assert of_bnxt == {
        f"node_infiniband_state_id{{{bnxt}}}": 4,
        f"node_infiniband_physical_state_id{{{bnxt}}}": 5,
        f"node_infiniband_rate_bytes_per_second{{{bnxt}}}": 50e9,
        f"node_infiniband_rp_cnp_packets_handled_total{{{bnxt}}}": 7,
        f"node_infiniband_packet_sequence_errors_total{{{bnxt}}}": 8,
        f"{other}{{counter=rx_roce_discards,{bnxt}}}": 9,
        "node_infiniband_info{board_id=,device=bnxt_re0,firmware_version=,hca_type=}": 1,
        "paceline_rdma_port_info{device=bnxt_re0,link_layer=Ethernet,netdev=,port=1}": 1,
    }
    irdma = "device=irdma0,port=1"
    assert found[f"node_infiniband_state_id{{{irdma}}}"] == 1
    assert f"node_infiniband_rate_bytes_per_second{{{irdma}}}" not in found
    assert found[f"node_infiniband_rp_cnp_packets_handled_total{{{irdma}}}"] == 5
    assert found[f"{other}{{counter=tcpRetransSegs,{irdma}}}"] == 6
    efa = "device=rdmap16s27,port=1"
    assert found[f"node_infiniband_port_discards_received_total{{{efa}}}"] == 3
    assert found[f"node_infiniband_port_data_received_bytes_total{{{efa}}}"] == 9000
    assert found[f"{other}{{counter=no_completion_cmds,device=rdmap16s27}}"] == 4
    hfi = "device=hfi1_0,port=1"
    assert f"node_infiniband_state_id{{{hfi}}}" not in found
    assert f"node_infiniband_symbol_error_total{{{hfi}}}" not in found
    assert found[f"node_infiniband_link_downed_total{{{hfi}}}"] == 1
    assert found[f"node_infiniband_legacy_data_transmitted_bytes_total{{{hfi}}}"] == 4000
    assert sum("counter=RxErr" in name for name in found) == 63
    assert found[f"{other}{{counter=TxWait,{hfi}}}"] == 11
    assert found["node_infiniband_rp_cnp_packets_handled_total{device=mana_0,port=1}"] == 12
    assert found["node_infiniband_local_ack_timeout_errors_total{device=mana_0,port=2}"] == 13
    assert not any("num_qps_congested" in name for name in found)
    erdma = {name for name in found if "device=erdma_0" in name}
    assert "node_infiniband_port_data_transmitted_bytes_total{device=erdma_0,port=1}" in erdma
    assert len(erdma) == 3  # plus the info metric
    assert found["node_infiniband_state_id{device=mlx5_bond_0,port=1}"] == 4


def test_a_driver_that_answers_einval_takes_only_its_own_values(
    context, infiniband, series, refusing
):
    path = infiniband / "mlx5_1/ports/1/counters/port_rcv_data"
    path.unlink()
    path.symlink_to(refusing)
    found = series(RdmaCollector(context).collect(1))
    assert f"node_infiniband_port_data_received_bytes_total{{{PORT}}}" not in found
    assert f"node_infiniband_port_data_transmitted_bytes_total{{{PORT}}}" in found


def test_a_device_that_came_back_is_read_afresh(context, infiniband, series, refusing):
    counter = infiniband / "mlx5_1/ports/1/counters/symbol_error"
    name = f"node_infiniband_symbol_error_total{{{PORT}}}"
    counter.unlink()
    counter.symlink_to(refusing)
    collector = RdmaCollector(context)
    assert name not in series(collector.collect(1))
    shutil.move(infiniband / "mlx5_1", infiniband.parent / "away")
    (event,) = collector.collect(2).events
    assert (event.kind, event.device, event.detail) == ("link_down", "mlx5_1/1", "device gone")
    shutil.copytree(FIXTURES / "infiniband/mlx5_1", infiniband / "mlx5_1")
    assert name in series(collector.collect(2 + 30 * 1_000_000_000))


def test_more_files_than_descriptors(context, h100, series, monkeypatch):
    roomy = RdmaCollector(context)
    whole = series(roomy.collect(1))
    roomy.close()
    monkeypatch.setattr("resource.getrlimit", lambda _: (100, 100))
    before = len(list(Path("/proc/self/fd").iterdir()))
    collector = RdmaCollector(context)
    assert series(collector.collect(1)) == whole
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 60
    collector.close()
