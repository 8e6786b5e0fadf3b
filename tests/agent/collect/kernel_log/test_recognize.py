"""Single messages as real drivers write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_agent.collect.kernel_log import parse
from paceline_agent.collect.kernel_log.recognize import KernelEvent, Recognizer, pci_address
from paceline_agent.collect.kernel_log.rules import OFF_BUS, RULES
from paceline_agent.collect.kernel_log.xids import CATALOG, explain


def recognize(*messages: str) -> list[KernelEvent]:
    recognizer = Recognizer()
    return [event for each in messages if (event := recognizer.recognize(each)) is not None]


def short(*messages: str) -> list[tuple[str, str, str, str]]:
    return [(e.kind, e.code, e.device, e.severity) for e in recognize(*messages)]


@pytest.mark.parametrize(
    ("message", "code", "device", "pid", "process"),
    [
        (
            "NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s",
            "119", "0000:9b:00.0", 2024380, "nvidia-smi",
        ),
        (
            "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off "
            "the bus.", "79", "0000:05:00.0", None, None,
        ),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "14", "0000:03:00.0", None, None),
        ("NVRM: Xid (PCI:0000:01:00): 48", "48", "0000:01:00.0", None, None),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 13, pid=7, name=python3, Graphics Exception",
            "13", "0000:01:00.0", 7, "python3",
        ),
        (
            "NVRM: Xid (PCI:0002:00:00): 94, pid=1582259, name=nvc:[driver], Contained: CE User "
            "Channel (0x9). RST: No, D-RST: No", "94", "0002:00:00.0", 1582259, "nvc:[driver]",
        ),
        (
            "NVRM: Xid (PCI:0000:65:00): 74, pid=<n/a>, name=<unknown>, NVLink: fatal error on 2",
            "74", "0000:65:00.0", None, None,
        ),
        ("NVRM: Xid (PCI:0009:01:00): 45, pid=5", "45", "0009:01:00.0", 5, None),
        ("NVRM: Xid (PCI:0000:9B:00): 777, new", "777", "0000:9b:00.0", None, None),
    ],
)  # fmt: skip
def test_xids(message, code, device, pid, process):
    (event,) = recognize(message)
    assert (event.kind, event.code, event.device) == ("xid", code, device)
    assert (event.pid, event.process) == (pid, process)


def test_an_xid_says_what_it_means_and_what_to_do():
    (event,) = recognize("NVRM: Xid (PCI:0000:9b:00): 95, pid=12, name=python, Uncontained: LTC")
    assert event.severity == "critical"
    assert event.detail == (
        "XID 95: uncontained memory error; RESET_GPU: drain the node and reset the GPU; replace "
        "it if that recurs; pid 12 (python); Uncontained: LTC"
    )


def test_an_unknown_xid_says_so():
    (event,) = recognize("NVRM: Xid (PCI:0000:9b:00): 777, something new")
    assert "XID 777: unknown to this version" in event.detail


def test_a_recovery_action_is_taken_from_the_message():
    (event,) = recognize(
        "NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to "
        "0x2 (Node Reboot Required)"
    )
    assert event.severity == "critical"
    assert "recovery action: Node Reboot Required" in event.detail
    (event,) = recognize(
        "NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x2 (X) to 0x0 (None)"
    )
    assert event.severity == "info"


def test_nvlink5_errors_say_whether_they_are_fatal():
    fatal, nonfatal = recognize(
        "NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x0)",
        "NVRM: Xid (PCI:0008:01:00): 145, RLW_REMAP Nonfatal XC1 i0 Link -1 (0x00000004 0x80)",
    )
    assert (fatal.severity, nonfatal.severity) == ("critical", "warning")


@pytest.mark.parametrize(
    "message",
    [
        "nvidia-smi: NVRM: Xid (PCI:0000:9b:00): 79, quoted by a program",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
        "NVRM: GPU4 GSP RPC buffer contains function 103 (GSP_RM_ALLOC) and data 0x2081 0x4.",
        "NVRM:      0    4115 NVLINK_INBAND_RECEIVE 0x0000000000000000 0x0000000000000000",
        "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
        "nvidia-nvswitch2: open (major=510)",
        "NVRM: The NVIDIA probe routine was not called for 1 device(s).",
        "nvidia-nvlink: Nvlink Core is being initialized, major device number 511",
        "perf: interrupt took too long (2509 > 2500), lowering kernel.perf_event_max_sample_rate",
        "CPU: 17 PID: 2024380 Comm: nvidia-smi Tainted: P           OE     5.15.0-112-generic",
        "mce: CPU1: Core temperature/speed normal",
        "pcieport 0000:00:1d.0: AER: Corrected error received: 0000:02:00.0",
        "mlx5_core 0000:01:00.0: 126.016 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe "
        "x16 link at 0000:00:01.0 (capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)",
        "mlx5_core b1f5:00:02.0: 0.000 Gb/s available PCIe bandwidth, limited by Unknown x0 link "
        "at b1f5:00:02.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
        "pci 0000:01:00.0: 2.000 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x1 link "
        "at 0000:00:01.0 (capable of 31.504 Gb/s with 8.0 GT/s PCIe x4 link)",
        "nvme 0000:02:00.0:   device [15b7:5006] error status/mask=00000001/0000e000",
        "nvidia 0000:1b:00.0: not ready 1023ms after bus reset; waiting",
        "pcieport 0015:00:00.0: pciehp: Slot(21): Link Down/Up ignored",
        "pcieport 0015:00:00.0: pciehp: Slot(21): Link Down/Up ignored (recovered by DPC)",
        "mlx5_core 0000:5c:00.0: wait_func_handle_exec_timeout:1113:(pid 3122): cmd[0]: "
        "CREATE_CQ(0x400) recovered after timeout",
        "mlx5_core 0000:5c:00.0 eth2: Link up",
        "mlx5_core 0000:5c:00.0: mlx5_cmd_out_err:8:(pid 1): ACCESS_REG(0x805) op_mod(0x1) failed, "
        "status bad parameter(0x3), syndrome (0x1b0c), err(-22)",
        "mlx5_core 0000:5c:00.0: Port module event: module 0, Cable plugged",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
        "EXT4-fs (sda1): re-mounted. Opts: errors=remount-ro",
        "XFS (nvme1n1): Mounting V5 Filesystem",
        "nfs: server 10.0.0.1 OK",
        "critical target error, dev nvme0n1, sector 0 op 0x9:(WRITE_ZEROES) flags 0x8 phys_seg 0",
        "bnxt_en 0000:18:00.0 ens1f0np0: Solicited firmware reset event, data1: 0x1, data2: 0x0",
        "cxi_core 0000:41:00.0: cxi0[hsn0]: C_EC_CRIT: C_PI_IPD_EXT error: pri_rbyp_abort (44)",
        "cxi_core 0000:41:00.0: cxi0[hsn0]: C_EC_BADCON_S: C_RMU error: ptl_invld_vni (49)",
        "hfi1 0000:05:00.0: hfi1_0: set_link_state: current INIT, new ARMED ",
        "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1",
        "Buffer I/O error on dev sr0, logical block 0, async page read",
        "BTRFS warning (device sda1): excessive commit interval 600",
        "arm-smmu-v3 arm-smmu-v3.0.auto: ias 48-bit, oas 48-bit (features 0x001e1fff)",
        "amdgpu 0000:c1:00.0: amdgpu: socket: 4, die: 0 1 uncorrectable hardware errors detected "
        "in total in gfx block",
        "amdgpu 0000:c1:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
        "amdgpu 0000:c1:00.0: amdgpu: ring gfx_0.0.0 timeout, but soft recovered",
        "amdgpu 0000:c1:00.0: amdgpu: GPU reset(1) succeeded!",
        "LustreError: 137-5: nas-MDT0000_UUID: not available for connect from 10.0.0.9@tcp (no "
        "target). If you are running an HA pair check that the target is mounted on the other.",
        "LustreError: 11-0: fs-MDT0000-mdc-ffff: operation mds_connect to node 10@tcp failed: rc = "
        "-16",
        "LustreError: 11-0: fs-MDT0000-mdc-ffff: operation obd_ping to node 10@tcp failed: rc = "
        "-107",
        "LustreError: 15c-8: MGC10.0.0.1@tcp: Configuration from log fs-client failed from MGS -5",
        "LustreError: 12:0:(client.c:1234:ptlrpc_expire()) Skipped 24 previous similar messages",
        "oom_reaper: reaped process 4242 (python), now anon-rss:0kB, file-rss:0kB",
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
    ],
)
def test_no_news(message):
    assert recognize(message) == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("NVRM: GPU 0000:9b:00.0: RmInitAdapter failed! (0x23:0x65:1401)",
         ("gpu_init_failed", "", "0000:9b:00.0", "critical")),
        ("NVRM: RmInitAdapter failed! (0x31:0x40:2490)",
         ("gpu_init_failed", "", "host", "critical")),
        ("NVRM: The NVIDIA probe routine failed for 1 device(s).",
         ("gpu_init_failed", "probe", "host", "critical")),
        ("nvidia: probe of 0000:05:00.0 failed with error -1",
         ("gpu_init_failed", "probe", "0000:05:00.0", "critical")),
        ("nvidia 0000:3c:00.0: probe with driver nvidia failed with error -1",
         ("gpu_init_failed", "probe", "0000:3c:00.0", "critical")),
        ("mlx5_core 0000:41:00.0: init_one:1371:(pid 803): mlx5_load_one failed with error code "
         "-22", ("mlx5_health", "not_initialized", "0000:41:00.0", "critical")),
        ("bnxt_en 0000:18:00.0: probe with driver bnxt_en failed with error -110",
         ("nic_init_failed", "", "0000:18:00.0", "critical")),
        ("efa: probe of 0000:00:1d.0 failed with error -62",
         ("nic_init_failed", "", "0000:00:1d.0", "critical")),
        ("NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os "
         "reboot to recover.", ("gpu_reboot_required", "", "host", "critical")),
        ("NVRM: API mismatch: the client has the version 550.54.15, but",
         ("driver_mismatch", "", "host", "critical")),
        ("NVRM: knvlinkTrainP2pLinks: NVLink training failed",
         ("nvlink_error", "", "host", "warning")),
        ("NVRM: GPU 0000:65:00.0: NVLink link 2 disabled due to error",
         ("nvlink_error", "", "0000:65:00.0", "warning")),
        ("NVRM: GPU3 NVLink 4 degraded", ("nvlink_error", "", "gpu3", "warning")),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12020, Fatal, Link 46 egress sequence ID err",
         ("sxid", "12020", "0000:c1:00.0", "critical")),
        ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted "
         "PRIV error (First)", ("sxid", "12028", "0000:05:00.0", "warning")),
        ("nvme 0000:02:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver)",
         ("pcie_aer", "corrected", "0000:02:00.0", "info")),
        ("nvidia 0000:83:00.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer",
         ("pcie_aer", "corrected", "0000:83:00.0", "info")),
        ("mlx5_core 0000:5c:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), "
         "type=Transaction Layer, (Requester ID)",
         ("pcie_aer", "uncorrected_nonfatal", "0000:5c:00.0", "warning")),
        ("pcieport 0000:97:01.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Trans",
         ("pcie_aer", "uncorrected_fatal", "0000:97:01.0", "critical")),
        ("nvidia 0000:01:00.0: AER: can't recover (no error_detected callback)",
         ("pcie_aer", "not_recovered", "0000:01:00.0", "critical")),
        ("pcieport 0000:00:1c.5: AER: can't find device of ID00e5",
         ("pcie_aer", "unknown_source", "0000:00:1c.5", "warning")),
        ("pcieport 0000:96:01.0: pciehp: Slot(2): Link Down",
         ("pcie_link_down", "", "0000:96:01.0", "critical")),
        ("pcieport 10000:e0:06.0: DPC: containment event, status:0x1f01 source:0x0000",
         ("pcie_link_down", "contained", "10000:e0:06.0", "critical")),
        ("nvidia 0000:04:00.0: Unable to change power state from D3cold to D0, device inaccessible",
         ("pcie_link_down", "inaccessible", "0000:04:00.0", "critical")),
        ("nvidia 0000:1b:00.0: not ready 65535ms after bus reset; giving up",
         ("pcie_link_down", "inaccessible", "0000:1b:00.0", "critical")),
        ("pci 0000:9b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x4 "
         "link at 0000:97:00.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)",
         ("pcie_bandwidth_limited", "", "0000:9b:00.0", "warning")),
        ("DMAR: [DMA Write NO_PASID] Request device [9b:00.0] fault addr 0x0 [fault reason 0x05]",
         ("iommu_fault", "", "0000:9b:00.0", "warning")),
        ("AMD-Vi: Event logged [IO_PAGE_FAULT device=c1:00.0 domain=0x0036 address=0x1]",
         ("iommu_fault", "", "0000:c1:00.0", "warning")),
        ("arm-smmu-v3 arm-smmu-v3.3.auto: event 0x10 received:",
         ("iommu_fault", "", "arm-smmu-v3.3.auto", "warning")),
        ("arm-smmu-v3 arm-smmu-v3.1.auto: CMD_SYNC timeout at 0x00017d73 [hwprod 0x1, hwcons 0x0]",
         ("iommu_fault", "timeout", "arm-smmu-v3.1.auto", "critical")),
        ("AMD-Vi: Completion-Wait loop timed out", ("iommu_fault", "timeout", "host", "critical")),
        ("DMAR: VT-d detected Invalidation Time-out Error: SID ffff",
         ("iommu_fault", "timeout", "host", "critical")),
        ("arm-smmu 15000000.iommu: Unhandled context fault: fsr=0x402, iova=0xd65504710, "
         "fsynr=0x100011, cbfrsynra=0x0, cb=6",
         ("iommu_fault", "", "15000000.iommu", "warning")),
        ("mce: [Hardware Error]: Machine check events logged",
         ("machine_check", "logged", "host", "info")),
        ("mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: 8c00004000010091",
         ("machine_check", "corrected", "bank7", "info")),
        ("mce: [Hardware Error]: CPU 17: Machine Check Exception: 5 Bank 1: bd80000000100134",
         ("machine_check", "uncorrected", "bank1", "critical")),
        ("EDAC MC1: 1 UE memory scrubbing error on CPU_SrcID#1_MC#0_Chan#0_DIMM#1 (channel:0)",
         ("edac", "uncorrected", "CPU_SrcID#1_MC#0_Chan#0_DIMM#1", "critical")),
        ("EDAC MC0: 1 CE on mc#0csrow#1channel#0 (csrow:1 channel:0 page:0x0)",
         ("edac", "corrected", "mc#0csrow#1channel#0", "info")),
        ("EDAC MC3: 1 UE Cannot decode normalized address on any memory (page:0x0 offset:0x0)",
         ("edac", "uncorrected", "MC3", "critical")),
        ("EDAC MC0: 1 CE Single-bit ECC on unknown memory (page:0x0 offset:0x0)",
         ("edac", "corrected", "MC0", "info")),
        ("{1}[Hardware Error]: event severity: fatal",
         ("hardware_error", "uncorrected", "host", "critical")),
        ("Memory failure: 0x1234: Killing python:4242 due to hardware memory corruption",
         ("memory_failure", "killed", "host", "critical")),
        ("MCE 0x1234: Killing python:4242 early due to hardware memory corruption",
         ("memory_failure", "killed", "host", "critical")),
        ("MCE: Killing python:4242 due to hardware memory corruption fault at 7f4c3a000000",
         ("memory_failure", "killed", "host", "critical")),
        ("Memory failure: 0x1234: Sending SIGBUS to python:4242 due to hardware memory corruption",
         ("memory_failure", "killed", "host", "critical")),
        ("INFO: task kworker/13:2:4055883 blocked for more than 120 seconds.",
         ("hung_task", "", "host", "warning")),
        ("INFO: task nvidia-smi:4445 blocked in I/O wait for more than 122 seconds.",
         ("hung_task", "", "host", "warning")),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:1234]",
         ("soft_lockup", "", "cpu12", "critical")),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3",
         ("hard_lockup", "", "cpu3", "critical")),
        ("BUG: workqueue lockup - pool cpus=8 node=0 flags=0x0 nice=0 stuck for 46s!",
         ("workqueue_lockup", "", "host", "warning")),
        ("rcu: INFO: rcu_sched self-detected stall on CPU", ("rcu_stall", "", "host", "warning")),
        ("mce: CPU12: Core temperature above threshold, cpu clock throttled (total events = 1)",
         ("thermal_throttle", "core", "host", "warning")),
        ("CPU3: Package temperature above threshold, cpu clock throttled (total events = 9)",
         ("thermal_throttle", "package", "host", "warning")),
        ("CPU7: Core temperature is above threshold, cpu clock is throttled (total events = 219)",
         ("thermal_throttle", "core", "host", "warning")),
        ("mlx5_core 0000:0d:00.0: poll_health:801:(pid 0): device's health compromised - reached "
         "miss count", ("mlx5_health", "compromised", "0000:0d:00.0", "critical")),
        ("mlx5_core 0000:0d:00.0: print_health_info:431:(pid 0): Health issue observed, firmware "
         "internal error, severity(3) ERROR:",
         ("mlx5_health", "firmware_internal_error", "0000:0d:00.0", "critical")),
        ("mlx5_core 0000:0d:00.0: print_health_info:431:(pid 0): Health issue observed, High "
         "temperature, severity(4) WARNING:",
         ("mlx5_health", "high_temperature", "0000:0d:00.0", "warning")),
        ("mlx5_core 0000:0d:00.0: poll_health:800:(pid 0): Fatal error 3 detected",
         ("mlx5_health", "fatal_error", "0000:0d:00.0", "critical")),
        ("mlx5_core 0000:0d:00.0: probe_one:1771:(pid 9): mlx5_init_one failed with error code -11",
         ("mlx5_health", "not_initialized", "0000:0d:00.0", "critical")),
        ("mlx5_core 0000:06:00.0: wait_func_handle_exec_timeout:1128:(pid 185911): cmd[-22]: "
         "CREATE_UCTX(0xa04) No done completion",
         ("mlx5_command_timeout", "create_uctx", "0000:06:00.0", "critical")),
        ("mlx5_core 0000:06:00.0: wait_func:1008:(pid 12): ACCESS_REG(0x805) timeout. Will cause "
         "a leak of a command resource",
         ("mlx5_command_timeout", "access_reg", "0000:06:00.0", "critical")),
        ("mlx5_core 0000:41:04.2: mlx5_cmd_out_err:782:(pid 8321): CREATE_GENERAL_OBJECT(0xa00) "
         "op_mod(0xd) failed, status bad parameter(0x3), syndrome (0x5fa1c), err(-22)",
         ("mlx5_command_error", "create_general_object", "0000:41:04.2", "warning")),
        ("mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 268269): Detected insufficient power on "
         "the PCIe slot (27W).", ("mlx5_power", "", "0000:5c:00.0", "warning")),
        ("mlx5_core 0000:5c:00.0: temp_warn_event:149:(pid 0): High temperature on sensors with "
         "bit set 0 1", ("mlx5_temperature", "", "0000:5c:00.0", "warning")),
        ("mlx5_core 0000:5c:00.0: Port module event: module 0, Cable unplugged",
         ("mlx5_module", "cable_unplugged", "0000:5c:00.0", "warning")),
        ("mlx5_core 0000:08:00.0: cq_err_event_notifier:529:(pid 9422): CQ error on CQN 0x406, "
         "syndrome 0x1", ("mlx5_cq_error", "", "0000:08:00.0", "warning")),
        ("mlx5_core 0000:08:00.0 eth2: Error cqe on cqn 0x548, ci 0x2022, qn 0x8f4, opcode 0xd, "
         "syndrome 0x2, vendor syndrome 0x68", ("mlx5_cq_error", "", "eth2", "warning")),
        ("mlx5_core 0000:5c:00.0 eth2: Link down", ("nic_link_down", "", "eth2", "warning")),
        ("gve 0000:00:05.0 eth1: Device link is down.",
         ("nic_link_down", "", "eth1", "warning")),
        ("bnxt_en 0000:01:00.0 ens1f0np0: NIC Link is Down",
         ("nic_link_down", "", "ens1f0np0", "warning")),
        ("igb 0000:07:00.0 eno1: igb: eno1 NIC Link is Down",
         ("nic_link_down", "", "eno1", "warning")),
        ("tg3 0000:04:00.0 eth0: Link is down", ("nic_link_down", "", "eth0", "warning")),
        ("bond0: (slave eth1): link status definitely down, disabling slave",
         ("nic_link_down", "", "eth1", "warning")),
        ("bonding: bond0: link status definitely down for interface eth1, disabling it",
         ("nic_link_down", "", "eth1", "warning")),
        ("mlx4_0: Port: 1 Link DOWN", ("rdma_link_down", "", "mlx4_0", "critical")),
        ("infiniband mlx5_3: Port: 1 Link DOWN", ("rdma_link_down", "", "mlx5_3", "critical")),
        ("mlx5_core 0000:08:00.0 rdmap8s0f0: Port: 2 Link DOWN",
         ("rdma_link_down", "", "rdmap8s0f0", "critical")),
        ("bnxt_en 0000:18:00.0 ens1f0np0: TX timeout detected, starting reset task!",
         ("transmit_timeout", "", "ens1f0np0", "critical")),
        ("NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out",
         ("transmit_timeout", "", "eth0", "critical")),
        ("ice 0000:b1:00.0 ens801f0np0: NETDEV WATCHDOG: CPU: 38: transmit queue 1 timed out 80 ms",
         ("transmit_timeout", "", "ens801f0np0", "critical")),
        ("EXT4-fs error (device nvme0n1p1): ext4_lookup:1855: inode #2: comm ls: iget: checksum",
         ("filesystem_error", "ext4", "nvme0n1p1", "critical")),
        ("EXT4-fs (sda1): Remounting filesystem read-only",
         ("filesystem_read_only", "", "sda1", "critical")),
        ("EXT4-fs (sdd1): This should not happen!! Data will be lost",
         ("filesystem_error", "ext4", "sdd1", "critical")),
        ("EXT4-fs (dm-0): failed to convert unwritten extents to written extents -- potential data "
         "loss!  (inode 131, error -30)", ("filesystem_error", "ext4", "dm-0", "critical")),
        ("block nvme0n1: no usable path - requeuing I/O",
         ("nvme_down", "no_path", "nvme0n1", "critical")),
        ("block nvme0n1: no available path - failing I/O",
         ("nvme_down", "no_path", "nvme0n1", "critical")),
        ("python3: attempt to access beyond end of device",
         ("disk_error", "beyond_end", "host", "warning")),
        ("attempt to access beyond end of device", ("disk_error", "beyond_end", "host", "warning")),
        ("XFS (nvme1n1): Metadata corruption detected at xfs_agi_verify+0x1d/0x180",
         ("filesystem_error", "xfs", "nvme1n1", "critical")),
        ("XFS (sda1): Metadata CRC error detected at xfs_agi_read_verify+0xd0/0xf0 [xfs], xfs_agi",
         ("filesystem_error", "xfs", "sda1", "critical")),
        ("XFS (dm-3): log I/O error -5", ("filesystem_error", "xfs", "dm-3", "critical")),
        ("XFS (dm-3): Filesystem has been shut down due to log error (0x2).",
         ("filesystem_error", "xfs", "dm-3", "critical")),
        ("BTRFS error (device sda2): bdev /dev/sda2 errs: wr 0, rd 1",
         ("filesystem_error", "btrfs", "sda2", "critical")),
        ("BTRFS error (device sda2 state EA): bdev /dev/sda2 errs: wr 1, rd 0",
         ("filesystem_error", "btrfs", "sda2", "critical")),
        ("BTRFS warning (device dm-1): csum failed root 5 ino 257 off 0 csum 0x1 expected csum 0x2",
         ("filesystem_error", "btrfs", "dm-1", "critical")),
        ("BTRFS info (device sda2: state E): forced readonly",
         ("filesystem_read_only", "", "sda2", "critical")),
        ("GPFS Deadman Switch timer has expired, and there are still outstanding I/O requests",
         ("filesystem_error", "gpfs", "host", "critical")),
        ("nfs: server 10.0.0.1 not responding, still trying",
         ("nfs_not_responding", "", "10.0.0.1", "warning")),
        ("I/O error, dev nvme0n1, sector 123 op 0x0:(READ) flags 0x80700 phys_seg 1",
         ("disk_error", "io", "nvme0n1", "critical")),
        ("blk_update_request: critical medium error, dev sda, sector 99 op 0x0:(READ)",
         ("disk_error", "medium", "sda", "critical")),
        ("critical space allocation error, dev dm-3, sector 99 op 0x1:(WRITE) flags 0x8800",
         ("disk_error", "space_allocation", "dm-3", "critical")),
        ("Buffer I/O error on dev sda1, logical block 5, async page read",
         ("disk_error", "buffer", "sda1", "warning")),
        ("Buffer I/O error on dev dm-0, logical block 1, async page read",
         ("disk_error", "buffer", "dm-0", "warning")),
        ("nvme nvme0: I/O 123 QID 4 timeout, aborting",
         ("nvme_timeout", "", "nvme0", "warning")),
        ("nvme nvme2: I/O tag 12 (0xc00c) opcode 0x2 (Read) QID 3 timeout, aborting req_op:READ(0)",
         ("nvme_timeout", "", "nvme2", "warning")),
        ("nvme nvme0: queue 7: timeout request 0x11 type 4",
         ("nvme_timeout", "", "nvme0", "warning")),
        ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff",
         ("nvme_down", "", "nvme0", "critical")),
        ("nvme nvme0: resetting controller due to persistent internal error",
         ("nvme_down", "", "nvme0", "critical")),
        ("NVRM: krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7",
         ("gpu_locked", "", "host", "critical")),
        ("nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping",
         ("peermem_error", "", "host", "warning")),
        ("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!",
         ("gpu_reset", "", "0000:c1:00.0", "critical")),
        ("amdgpu 0000:c1:00.0: amdgpu: GPU reset(3) failed",
         ("gpu_reset", "failed", "0000:c1:00.0", "critical")),
        ("amdgpu 0000:c1:00.0: amdgpu: device lost from bus!",
         ("pcie_link_down", "inaccessible", "0000:c1:00.0", "critical")),
        ("amdgpu 0000:c1:00.0: amdgpu: 2 correctable hardware errors detected in umc block",
         ("gpu_ecc", "corrected", "0000:c1:00.0", "info")),
        ("amdgpu 0000:c1:00.0: {1}socket: 0, die: 4, 3 new deferred hardware errors detected in "
         "umc block", ("gpu_ecc", "deferred", "0000:c1:00.0", "warning")),
        ("amdgpu 0000:c1:00.0: amdgpu: socket: 0, die: 1, 1 new uncorrectable hardware errors "
         "detected in gfx block", ("gpu_ecc", "uncorrected", "0000:c1:00.0", "critical")),
        ("amdgpu 0000:15:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
         ("gpu_ecc", "uncorrected", "0000:15:00.0", "critical")),
        ("amdgpu 0000:c1:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:8 "
         "pasid:32770)", ("gpu_page_fault", "", "0000:c1:00.0", "warning")),
        ("amdgpu 0000:c4:00.0: ring comp_1.1.0 timeout, signaled seq=5131, emitted seq=5132",
         ("gpu_ring_timeout", "comp_1.1.0", "0000:c4:00.0", "critical")),
        ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=1, emitted",
         ("gpu_ring_timeout", "sdma0", "host", "critical")),
        ("[Hardware Error]: Corrected error, no action required.",
         ("machine_check", "corrected", "host", "info")),
        ("[Hardware Error]: Uncorrected, software restartable error.",
         ("machine_check", "uncorrected", "host", "critical")),
        ("python: page allocation failure: order:4, mode:0x40cc0(GFP_KERNEL|__GFP_COMP)",
         ("page_allocation_failure", "", "host", "warning")),
        ("clocksource: timekeeping watchdog on CPU1: Marking clocksource 'tsc' as unstable because",
         ("clock_unstable", "", "tsc", "warning")),
        ("nf_conntrack: nf_conntrack: table full, dropping packet",
         ("conntrack_full", "", "host", "warning")),
        ("neighbour: arp_cache: neighbor table overflow!",
         ("neighbor_table_full", "", "host", "warning")),
        ("TCP: out of memory -- consider tuning tcp_mem",
         ("tcp_memory_full", "", "host", "critical")),
        ("VFS: file-max limit 808960 reached", ("file_max_reached", "", "host", "critical")),
        ("cgroup: fork rejected by pids controller in /kubepods.slice/pod1",
         ("fork_rejected", "", "host", "critical")),
        ("JBD2: Detected IO errors while flushing file data on sda1-8",
         ("filesystem_error", "journal", "sda1-8", "critical")),
        ("md/raid1:md0: Disk failure on sdb1, disabling device.",
         ("disk_error", "raid", "md0", "critical")),
        ("Lustre: fs-OST0003-osc-ffff: Connection to fs-OST0003 (at 10.0.0.3@o2ib) was lost; in",
         ("lustre_connection_lost", "", "fs-OST0003", "warning")),
        ("LustreError: 11-0: fs-MDT0000-mdc: operation ldlm_enqueue to node 10@o2ib failed",
         ("filesystem_error", "lustre", "host", "warning")),
        ("LustreError: 166-1: MGC10.0.0.1@tcp: Connection to MGS (at 10.0.0.1@tcp) was lost; in "
         "progress operations using this service will fail",
         ("lustre_connection_lost", "", "MGS", "warning")),
        ("LustreError: 167-0: fs-OST0002-osc-ffff: This client was evicted by fs-OST0002; in "
         "progress operations using this service will fail.",
         ("filesystem_error", "lustre", "fs-OST0002", "critical")),
        ("LustreError: 1474:0:(lcommon_cl.c:147:cl_file_inode_init()) LBUG",
         ("filesystem_error", "lustre", "host", "critical")),
        ("Lustre: 12:0:(llite_lib.c:2762:ll_dirty_page_discard_warn()) fs: dirty page discard: "
         "10.0.0.1@tcp:/fs/fid: [0x2:0x1:0x0]/ may get corrupted (rc -108)",
         ("filesystem_error", "lustre", "host", "critical")),
        ("LNetError: 123:0:(o2iblnd_cb.c:3333:kiblnd_check_txs_locked()) Timed out tx: active_txs",
         ("filesystem_error", "lustre", "host", "warning")),
        ("libceph: osd3 (1)10.0.0.3:6801 socket closed (con state OPEN)",
         ("filesystem_error", "ceph", "osd3", "warning")),
        ("libceph (2a882841-48a3-11f1-838c-d00d99b60350 4181): mon0 (1)10.0.0.1:6789 session lost, "
         "hunting for new mon", ("filesystem_error", "ceph", "mon0", "warning")),
        ("ceph: [2a882841-48a3-11f1-838c-d00d99b60350 4181]: mds0 hung",
         ("filesystem_error", "ceph", "mds0", "warning")),
        ("ceph: mds0 rejected session", ("filesystem_error", "ceph", "mds0", "warning")),
        ("ena 0000:00:05.0 eth0: Keep alive watchdog timeout.",
         ("transmit_timeout", "", "0000:00:05.0", "critical")),
        ("bnxt_en 0000:18:00.0 ens1f0np0: Error (timeout: 5000015) msg {0xb4 0x13} len:0",
         ("nic_command_timeout", "", "ens1f0np0", "critical")),
        ("ice 0000:b1:00.0: Rebuild failed, unload and reload driver",
         ("nic_firmware_error", "rebuild_failed", "0000:b1:00.0", "critical")),
        ("bnxt_en 0000:18:00.0: cmdq[0x1f]=0x11 timedout (20000)msec",
         ("nic_command_timeout", "", "0000:18:00.0", "critical")),
        ("bnxt_en 0000:18:00.0: QPLIB: cmdq[0x41d]=0x3 timedout (20000)msec",
         ("nic_command_timeout", "", "0000:18:00.0", "critical")),
        ("bnxt_en 0000:12:00.0: QPLIB: bnxt_re_is_fw_stalled: FW STALL Detected. cmdq[0xe]=0x3 "
         "waited (103641 > 100000) msec active 1",
         ("nic_command_timeout", "", "0000:12:00.0", "critical")),
        ("efa 0000:00:1d.0 rdmap0s29: Wait for completion (polling) timeout",
         ("nic_command_timeout", "", "rdmap0s29", "critical")),
        ("infiniband rdmap16s27: Wait for completion (polling) timeout",
         ("nic_command_timeout", "", "rdmap16s27", "critical")),
        ("efa 0000:00:06.0: Wait for completion (polling) timeout",
         ("nic_command_timeout", "", "0000:00:06.0", "critical")),
        ("infiniband rdmap16s27: The device didn't send any completion for admin cmd CREATE_QP(6) "
         "status 0 (ctx 0x1)", ("nic_command_timeout", "", "rdmap16s27", "critical")),
        ("infiniband rdmap0s6: Admin queue is closed",
         ("nic_command_timeout", "queue_closed", "rdmap0s6", "critical")),
        ("efa 0000:00:06.0: Device isn't ready, can't reset device",
         ("nic_firmware_error", "reset_failed", "0000:00:06.0", "critical")),
        ("ena 0000:00:05.0 eth0: Reset indication didn't turn on",
         ("nic_firmware_error", "reset_failed", "eth0", "critical")),
        ("efa 0000:00:1d.0 rdmap0s29: The device didn't send any completion for admin cmd "
         "CREATE_QP(1) status 0", ("nic_command_timeout", "", "rdmap0s29", "critical")),
        ("bnxt_en 0000:18:00.0 ens1f0np0: Firmware fatal reset event, data1: 0x2, data2: 0x0, min",
         ("nic_firmware_error", "fatal", "ens1f0np0", "critical")),
        ("bnxt_en 0000:18:00.0 ens1f0np0: Fatal firmware reset event, data1: 0x2, data2: 0x0, min",
         ("nic_firmware_error", "fatal", "ens1f0np0", "critical")),
        ("cxi_core 0000:c3:00.0: cxi3[hsn3] CXI_EVENT_LINK_DOWN",
         ("rdma_link_down", "", "cxi3", "critical")),
        ("cxi_core 0000:c0:00.0: cxi2[hsn2]: C_EC_UNCOR_NS: C_IXE error: port_dfa_mismatch (37) "
         "(was first error at 1705904239:768794936)",
         ("cxi_error", "port_dfa_mismatch", "cxi2", "warning")),
        ("cxi_ss1 0000:11:00.0: cxi0[hsn0]: C_EC_CRIT: C_PCT_EXT error: tct_tbl_dealloc (18)",
         ("cxi_error", "tct_tbl_dealloc", "cxi0", "critical")),
        ("hfi1 0000:05:00.0: hfi1_0: set_link_state: current ACTIVE, new OFFLINE ",
         ("rdma_link_down", "", "hfi1_0", "critical")),
        ("mlx5_core 0000:18:00.0: mlx5_fw_fatal_reporter_err_work:642:(pid 1): Driver is in error"
         " state. Unloading", ("mlx5_health", "error_state", "0000:18:00.0", "critical")),
        ("mlx4_core 0000:04:00.0: Internal error detected:",
         ("mlx4_health", "internal_error", "0000:04:00.0", "critical")),
        ("cxgb4 0000:03:00.4 enp3s0f4: link down", ("nic_link_down", "", "enp3s0f4", "warning")),
        ("mlx4_en: eth2: Link Down", ("nic_link_down", "", "eth2", "warning")),
        ("BUG: kernel NULL pointer dereference, address: 0000000000000000",
         ("kernel_bug", "", "host", "critical")),
        ("Unable to handle kernel paging request at virtual address dead000000000108",
         ("kernel_bug", "", "host", "critical")),
        ("Internal error: Oops: 0000000096000004 [#1] SMP", ("kernel_bug", "", "host", "critical")),
        ("Internal error: synchronous external abort: 96000410 [#1] PREEMPT SMP",
         ("kernel_bug", "", "host", "critical")),
        ("BUG: Bad page state in process python3  pfn:103249",
         ("kernel_bug", "bad_page", "host", "critical")),
        ("general protection fault: 0000 [#1] SMP", ("kernel_bug", "", "host", "critical")),
        ("general protection fault, probably for non-canonical address 0xdead000000000108: 0000 "
         "[#1] PREEMPT SMP NOPTI", ("kernel_bug", "", "host", "critical")),
        ("Kernel panic - not syncing: Fatal machine check",
         ("kernel_bug", "", "host", "critical")),
    ],
)  # fmt: skip
def test_rules(message, expected):
    assert short(message) == [expected]


@pytest.mark.parametrize(
    ("message", "code", "process"),
    [
        ("Out of memory: Killed process 4242 (python3) total-vm:1kB, anon-rss:1kB", "host",
         "python3"),
        ("Memory cgroup out of memory: Killed process 4242 (pt_data_worker) total-vm:1kB",
         "cgroup", "pt_data_worker"),
        ("Killed process 4242 (my (odd) name) total-vm:1kB", "host", "my (odd) name"),
    ],
)  # fmt: skip
def test_killed_processes(message, code, process):
    (event,) = recognize(message)
    assert (event.kind, event.code, event.pid) == ("oom_kill", code, 4242)
    assert event.process == process


def test_an_older_kernel_says_before_which_limit_was_reached():
    killed = "Killed process 4242 (python3) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB"
    cgroup, host = recognize(
        "Memory cgroup out of memory: Kill process 4200 (python3) score 1009 or sacrifice child",
        killed,
        "Out of memory: Kill process 4242 (python3) score 900 or sacrifice child",
        killed,
    )
    assert (cgroup.code, host.code) == ("cgroup", "host")


def test_a_segfault_names_the_library():
    (event,) = recognize(
        "python[77]: segfault at 0 ip 00007f sp 00007f error 4 in libcuda.so.550[7f00+10]"
    )
    assert (event.kind, event.code, event.pid) == ("segfault", "libcuda.so.550", 77)
    (event,) = recognize(  # message of a Grace CPU
        "python3[2510]: unhandled exception: DABT (lower EL), ESR 0x0000000092000046, level 2 "
        "translation fault in libnccl.so.2.28.3[7fbd4f0000+6000]"
    )
    assert (event.code, event.pid, event.process) == ("libnccl.so.2.28.3", 2510, "python3")
    assert recognize("python3[2510]: unhandled exception: SP Alignment, ESR 0x9a000000")


def test_edac_counts_what_the_line_counts():
    (event,) = recognize("EDAC MC0: 12 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (x)")
    assert event.count == 12


def test_missing_lanes_are_reported_for_gpus_and_nics_only():
    limited = (
        "pci {}: 63.012 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x4 link at "
        "0000:00:01.2 (capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)"
    )
    found = recognize(
        "pci 0000:08:00.0: [1022:7901] type 00 class 0x010601",
        limited.format("0000:08:00.0"),
        "pci 0000:9b:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint",
        limited.format("0000:9b:00.0"),
        "bnxt_en 0000:18:00.0: 31.504 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x4 "
        "link at 0000:17:00.0 (capable of 63.008 Gb/s with 8.0 GT/s PCIe x8 link)",
    )
    assert [event.device for event in found] == ["0000:9b:00.0", "0000:18:00.0"]


def test_a_link_that_was_not_up_yet_does_not_go_down():
    found = short(
        "mlx5_core 0000:04:00.0 enp4s0np0: renamed from eth0",
        "mlx5_core 0000:04:00.0 enp4s0np0: Link down",
        "mlx5_core 0000:04:00.0 enp4s0np0: Link up",
        "igb 0000:07:00.0 eno1: renamed from eth1",
        "igb 0000:07:00.0 eno1: igb: eno1 NIC Link is Down",
        "mlx5_core 0000:04:00.1: firmware version: 28.39.1002",
        "mlx5_core 0000:04:00.1: Port module event: module 1, Cable unplugged",
    )
    assert found == []


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("mlx5_core 0000:04:00.0 ens1: Link up", "mlx5_core 0000:04:00.0 ens1: Link down"),
        ("igb 0000:07:00.0 ens1: igb: ens1 NIC Link is Up 1000 Mbps Full Duplex",
         "igb 0000:07:00.0 ens1: igb: ens1 NIC Link is Down"),
        ("IPv6: ADDRCONF(NETDEV_CHANGE): ens1: link becomes ready",
         "bnxt_en 0000:01:00.0 ens1: NIC Link is Down"),
        ("gve 0000:00:05.0 ens1: Device link is up.",
         "gve 0000:00:05.0 ens1: Device link is down."),
        ("bond0: (slave ens1): Enslaving as a backup interface with an up link",
         "bond0: (slave ens1): link status definitely down, disabling slave"),
    ],
)  # fmt: skip
def test_a_link_that_was_up_goes_down(up, down):
    (event,) = recognize("mlx5_core 0000:04:00.0 ens1: renamed from eth0", down, up, down)[-1:]
    assert (event.kind, event.device) == ("nic_link_down", "ens1")


def test_a_cable_that_was_plugged_is_unplugged():
    found = short(
        "mlx5_core 0000:04:00.1: firmware version: 28.39.1002",
        "mlx5_core 0000:04:00.1: Port module event: module 1, Cable plugged",
        "mlx5_core 0000:04:00.1: Port module event: module 1, Cable unplugged",
    )
    assert found == [("mlx5_module", "cable_unplugged", "0000:04:00.1", "warning")]


def test_pcie_errors_that_the_firmware_reports_are_of_their_device():
    status = "nvidia 0000:3b:00.0: AER: aer_status: 0x00001000, aer_mask: 0x00000000"
    assert short(
        status.replace("AER: ", ""),
        "{1}[Hardware Error]: event severity: corrected",
        "{1}[Hardware Error]:   section_type: PCIe error",
        "{1}[Hardware Error]:   aer_uncor_status: 0x00000000, aer_uncor_mask: 0x04500000",
        status,
        "nvidia 0000:3b:00.0: AER: aer_layer=Data Link Layer, aer_agent=Transmitter ID",
        "{2}[Hardware Error]: event severity: fatal",
        status,
    ) == [
        ("pcie_aer", "by_firmware", "0000:3b:00.0", "warning"),
        ("hardware_error", "corrected", "host", "info"),
        ("pcie_aer", "corrected", "0000:3b:00.0", "info"),
        ("hardware_error", "uncorrected", "host", "critical"),
        ("pcie_aer", "uncorrected", "0000:3b:00.0", "critical"),
    ]


def test_an_amd_gpu_names_whose_access_was_wrong_and_how_many_errors_are_new():
    fault, errors, total = recognize(
        "amdgpu 0000:04:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:0 vmid:3 "
        "pasid:32769, for process python3 pid 778 thread python3 pid 783)",
        "amdgpu 0000:c1:00.0: socket: 0, die: 1, 7 new correctable hardware errors detected in umc"
        " block",
        "amdgpu 0000:c1:00.0: amdgpu: 1048560 correctable hardware errors detected in umc block",
    )
    assert (fault.pid, fault.process) == (778, "python3")
    assert (errors.count, total.count) == (7, 1)


def test_details_of_an_sxid_are_not_counted_again():
    found = short(
        "nvidia-nvswitch1: SXid (PCI:0000:00:08.0): 11004, Non-fatal, Link 36 ingress invalid ACL",
        "nvidia-nvswitch1: SXid (PCI:0000:00:08.0): 11004, Severity 0 Engine instance 36",
        "nvidia-nvswitch1: SXid (PCI:0000:00:08.0): 11004, Data {0x00000037, 0x00000037}",
    )
    assert found == [("sxid", "11004", "0000:00:08.0", "warning")]


def test_off_the_bus_in_three_lines():
    found = short(
        "NVRM: The NVIDIA GPU 0000:04:00.0",
        "NVRM: (PCI ID: 10de:15f8) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert found == [("xid", "79", "0000:04:00.0", "critical")]


def test_off_the_bus_in_one_line_without_an_xid():
    assert short("NVRM: GPU 18:00.0: GPU has fallen off the bus.") == [
        ("xid", "79", "0000:18:00.0", "critical")
    ]
    assert short("NVRM: GPU 0000:09:00.0: GPU has fallen off the bus.") == [
        ("xid", "79", "0000:09:00.0", "critical")
    ]
    assert short("NVRM: GPU at 0000:01:00.0 has fallen off the bus.") == [
        ("xid", "79", "0000:01:00.0", "critical")
    ]
    assert short("NVRM: GPU has fallen off the bus.") == [("xid", "79", "host", "critical")]


def test_off_the_bus_is_reported_once_with_its_xid():
    found = short(
        "NVRM: Xid (PCI:0000:83:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:83:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:83:00.0: GPU serial number is 0.",
        "NVRM: GPU 0000:84:00.0: GPU has fallen off the bus.",
    )
    assert [(kind, device) for kind, _, device, _ in found] == [
        ("xid", "0000:83:00.0"),
        ("xid", "0000:84:00.0"),
    ]


GPU_UUID = "GPU-b850f46d-d5ea-c752-ddf3-c1e8f1a2b3c4"


def test_an_xid_names_the_board_that_is_to_be_replaced():
    """The driver logs the board once, before the first XID.

    NVML no longer reports it for a lost GPU.
    """
    first, second, other = recognize(
        f"NVRM: GPU at PCI:0000:3b:00: {GPU_UUID}",
        "NVRM: GPU Board Serial Number: 1654922000123",
        "NVRM: Xid (PCI:0000:3b:00): 48, pid=12, name=python, DBE (double bit error)",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:5e:00): 31, pid=12, Ch 00000010",
    )
    for event in (first, second):
        assert f"; {GPU_UUID}; serial number 1654922000123; " in event.detail
    assert "GPU-" not in other.detail
    (event,) = recognize(
        "NVRM: GPU 0000:5e:00.0: GPU serial number is 1320220000007.",
        "NVRM: Xid (PCI:0000:5e:00): 79, GPU has fallen off the bus.",
    )
    assert "; serial number 1320220000007; GPU has fallen" in event.detail


def test_every_xid_of_the_catalog_is_explained():
    assert all(CATALOG[code].meaning and CATALOG[code].advice for code in CATALOG)
    assert set(range(1, 173)) == set(CATALOG)
    assert explain(0).action == "UNKNOWN"


def test_every_kind_is_documented():
    page = (Path(__file__).parents[4] / "docs" / "agent.md").read_text()
    kinds = {rule.kind for rule in RULES} - {None, OFF_BUS} | {"xid", "sxid"}
    assert {kind for kind in kinds if f"`{kind}`" not in page} == set()


def test_power_smoothing_that_ends_is_more_than_a_change_of_state():
    assert [explain(code).severity for code in range(162, 166)] == ["info", *["warning"] * 3]
    assert explain(165).action == "CONTACT_SUPPORT"


def test_pci_addresses():
    assert pci_address("00000000:9B:00.0") == "0000:9b:00.0"
    assert pci_address("9b:00") == "0000:9b:00.0"
    assert pci_address("10000:E0:06.0") == "10000:e0:06.0"  # behind a VMD


WORDS = [
    "NVRM: Xid (PCI:0000:9b:00): ",
    "79, ",
    "pid=",
    "name=",
    "nvidia-nvswitch1: SXid (",
    "6,1,2,-;",
    "[12.5] ",
    "mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank ",
    "EDAC MC0: ",
    " CE ",
    "fallen off the bus",
    "NVRM: The NVIDIA GPU ",
    "Killed process ",
    "(python)",
    "nvlink error ",
    "\\x0a",
    "99999999999999999999999",
    "mlx5_core 0000:5c:00.0",
    "Link is Down",
    " blocked for more than ",
    "[python:1]",
    "kernel: ",
    "{",
    "}",
]


@settings(max_examples=300)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=12)), max_size=8).map("".join))
def test_no_line_can_break_it(line: str) -> None:
    parse([line, line * 50], 1)


@pytest.mark.parametrize(
    "word", ["nvlink ", "GPU 1 nvlink ", "[1]: segfault", "mlx5_core 0000:5c:00.0 a:1:", "NVRM: "]
)
def test_a_line_without_end_is_read_in_time_that_does_not_explode(word: str) -> None:
    assert recognize("NVRM: " + word * 20_000) == []
