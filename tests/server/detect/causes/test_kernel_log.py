"""Messages of the kernel log as causes of a slow rank."""

from __future__ import annotations

import pytest
from measured_fleet import JOB, SECOND_NS, START_NS, Fleet

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.checks.kernel_log import EVENTS, KERNEL_LOG_CAUSES, MESSAGES
from paceline_wire.batch import Sample

NODE = "node-1"  # node of ranks 2 and 3, which compute on its gpu0 and gpu1
PROCESS_XIDS = "paceline_kernel_process_xids_total"
ONSET = 60.0


def written(
    fleet: Fleet, kind: str, code: str = "", device: str = "host", *, at: float = ONSET + 0.5,
    count: float = 1.0, node: str = NODE,
) -> None:  # fmt: skip
    labels = {"kind": kind, "code": code, "device": device}
    for second in range(8):
        time_ns = START_NS + round((at + second) * SECOND_NS)
        fleet.telemetry.add(node, Sample(EVENTS, labels, count, time_ns))


def fleet(seed: int = 1, **more: object) -> Fleet:
    found = Fleet(seed=seed, nodes=2, ports=1, **more)  # type: ignore[arg-type]
    found.play(ONSET + 8)
    return found


@pytest.mark.parametrize(
    ("kind", "code", "device", "finding", "cause"),
    [
        ("xid", "79", "gpu0", "hang", "GPU error (XID)"),
        ("pcie_aer", "uncorrected_fatal", "gpu0", "straggler", "PCIe errors"),
        ("pcie_aer", "uncorrected_nonfatal", "mlx5_0", "slow_link", "PCIe errors"),
        ("mlx5_health", "compromised", "mlx5_0", "hang", "NIC error"),
        ("mlx5_command_timeout", "create_mkey", "mlx5_0", "slow_link", "NIC error"),
        ("transmit_timeout", "", "eth0", "hang", "NIC error"),
        ("nic_command_timeout", "", "0000:21:00.0", "hang", "NIC error"),
        ("gpu_ring_timeout", "sdma0", "0000:c1:00.0", "hang", "GPU hung"),
        ("gpu_ecc", "uncorrected", "0000:c1:00.0", "hang", "uncorrectable ECC errors"),
        ("rdma_link_down", "", "mlx5_0", "slow_link", "link down"),
        ("sxid", "20034", "0000:c1:00.0", "slow_link", "NVLink errors"),
        ("nvme_timeout", "", "nvme0", "checkpoint_stall", "slow disk"),
        ("disk_error", "io", "nvme0n1", "slow_data", "slow disk"),
        ("nfs_not_responding", "", "storage-1", "checkpoint_stall", "blocked on I/O"),
        ("hung_task", "", "host", "hang", "blocked on I/O"),
        ("oom_kill", "host", "host", "slow_data", "memory pressure"),
        ("edac", "uncorrected", "DIMM_A1", "straggler", "host hardware errors"),
        ("soft_lockup", "", "cpu7", "hang", "kernel lockup"),
    ],
)
def test_kernel_log_messages_at_the_onset_name_the_cause(kind, code, device, finding, cause):
    nodes = fleet()
    written(nodes, kind, code, device)
    found = nodes.diagnose(kind=finding, slowdown=None)
    assert found.cause == cause, found.causes
    assert any(line.metric and NODE in line.text for line in found.evidence)


def test_old_messages_and_those_of_other_nodes_explain_nothing():
    nodes = fleet(seed=2)
    for key in MESSAGES:
        kind, _, code = key.partition("/")
        written(nodes, kind, code, at=20.0)
        written(nodes, kind, code, node="node-0")
    for finding in ("straggler", "hang", "slow_link", "slow_data", "checkpoint_stall"):
        found = nodes.diagnose(kind=finding, slowdown=None)
        assert found.cause == UNKNOWN, finding
        assert not [each for each in found.evidence if each.metric == EVENTS]


def test_errors_of_another_ranks_gpu_explain_nothing():
    nodes = fleet(seed=3)
    written(nodes, "xid", "48", "gpu1")
    written(nodes, "pcie_aer", "uncorrected_fatal", "gpu1")
    assert nodes.diagnose(2, kind="hang", slowdown=None).cause == UNKNOWN
    assert nodes.diagnose(3, kind="hang", slowdown=None).cause == "GPU error (XID)"


def test_a_few_corrected_errors_are_no_cause_but_a_burst_is():
    nodes = fleet(seed=4)
    written(nodes, "pcie_aer", "corrected", "gpu0", count=3.0)
    assert nodes.diagnose(slowdown=None).cause == UNKNOWN
    nodes = fleet(seed=4)
    written(nodes, "pcie_aer", "corrected", "gpu0", count=400.0)
    assert nodes.diagnose(slowdown=None).cause == "PCIe errors"


