"""Rules for error messages of the kernel and its drivers: one row each.

A rule is tried only on messages that contain its `hint`, and from their beginning, so that a
program that quotes a kernel message is not mistaken for the kernel. Named groups fill the event:
`device`, `code`, `pid`, `process`, `count`. The first matching rule wins; kind None means that the
message is not an event. XIDs and SXids are in `xids.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline_agent.collect.kernel_log.xids import Severity

_PCI = r"(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
_ANY_PCI = r"(?P<device>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
OFF_BUS = "gpu_off_bus"  # the driver's own message for XID 79
AER_OF_FIRMWARE = "by_firmware"
_MLX5 = rf"mlx5_core {_PCI}:? "
_MLX5_CALL = rf"{_MLX5}.*?\w+:\d+:\(pid \d+\): "
_AMDGPU = rf"amdgpu {_PCI}: (?:amdgpu: )?"
_NEW_ERRORS = r"(?:(?P<count>\d{1,9}) new|[1-9]\d*)"  # without "new", the number is a total
_AMAZON = r"\w+(?: [0-9a-f]{4}:\S+(?= \S+:))? (?P<device>\S+): "  # or `infiniband DEVICE: `
_CXI = r"cxi_\w+ \S+ (?P<device>cxi\d+)\[\w*\]"
_NIC_DRIVER = r"(?:mlx[45]_core|bnxt_en|ice|i40e|qede|cxgb4|hfi1|ionic)"
_PROBE_FAILED = rf"(?:: probe of)? {_PCI}(?:: probe with driver \S+)? failed with error"
_BROKEN = r"(?:\bfail|error|fatal|degraded|(?:link|lane) down)"
_BTRFS = r"\(device (?P<device>[^): ]+)"
_DISK = r"(?P<device>(?!(?:fd|sr)\d)[\w-]+)"  # a drive without a medium is not a broken disk
_SECTOR = r"sector(?!.*:\((?:DISCARD|WRITE_ZEROES)\))"  # not every disk knows these commands
_TASK = r"(?P<process>.+?)"
_KILLED = r"Killed process (?P<pid>\d+),? (?:UID \d+, )?\((?P<process>.+)\)(?:,| |$)"


@dataclass(frozen=True, slots=True)
class Rule:
    kind: str | None
    severity: Severity
    hint: str
    pattern: re.Pattern[str]
    code: str = ""


def _rule(kind: str | None, severity: Severity, hint: str, pattern: str, code: str = "") -> Rule:
    return Rule(kind, severity, hint, re.compile(pattern, re.IGNORECASE), code)


RULES: tuple[Rule, ...] = (
    # NVIDIA's driver, besides XIDs
    _rule(
        "gsp_errors_suppressed", "critical", "Rate limiting GSP RPC",
        rf"NVRM: Rate limiting GSP RPC error prints for GPU at (?:PCI:)?{_PCI}",
    ),
    _rule(
        OFF_BUS, "critical", "fallen off the bus",
        rf"NVRM: GPU (?:at )?(?:PCI:)?{_ANY_PCI}(?:: GPU)? has fallen off the bus",
    ),
    _rule(
        OFF_BUS, "critical", "fallen off the bus",
        rf"NVRM: The NVIDIA GPU {_ANY_PCI} .*fallen off the bus",
    ),
    _rule(OFF_BUS, "critical", "fallen off the bus", r"NVRM: GPU has fallen off the bus"),
    _rule(
        "gpu_init_failed", "critical", "RmInitAdapter failed",
        rf"NVRM: (?:GPU (?:PCI:)?{_PCI}: )?RmInitAdapter failed",
    ),
    _rule(
        "gpu_init_failed", "critical", "probe routine failed",
        r"NVRM: The NVIDIA probe routine failed", "probe",
    ),
    _rule(
        "gpu_init_failed", "critical", "failed with error",
        rf"(?:nvidia|amdgpu){_PROBE_FAILED}", "probe",
    ),
    _rule(
        "gpu_reboot_required", "critical", "requiring os reboot",
        r"NVRM: .*uvm encountered global fatal error \w+, requiring os reboot",
    ),
    _rule("gpu_locked", "critical", "GPU is probably locked", r"NVRM: .*GPU is probably locked"),
    _rule("peermem_error", "warning", "peermem", r"nvidia[-_]peermem .*ERROR"),
    _rule(
        "gpu_reset", "critical", "GPU reset begin",
        rf"{_AMDGPU}GPU reset begin",
    ),
    _rule(
        "gpu_reset", "critical", "GPU reset(", rf"{_AMDGPU}GPU reset\(\d+\) failed", "failed"
    ),
    _rule("driver_mismatch", "critical", "API mismatch", r"NVRM: API mismatch"),
    # AMD's
    _rule(
        "gpu_ecc", "info", "correctable hardware errors",
        rf"{_AMDGPU}.*?{_NEW_ERRORS} correctable hardware errors detected in \w+ block",
        "corrected",
    ),
    _rule(
        "gpu_ecc", "warning", "deferred hardware errors",
        rf"{_AMDGPU}.*?{_NEW_ERRORS} deferred hardware errors detected in \w+ block",
        "deferred",
    ),
    _rule(
        "gpu_ecc", "critical", "uncorrectable hardware error",
        rf"{_AMDGPU}.*?{_NEW_ERRORS} uncorrectable hardware errors detected in \w+ block",
        "uncorrected",
    ),
    _rule(
        "gpu_ecc", "critical", "ncorrectable hardware error(",
        rf"{_AMDGPU}(?:\{{\d+\}} ?)?uncorrectable hardware error\(\w+\) detected", "uncorrected",
    ),
    _rule(
        "gpu_page_fault", "warning", "page fault (src_id:",
        rf"{_AMDGPU}\[\w+\] (?:no-retry |retry )?page fault \(src_id:"
        r"(?:.* for process (?P<process>\S.*?) pid (?P<pid>[1-9]\d*))?",
    ),
    _rule(
        "gpu_ring_timeout", "critical", "timeout, signaled seq",
        rf"(?:{_AMDGPU}|\[drm:amdgpu_job_timedout \[amdgpu\]\] \*ERROR\* )"
        r"ring (?P<code>\S+) timeout, signaled seq",
    ),
    _rule(
        "nvlink_error", "warning", "ink",  # nvlink, NVLink
        r"NVRM: (?:GPU ?(?P<device>[0-9a-f]+(?:[:.][0-9a-f]+)*):? )?.*nvlink"
        rf".*{_BROKEN}",
    ),
    _rule(
        "nvlink_error", "warning", "nvidia-nv",
        rf"(?P<device>nvidia-nv(?:link|switch)\d*): .*{_BROKEN}",
    ),
    # PCIe. The port's message repeats the device's own message, which follows.
    _rule(
        "pcie_aer", "info", "PCIe Bus Error",
        rf"\S+ {_PCI}: (?:AER: )?PCIe Bus Error: severity=Correct(?:ed|able)", "corrected",
    ),
    _rule(
        "pcie_aer", "warning", "PCIe Bus Error",
        rf"\S+ {_PCI}: (?:AER: )?PCIe Bus Error: severity=Uncorrect\w+ \(Non-Fatal\)",
        "uncorrected_nonfatal",
    ),
    _rule(
        "pcie_aer", "critical", "PCIe Bus Error",
        rf"\S+ {_PCI}: (?:AER: )?PCIe Bus Error: severity=(?:Uncorrect\w+ \()?Fatal",
        "uncorrected_fatal",
    ),
    _rule(  # if firmware handles AER, an earlier message has the severity: hardware_error
        "pcie_aer", "warning", "aer_status: ", rf"\S+ {_PCI}: (?:AER: )?aer_status: 0x",
        AER_OF_FIRMWARE,
    ),
    _rule(
        "pcie_aer", "warning", "can't find device",
        rf"\S+ {_PCI}: AER: can't find device of ID", "unknown_source",
    ),
    _rule(
        "pcie_aer", "critical", "AER: ",
        rf"\S+ {_PCI}: AER: (?:can't recover|device recovery failed)", "not_recovered",
    ),
    _rule(
        "pcie_link_down", "critical", "Slot(",
        rf"\S+ {_PCI}: (?:pciehp: )?Slot\([^)]*\): (?:Link Down(?!/)|Card not present)",
    ),
    _rule(
        "pcie_link_down", "critical", "DPC: containment", rf"\S+ {_PCI}: DPC: containment event",
        "contained",
    ),
    _rule(
        "pcie_link_down", "critical", "device inaccessible",
        rf"\S+ {_PCI}: Unable to change power state from \S+ to \S+, device inaccessible",
        "inaccessible",
    ),
    _rule(
        "pcie_link_down", "critical", "giving up",
        rf"\S+ {_PCI}: not ready \d+ms after .*; giving up", "inaccessible",
    ),
    _rule(
        "pcie_link_down", "critical", "lost from bus", rf"{_AMDGPU}device lost from bus",
        "inaccessible",
    ),
    # Missing lanes. A slower slot is by design, and idle GPUs run at their lowest speed.
    _rule(
        "pcie_bandwidth_limited", "warning", "limited by",
        rf"\S+ {_PCI}: .* PCIe bandwidth, limited by .* x(?:[1248]|12) link .* x16 link\)",
    ),
    _rule(
        "pcie_bandwidth_limited", "warning", "limited by",
        rf"{_NIC_DRIVER} {_PCI}: .* PCIe bandwidth, limited by .* x[124] link .* x8 link\)",
    ),
    _rule(
        "iommu_fault", "warning", "DMAR:",
        r"DMAR: .*Request device \[?(?P<device>(?:\w+:)?\w\w:\w\w\.\d)\]? .*fault",
    ),
    _rule(
        "iommu_fault", "warning", "IO_PAGE_FAULT device=",
        rf"AMD-Vi: Event logged \[IO_PAGE_FAULT device={_ANY_PCI}",
    ),
    _rule(
        "iommu_fault", "warning", "IO_PAGE_FAULT",
        rf"(?:\S+ {_PCI}: )?AMD-Vi: Event logged \[IO_PAGE_FAULT",
    ),
    _rule(
        "iommu_fault", "warning", "arm-smmu",
        r"arm-smmu-v3 (?P<device>\S+): event 0x\w+ received:",
    ),
    _rule(
        "iommu_fault", "warning", "arm-smmu",
        r"arm-smmu (?P<device>\S+): (?:Unhandled context fault|Unexpected global fault)",
    ),
    _rule(  # a device or the IOMMU no longer responds
        "iommu_fault", "critical", "Completion-Wait loop",
        r"AMD-Vi: Completion-Wait loop timed out", "timeout",
    ),
    _rule(
        "iommu_fault", "critical", "Invalidation Time-out",
        r"DMAR: VT-d detected Invalidation Time-out Error", "timeout",
    ),
    _rule(
        "iommu_fault", "critical", "CMD_SYNC timeout",
        r"arm-smmu-v3 (?P<device>\S+): CMD_SYNC timeout", "timeout",
    ),
    # Machine checks and memory
    _rule(
        "machine_check", "info", "Machine check events",
        r"mce: \[Hardware Error\]: Machine check events logged", "logged",
    ),
    _rule(  # format of AMD's decoder
        "machine_check", "info", "[Hardware Error]: ",
        r"\[Hardware Error\]: (?P<code>Corrected|Deferred) error",
    ),
    _rule(
        "machine_check", "critical", "[Hardware Error]: ",
        r"\[Hardware Error\]: (?:Uncorrected|System Fatal)\b.* error", "uncorrected",
    ),
    _rule(
        "memory_failure", "critical", "hardware memory corruption",
        rf"(?:MCE|Memory failure):?(?: 0x\w+:)? (?:Killing|Sending SIGBUS to) {_TASK}:(?P<pid>\d+)"
        r" (?:early )?due to hardware memory",
        "killed",
    ),
    _rule("memory_failure", "warning", "Memory failure", r"Memory failure: 0x\w+: recovery action"),
    _rule(
        "edac", "info", "EDAC",
        r"EDAC (?P<device>MC\d+): (?P<count>\d{1,9}) CE\b", "corrected",
    ),
    _rule(
        "edac", "critical", "EDAC",
        r"EDAC (?P<device>MC\d+): (?P<count>\d{1,9}) UE\b", "uncorrected",
    ),
    _rule(
        "hardware_error", "info", "event severity",
        r"(?:\{\d+\})?\[Hardware Error\]: event severity: (?:corrected|info)", "corrected",
    ),
    _rule(
        "hardware_error", "critical", "event severity",
        r"(?:\{\d+\})?\[Hardware Error\]: event severity: (?:recoverable|fatal)", "uncorrected",
    ),
    # Processes
    _rule(
        "oom_kill", "critical", "Killed process",
        rf"Memory cgroup out of memory: {_KILLED}", "cgroup",
    ),
    _rule(
        "oom_kill", "critical", "Killed process",
        rf"(?:Out of memory.*: )?{_KILLED}", "host",
    ),
    _rule(
        "segfault", "warning", "segfault at",
        rf"{_TASK}\[(?P<pid>\d+)\]: segfault at .*?(?: in (?P<code>[^\[ ]+)|$)",
    ),
    _rule(  # on ARM
        "segfault", "warning", "unhandled exception: ",
        rf"{_TASK}\[(?P<pid>\d+)\]: unhandled exception: .*?(?: in (?P<code>[^\[ ]+)\[|$)",
    ),
    _rule(
        "segfault", "warning", "traps: ",
        rf"traps: {_TASK}\[(?P<pid>\d+)\] (?:general protection|trap)",
    ),
    _rule(
        "hung_task", "warning", "for more than",
        r"INFO: task (?P<process>.+):(?P<pid>\d+) blocked (?:in I/O wait )?for more than \d+ sec",
    ),
    _rule(
        "soft_lockup", "critical", "soft lockup",
        r".*BUG: soft lockup - CPU#(?P<device>\d+) stuck for .*\[(?P<process>.+):(?P<pid>\d+)\]",
    ),
    _rule("hard_lockup", "critical", "hard LOCKUP", r".*hard LOCKUP on cpu (?P<device>\d+)"),
    _rule("workqueue_lockup", "warning", "workqueue lockup", r"BUG: workqueue lockup - pool "),
    _rule(
        "rcu_stall", "warning", "stall",
        r"(?:rcu: )?INFO: rcu_\w+ .*detected (?:expedited )?stall",
    ),
    _rule(
        "page_allocation_failure", "warning", "page allocation failure",
        rf"{_TASK}: page allocation failure",
    ),
    _rule(
        "clock_unstable", "warning", "as unstable",
        r"clocksource: .*Marking clocksource '(?P<device>[\w-]+)' as unstable",
    ),
    # Exhausted resources
    _rule("conntrack_full", "warning", "table full", r"nf_conntrack: .*table full"),
    _rule(
        "neighbor_table_full", "warning", "table overflow",
        r"(?:neighbour: )?\w+: neighbou?r table overflow",
    ),
    _rule("tcp_memory_full", "critical", "tcp_mem", r"TCP: out of memory -- consider tuning"),
    _rule("file_max_reached", "critical", "file-max limit", r"VFS: file-max limit \d+ reached"),
    _rule(
        "fork_rejected", "critical", "fork rejected",
        r"cgroup: fork rejected by pids controller in ",
    ),
    _rule("kernel_bug", "critical", "BUG", r"kernel BUG at|BUG: (?:unable to handle|kernel NULL)"),
    _rule("kernel_bug", "critical", "BUG", r"BUG: Bad page (?:state|map) in process", "bad_page"),
    _rule(  # on ARM
        "kernel_bug", "critical", "Unable to handle kernel", r"Unable to handle kernel \w+",
    ),
    _rule("kernel_bug", "critical", "Internal error", r"Internal error: .+ \[#\d+\]"),
    _rule("kernel_bug", "critical", "general protection", r"general protection fault\b.* \[#\d+\]"),
    _rule("kernel_bug", "critical", "Oops", r"Oops: "),
    _rule("kernel_bug", "critical", "panic", r"Kernel panic"),
    # Heat
    _rule(
        "thermal_throttle", "warning", "above threshold",
        r"(?:mce: )?CPU\d+: (?P<code>core|package) (?:temperature|power) (?:is )?above threshold",
    ),
    _rule(
        "thermal_throttle", "critical", "critical temperature", r"thermal .*critical temperature"
    ),
    # mlx5
    _rule(
        "mlx5_health", "critical", "health compromised",
        rf"{_MLX5_CALL}device's health compromised", "compromised",
    ),
    _rule(  # syslog severities: warning and lower
        "mlx5_health", "warning", "Health issue",
        rf"{_MLX5_CALL}Health issue observed, (?P<code>[^,]+), severity\([4-7]\)",
    ),
    _rule(
        "mlx5_health", "critical", "Health issue", rf"{_MLX5_CALL}Health issue observed, "
        r"(?P<code>[^,]+)",
    ),
    _rule(
        "mlx5_health", "critical", "health recovery",
        rf"{_MLX5_CALL}health recovery (?:flow aborted|failed)", "not_recovered",
    ),
    _rule(
        "mlx5_health", "critical", "Fatal error", rf"{_MLX5_CALL}Fatal error \d+ detected",
        "fatal_error",
    ),
    _rule(
        "mlx5_health", "critical", "internal error", rf"{_MLX5}.*internal error ", "internal_error"
    ),
    _rule(
        "mlx5_health", "critical", "_one failed", rf"{_MLX5_CALL}mlx5_(?:init|load)_one failed",
        "not_initialized",
    ),
    _rule(
        "mlx5_health", "critical", "error state",
        rf"{_MLX5_CALL}(?:Driver|device) is in error state", "error_state",
    ),
    _rule(None, "info", "recovered after timeout", rf"{_MLX5_CALL}"),
    _rule(
        "mlx5_command_timeout", "critical", "cmd[",
        rf"{_MLX5_CALL}cmd\[-?\d+\]: (?P<code>\w+)\(0x\w+\) (?:timeout|No done completion)",
    ),
    _rule(
        "mlx5_command_timeout", "critical", "timeout. Will cause",
        rf"{_MLX5_CALL}(?P<code>\w+)\(0x\w+\) timeout",
    ),
    _rule(  # a command that this firmware does not support
        None, "info", ") failed, status bad ",
        rf"{_MLX5_CALL}(?:ACCESS_REG|QUERY_\w+)\(0x\w+\) op_mod\(0x\w+\) failed, "
        r"status bad (?:parameter|operation)\(",
    ),
    _rule(
        "mlx5_command_error", "warning", ") failed, status",
        rf"{_MLX5_CALL}(?P<code>\w+)\(0x\w+\) op_mod\(0x\w+\) failed",
    ),
    _rule(
        "mlx5_power", "warning", "insufficient power",
        rf"{_MLX5}.*Detected insufficient power on the PCIe slot",
    ),
    _rule("mlx5_temperature", "warning", "High temperature", rf"{_MLX5}.*High temperature"),
    _rule(
        "mlx5_module", "warning", "module",
        rf"{_MLX5}Port module event.*: module \d+, "
        r"(?P<code>Cable unplugged|.*error.*)",
    ),
    _rule("mlx5_cq_error", "warning", "CQ error", rf"{_MLX5}.*CQ error on CQN"),
    _rule(  # a queue of the interface
        "mlx5_cq_error", "warning", "Error cqe on",
        r"mlx5_core \S+ (?P<device>\S+): Error cqe on cqn ",
    ),
    _rule(
        "transmit_timeout", "critical", "TX timeout",
        r"(?:mlx5_core|bnxt_en) \S+ (?P<device>\S+): TX timeout",
    ),
    _rule(
        "mlx4_health", "critical", "nternal error", rf"mlx4_core {_PCI}: Internal error detected",
        "internal_error",
    ),
    # Other NICs
    _rule(
        "nic_init_failed", "critical", "failed with error",
        rf"(?:mlx4_core|bnxt_en|ice|i40e|irdma|ena|efa|gve|ionic|hfi1|cxi_\w+){_PROBE_FAILED}",
    ),
    _rule(
        "nic_command_timeout", "critical", "Error (timeout: ",
        r"bnxt_en \S+ (?P<device>\S+): Error \(timeout: \d+\) msg ",
    ),
    _rule(
        "nic_command_timeout", "critical", "timedout (",
        rf"bnxt_en {_PCI}: (?:QPLIB: )?cmdq\[\w+\]=\w+ timedout",
    ),
    _rule(  # since Linux 6.6
        "nic_command_timeout", "critical", "FW STALL Detected",
        rf"bnxt_en {_PCI}: (?:QPLIB: )?\w+: FW STALL Detected",
    ),
    _rule(  # ena, efa, erdma
        "nic_command_timeout", "critical", "(polling) timeout",
        rf"{_AMAZON}Wait for completion \(polling\) timeout",
    ),
    _rule(
        "nic_command_timeout", "critical", "any completion for admin cmd",
        rf"{_AMAZON}The device didn't send any completion for admin cmd",
    ),
    _rule(
        "nic_command_timeout", "critical", "Admin queue is closed",
        rf"{_AMAZON}Admin queue is closed", "queue_closed",
    ),
    _rule(
        "nic_firmware_error", "critical", "n't ", rf"{_AMAZON}(?:Reset indication didn't turn"
        r"|Device isn't ready, (?:can't reset|abort))", "reset_failed",
    ),
    _rule(
        "nic_firmware_error", "critical", "irmware",
        r"bnxt_en \S+ (?P<device>\S+): "
        r"(?:Firmware )?(?P<code>(?:non-)?fatal) (?:firmware )?reset event",
    ),
    _rule(
        "nic_firmware_error", "critical", "Rebuild failed", rf"ice {_PCI}: Rebuild failed",
        "rebuild_failed",
    ),
    _rule(
        "rdma_link_down", "critical", "CXI_EVENT_LINK_DOWN", rf"{_CXI} CXI_EVENT_LINK_DOWN"
    ),
    _rule(
        "rdma_link_down", "critical", "new OFFLINE",
        r"hfi\d \S+ (?P<device>hfi\d_\d+).*set_link_state: current (?:ACTIVE|ARMED), new OFFLINE",
    ),
    _rule(None, "info", "pri_rbyp_abort", rf"{_CXI}"),  # corrected
    _rule(
        "cxi_error", "critical", "C_EC_CRIT", rf"{_CXI}: C_EC_CRIT: \w+ error: (?P<code>\w+)",
    ),
    _rule(
        "cxi_error", "warning", "C_EC_UNCOR", rf"{_CXI}: C_EC_UNCOR_\w+: \w+ error: (?P<code>\w+)",
    ),
    # Links of any NIC
    _rule(
        "transmit_timeout", "critical", "Keep alive watchdog",
        rf"(?:ena|efa) {_PCI}.*Keep alive watchdog timeout",
    ),
    _rule(
        "transmit_timeout", "critical", "NETDEV WATCHDOG",
        r"NETDEV WATCHDOG: (?:CPU: \d+: )?(?P<device>\S+) \([^)]*\): transmit queue",
    ),
    _rule(  # since Linux 6.9
        "transmit_timeout", "critical", "NETDEV WATCHDOG",
        r"(?:\S+ \S+ )?(?P<device>\S+): NETDEV WATCHDOG: CPU: \d+: transmit queue",
    ),
    _rule(
        "rdma_link_down", "critical", "Link DOWN",
        r"(?:infiniband |\w+ [0-9a-f]{4}:\S+ )?(?P<device>[\w-]+): Port: \d+ Link DOWN",
    ),
    _rule(
        "nic_link_down", "warning", "link status",
        r"\S+: \(slave (?P<device>\S+)\): link status definitely down",
    ),
    _rule(  # before Linux 5.2
        "nic_link_down", "warning", "link status",
        r"(?:bonding: )?\S+: link status definitely down for interface (?P<device>[^ ,]+)",
    ),
    _rule(
        "nic_link_down", "warning", "ink",
        r"(?:\w+ [0-9a-f]{4}:[\w:.]+ )?(?P<device>[\w.-]+):(?: \w+: \S+)?"
        r" (?:NIC |Device )?Link is Down",
    ),
    _rule(
        "nic_link_down", "warning", "NIC Link is Down",
        r"\w+: (?P<device>[\w.-]+) NIC Link is Down",
    ),
    _rule(
        "nic_link_down", "warning", "ink ",
        r"(?:\w+ [0-9a-f]{4}:\S+|mlx4_en:) (?P<device>[\w.-]+): Link down",
    ),
    # File systems and disks
    _rule(
        "filesystem_error", "critical", "EXT4-fs error",
        r"EXT4-fs error \(device (?P<device>[^)]+)\)", "ext4",
    ),
    _rule(  # data that a program believes to be on disk is not
        "filesystem_error", "critical", " los",
        r"EXT4-fs \((?P<device>[^):]+)[^)]*\): .*(?:Data will be lost|potential data loss)", "ext4",
    ),
    _rule(
        "filesystem_read_only", "critical", "read-only",
        r"(?:EXT4-fs|EXT3-fs|XFS) \((?P<device>[^):]+)[^)]*\):"
        r" .*(?:Remounting filesystem|forced|remounting).*read-?only",
    ),
    _rule(
        "filesystem_read_only", "critical", "forced readonly",
        rf"BTRFS:? \w+ {_BTRFS}.*forced readonly",
    ),
    _rule(
        "filesystem_error", "critical", "Aborting journal",
        r"Aborting journal on device (?P<device>[^. ]+)", "journal",
    ),
    _rule(
        "filesystem_error", "critical", "Detected IO errors",
        r"JBD2: Detected IO errors while flushing file data on (?P<device>[\w-]+)", "journal",
    ),
    _rule(
        "disk_error", "critical", "Disk failure",
        r"md/\w+:(?P<device>\w+): Disk failure on", "raid",
    ),
    _rule(
        "filesystem_error", "critical", "XFS",
        r"XFS \((?P<device>[^)]+)\): .*(?:corrupt|CRC error|I/O error|shut(?:ting)? ?down)", "xfs",
    ),
    _rule(
        "filesystem_error", "critical", "BTRFS",
        rf"BTRFS:? (?:error|critical) {_BTRFS}", "btrfs",
    ),
    _rule(  # the data read differs from the data written
        "filesystem_error", "critical", "BTRFS warning",
        rf"BTRFS warning {_BTRFS}.*: (?:csum failed|checksum verify failed)", "btrfs",
    ),
    _rule(
        "filesystem_error", "critical", "GPFS Deadman",
        r"GPFS Deadman Switch timer .*expired", "gpfs",
    ),
    _rule(
        "lustre_connection_lost", "warning", "was lost",
        r"Lustre(?:Error)?: .*Connection to (?P<device>\S+) \(at [^)]*\) was lost",
    ),
    _rule(  # operations in progress fail
        "filesystem_error", "critical", "client was evicted",
        r"Lustre(?:Error)?: .*This client was evicted by (?P<device>[^\s;]+)", "lustre",
    ),
    _rule(
        "filesystem_error", "critical", "Lustre",
        r"Lustre(?:Error)?: .*(?:LBUG|ASSERTION|BAD (?:READ|WRITE) CHECKSUM|dirty page discard)",
        "lustre",
    ),
    # Connections and pings fail at boot, and while a server starts.
    _rule(
        "filesystem_error", "warning", "LustreError: ",
        r"LustreError: .* operation (?!\w*_connect\b|\w+_ping\b)\w+ to node .* failed", "lustre",
    ),
    _rule("filesystem_error", "warning", "Timed out", r"LNetError: .* Timed out", "lustre"),
    _rule(
        "filesystem_error", "warning", "ceph",
        r"(?:lib)?ceph(?: \([^)]*\))?: (?:\[[^]]*\]: )?"
        r"(?P<device>(?:mon|osd|mds)\d+) .*(?:socket (?:closed|error)|hung|lost"
        r"|rejected session|reconnect denied)",
        "ceph",
    ),
    _rule(
        "nfs_not_responding", "warning", "nfs: server",
        r"nfs: server (?P<device>\S+) (?:not responding|timed out)",
    ),
    _rule(
        "disk_error", "critical", "I/O error, dev",
        rf"(?:\w+: )?I/O error, dev {_DISK}, {_SECTOR}", "io",
    ),
    _rule(
        "disk_error", "critical", "error, dev",
        rf"(?:\w+: )?critical (?P<code>[\w ]+) error, dev {_DISK}, {_SECTOR}",
    ),
    _rule(
        "disk_error", "warning", "I/O error on dev",
        rf"Buffer I/O error on dev(?:ice)? {_DISK},", "buffer",
    ),
    _rule(
        "disk_error", "warning", "beyond end of device",
        r"(?:\S.*: )?attempt to access beyond end of device", "beyond_end",
    ),
    _rule(
        "nvme_timeout", "warning", "timeout",
        r"nvme (?P<device>nvme\d+): (?:I/O (?:tag )?\d+ .*timeout|queue \d+: timeout request)",
    ),
    _rule(
        "nvme_down", "critical", "nvme nvme",
        r"nvme (?P<device>nvme\d+): (?:controller is down|Disabling device after reset failure"
        r"|Removing after probe failure|Device not ready"
        r"|resetting controller due to persistent internal error)",
    ),
    _rule(  # a disk reached over a network or over two paths
        "nvme_down", "critical", " path - ",
        r"block (?P<device>nvme\w+): no (?:usable|available) path - ", "no_path",
    ),
)  # fmt: skip
