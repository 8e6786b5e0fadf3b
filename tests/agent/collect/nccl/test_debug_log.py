from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from paceline_agent.collect.nccl.debug_log import DebugLog, transport_of

LOG = Path(__file__).parents[2] / "fixtures" / "nccl" / "debug.log"


def test_golden_log():
    log = DebugLog()
    for line in LOG.read_text().splitlines():
        log.add(line)
    assert log.version == "2.21.5"
    assert log.network == "IB"
    assert log.devices == ("mlx5_0", "mlx5_1")
    assert log.graphs == {"ring", "tree"}
    assert log.connections == Counter(
        {"NET/IB/GDRDMA": 2, "P2P/CUMEM": 2, "SHM": 1, "NET/Socket": 1}
    )
    assert log.algorithms == Counter(
        {("AllReduce", "ring", "simple"): 2, ("AllGather", "nvls", "ll128"): 1}
    )
    assert log.warnings == 1
    assert log.news[0].startswith("NET/IB : Got completion from peer")


@pytest.mark.parametrize(
    "line",
    [
        "NCCL " + "1" * 30_000,  # took time that grows with the square of the length
        "NCCL INFO AllReduce: 1 Bytes -> Algo " + "9" * 5000 + " proto 1",  # more than int() takes
        "NCCL INFO " + "A" * 1000 + ": 1 Bytes -> Algo 1 proto 1",
    ],
)
def test_a_line_of_a_script_costs_no_time_and_becomes_no_long_label(line: str):
    log = DebugLog()
    began = time.process_time()
    log.add(line)
    assert time.process_time() - began < 0.2
    assert all(len(text) <= 40 for chosen in log.algorithms for text in chosen)


def test_the_ports_of_a_card_that_are_used_as_one():
    log = DebugLog()
    log.add(
        "n1:1884:2298 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE} "
        "[1]={[2] mlx5_0:1/RoCE, [3] mlx5_1:1/RoCE} [RO]; OOB bond0.526:10.1.1.9<0>"
    )
    assert log.devices == ("mlx5_2", "mlx5_3", "mlx5_0", "mlx5_1")


def test_symmetric_kernels_are_a_choice_of_their_own():
    log = DebugLog()
    log.add(
        "n1:1:2 [0] NCCL INFO AllReduce [Symmetric]: 1024 Bytes -> Kernel AllReduce_RSxLD_AGxST "
        "nchannels 8 nthreads 512 nWorks 1"
    )
    assert log.algorithms == Counter({("AllReduce", "symmetric", "rsxld_agxst"): 1})


@pytest.mark.parametrize(
    ("via", "transport"),
    [
        ("P2P/IPC", "P2P/IPC"),
        ("P2P/direct pointer", "P2P/direct pointer"),
        ("P2P/CUMEM/read", "P2P/CUMEM"),
        ("SHM", "SHM"),
        ("SHM/direct/direct", "SHM"),
        ("NET/Socket/0", "NET/Socket"),
        ("NET/IB/0", "NET/IB"),
        ("NET/IB/0(8)/GDRDMA", "NET/IB/GDRDMA"),
        ("NET/IB/0/GDRDMA(PCI)/Shared", "NET/IB/GDRDMA"),
        ("NET/AWS Libfabric/0/GDRDMA", "NET/AWS Libfabric/GDRDMA"),
        ("COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP"),
    ],
)
def test_transports(via, transport):
    assert transport_of(via) == transport


def test_what_is_kept_is_bounded():
    log = DebugLog()
    for number in range(100):
        log.add(f"NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/Plugin{chr(65 + number)}/0")
        log.add(f"NCCL WARN {number}")
    assert len(log.connections) == 32
    assert len(log.news) <= 9
    assert (log.warnings, log.news[-1]) == (100, "99")