def test_an_xid_from_nvml_and_the_log_is_shown_once_with_the_agents_meaning():
    nodes = fleet(seed=5)
    written(nodes, "xid", "119", "gpu0")
    meaning = {"xid": "119", "meaning": "timeout of a call to the GPU's system processor (GSP)"}
    both = Sample("paceline_kernel_xid_info", meaning, 1.0, START_NS)
    nodes.telemetry.add(NODE, both)
    for second in range(5):
        time_ns = START_NS + round((ONSET + 1 + second) * SECOND_NS)
        labels = {"gpu": "0", "xid": "119"}
        nodes.telemetry.add(NODE, Sample("DCGM_EXP_XID_ERRORS_COUNT", labels, 1.0, time_ns))
    found = nodes.diagnose(kind="hang", slowdown=None)
    [line] = [each for each in found.evidence if "XID" in each.text]
    assert "XID 119 (timeout of a call to the GPU's system processor (GSP))" in line.text


def test_an_xid_is_read_from_the_log_if_nvml_reports_none():
    nodes = fleet(seed=6, absent={"paceline_gpu_lost"})
    assert "XID" in nodes.diagnose(kind="hang", slowdown=None).ruled_out
    written(nodes, "xid", "31", "gpu0")
    assert nodes.diagnose(kind="hang", slowdown=None).cause == "GPU error (XID)"


def test_a_log_without_messages_rules_causes_out_only_if_it_is_read():
    found = fleet(seed=7).diagnose(kind="hang", slowdown=None)
    assert {"NIC", "PCIe errors", "host hardware", "kernel"} <= set(found.ruled_out)
    silent = [line for line in found.counter_evidence if "kernel log" in line.text]
    assert len(silent) == 1
    unread = fleet(seed=7, absent={"paceline_kernel_log_lost_total"})
    found = unread.diagnose(kind="hang", slowdown=None)
    assert {"NIC", "PCIe errors", "host hardware", "kernel"} <= set(found.not_measured)


def test_messages_that_a_starting_agent_finds_are_old():
    nodes = Fleet(seed=8)
    for node, sample in nodes.samples(ONSET + 12):
        if sample.time_ns >= START_NS + (ONSET - 1) * SECOND_NS:
            nodes.telemetry.add(node, sample)
    written(nodes, "mlx5_health", "compromised", "mlx5_0", at=ONSET)
    assert nodes.diagnose(kind="hang", slowdown=None).cause == UNKNOWN


def test_the_causes_that_only_the_kernel_log_reports_are_listed():
    assert set(KERNEL_LOG_CAUSES) == {
        "PCIe errors", "NIC error", "host hardware errors", "kernel lockup",
    }  # fmt: skip


def test_the_last_counter_evidence_of_an_unknown_cause_is_what_was_not_measured():
    nodes = fleet(seed=9, absent={"paceline_gpu_lost", "paceline_kernel_log_lost_total"})
    last = nodes.diagnose(kind="hang", slowdown=None).counter_evidence[-1]
    assert last.text.startswith("not measured: XID, ")
    assert "lost GPU" in last.text
    nodes.generation.gpus.clear()
    text = nodes.diagnose(kind="hang", slowdown=None).counter_evidence[-1].text
    assert "XID" not in text
    assert "I/O wait of the process" in text


def test_a_known_cause_lists_nothing_as_not_measured():
    nodes = fleet(seed=10, absent={"paceline_gpu_pcie_width"})
    written(nodes, "xid", "79", "gpu0")
    found = nodes.diagnose(kind="hang", slowdown=None)
    assert not [each for each in found.counter_evidence if "not measured" in each.text]


def of_process(fleet: Fleet, code: str, job: str | None = None, rank: int | None = None) -> None:
    """Add an XID of gpu0 that names a process: a rank's, or one that is no rank."""
    written(fleet, "xid", code, "gpu0")
    owner = {} if job is None else {"owner": f"{job}/{rank}"}
    for second in range(8):
        time_ns = START_NS + round((ONSET + 0.5 + second) * SECOND_NS)
        labels = {"code": code, "device": "gpu0", **owner}
        fleet.telemetry.add(NODE, Sample(PROCESS_XIDS, labels, 1.0, time_ns))
        nvml = {"gpu": "0", "xid": code}
        fleet.telemetry.add(NODE, Sample("DCGM_EXP_XID_ERRORS_COUNT", nvml, 1.0, time_ns))


@pytest.mark.parametrize("owner", [(None, None), ("another-job", 2), (JOB, 3)])
@pytest.mark.parametrize("code", ["13", "31", "43", "45"])
def test_an_xid_of_another_processs_kernels_explains_nothing(code, owner):
    """Six jobs shared an H200; the XID 43 of one was evidence for the hangs of two others."""
    nodes = fleet(seed=8)
    of_process(nodes, code, *owner)
    found = nodes.diagnose(2, kind="hang", slowdown=None)
    assert found.cause == UNKNOWN
    assert not [line for line in found.evidence if "XID" in line.text]


def test_an_xid_of_the_rank_itself_and_one_of_no_known_process_explain_its_hang():
    for owner in ((JOB, 2), None):
        nodes = fleet(seed=8)
        if owner is None:
            written(nodes, "xid", "43", "gpu0")
        else:
            of_process(nodes, "43", *owner)
        assert nodes.diagnose(2, kind="hang", slowdown=None).cause == "GPU error (XID)"


def test_a_fault_of_the_gpu_explains_the_hang_of_every_process_on_it():
    nodes = fleet(seed=8)
    of_process(nodes, "94", None)
    assert nodes.diagnose(2, kind="hang", slowdown=None).cause == "GPU error (XID)"
