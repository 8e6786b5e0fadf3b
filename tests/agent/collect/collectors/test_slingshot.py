from __future__ import annotations

import pytest

from paceline_agent.collect.collectors.slingshot import SlingshotCollector
from paceline_agent.collect.contract import CollectorUnavailable

TELEMETRY = "class/cxi/cxi0/device/telemetry"
NODE = {
    f"{TELEMETRY}/hni_sts_rx_ok_octets": "72057594037927935@1683033431.123456789\n",
    f"{TELEMETRY}/hni_sts_tx_ok_octets": "4096@1683033431.123456789\n",
    f"{TELEMETRY}/pct_sct_timeouts": "7@1683033431.1\n",
    f"{TELEMETRY}/hni_rx_paused_0": "99\n",
    f"{TELEMETRY}/hni_pcs_corrected_cw": "N/A\n",
    f"{TELEMETRY}/hni_pcs_uncorrected_cw": "18446744073709551615@1683033431.1\n",
    f"{TELEMETRY}/hni_rx_ok_64": "5@1683033431.1\n",
    f"{TELEMETRY}/reset_counters": "",
    "class/cxi/cxi1/device/telemetry/hni_llr_tx_replay_event": "3@1.5\n",
}
PREFIX = "paceline_slingshot_"


def test_counters_of_a_list_without_their_time(context, sysfs, write, series):
    write(sysfs, NODE)
    assert series(SlingshotCollector(context).collect(1)) == {
        f"{PREFIX}received_bytes_total{{device=cxi0}}": float(72057594037927935),
        f"{PREFIX}transmitted_bytes_total{{device=cxi0}}": 4096,
        f"{PREFIX}counter_total{{counter=pct_sct_timeouts,device=cxi0}}": 7,
        f"{PREFIX}counter_total{{counter=hni_rx_paused_0,device=cxi0}}": 99,
        f"{PREFIX}counter_total{{counter=hni_llr_tx_replay_event,device=cxi1}}": 3,
    }


def test_a_nic_that_comes_later_is_found(context, sysfs, write, series):
    collector = SlingshotCollector(context)
    with pytest.raises(CollectorUnavailable, match="no Slingshot NIC"):
        collector.collect(0)
    write(sysfs, NODE)
    assert len(series(collector.collect(31 * 10**9))) == 5
