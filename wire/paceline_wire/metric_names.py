"""Names of metrics that one side emits and another reads: agent, server, CLI, lab.

`DCGM_*` have dcgm-exporter's units (MHz, degrees Celsius, W, MiB). The other names end in their
unit. Names that only one side uses stay in its own files.
"""

from __future__ import annotations

# GPUs (dcgm-exporter and Paceline)

GPU_XID_ERRORS = "DCGM_FI_DEV_XID_ERRORS"
GPU_XID_ERRORS_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
GPU_CORRECTABLE_REMAPPED_ROWS = "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"
GPU_ECC_CURRENT = "DCGM_FI_DEV_ECC_CURRENT"
GPU_ECC_DBE_VOL_TOTAL = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
GPU_ECC_SBE_VOL_TOTAL = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"
GPU_ENFORCED_POWER_LIMIT = "DCGM_FI_DEV_ENFORCED_POWER_LIMIT"
GPU_FB_TOTAL = "DCGM_FI_DEV_FB_TOTAL"
GPU_FB_USED = "DCGM_FI_DEV_FB_USED"
GPU_TEMP = "DCGM_FI_DEV_GPU_TEMP"
GPU_UTIL = "DCGM_FI_DEV_GPU_UTIL"
MEM_CLOCK = "DCGM_FI_DEV_MEM_CLOCK"
MIG_MODE = "DCGM_FI_DEV_MIG_MODE"
NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"
NVLINK_RECOVERY_ERROR_COUNT_TOTAL = "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"
NVLINK_REPLAY_ERROR_COUNT_TOTAL = "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"
PCIE_REPLAY_COUNTER = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
GPU_PERSISTENCE_MODE = "DCGM_FI_DEV_PERSISTENCE_MODE"
GPU_POWER_USAGE = "DCGM_FI_DEV_POWER_USAGE"
GPU_POWER_VIOLATION = "DCGM_FI_DEV_POWER_VIOLATION"
GPU_ROW_REMAP_FAILURE = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
GPU_ROW_REMAP_PENDING = "DCGM_FI_DEV_ROW_REMAP_PENDING"
SM_CLOCK = "DCGM_FI_DEV_SM_CLOCK"
GPU_THERMAL_VIOLATION = "DCGM_FI_DEV_THERMAL_VIOLATION"
GPU_UNCORRECTABLE_REMAPPED_ROWS = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"
DRIVER_INFO = "paceline_driver_info"
GPU_HUNG = "paceline_gpu_hung"
GPU_INFO = "paceline_gpu_info"
GPU_LOST = "paceline_gpu_lost"
GPU_MEMORY_CLOCK_MAX_MHZ = "paceline_gpu_memory_clock_max_mhz"
GPU_NVLINK_ACTIVE_LINKS = "paceline_gpu_nvlink_active_links"
GPU_PCIE_GENERATION = "paceline_gpu_pcie_generation"
GPU_PCIE_GENERATION_MAX = "paceline_gpu_pcie_generation_max"
GPU_PCIE_WIDTH = "paceline_gpu_pcie_width"
GPU_PCIE_WIDTH_MAX = "paceline_gpu_pcie_width_max"
GPU_SM_CLOCK_MAX_MHZ = "paceline_gpu_sm_clock_max_mhz"
GPU_THROTTLE_REASON = "paceline_gpu_throttle_reason"

# InfiniBand and RoCE ports (node_exporter)

INFINIBAND_LINK_DOWNED_TOTAL = "node_infiniband_link_downed_total"
INFINIBAND_LINK_ERROR_RECOVERY_TOTAL = "node_infiniband_link_error_recovery_total"
INFINIBAND_LOCAL_ACK_TIMEOUT_ERRORS_TOTAL = "node_infiniband_local_ack_timeout_errors_total"
INFINIBAND_LOCAL_LINK_INTEGRITY_ERRORS_TOTAL = "node_infiniband_local_link_integrity_errors_total"
INFINIBAND_NP_CNP_PACKETS_SENT_TOTAL = "node_infiniband_np_cnp_packets_sent_total"
INFINIBAND_NP_ECN_MARKED_ROCE_PACKETS_RECEIVED_TOTAL = (
    "node_infiniband_np_ecn_marked_roce_packets_received_total"
)
INFINIBAND_OUT_OF_SEQUENCE_PACKETS_RECEIVED_TOTAL = (
    "node_infiniband_out_of_sequence_packets_received_total"
)
INFINIBAND_PACKET_SEQUENCE_ERRORS_TOTAL = "node_infiniband_packet_sequence_errors_total"
INFINIBAND_PHYSICAL_STATE_ID = "node_infiniband_physical_state_id"
INFINIBAND_PORT_DISCARDS_TRANSMITTED_TOTAL = "node_infiniband_port_discards_transmitted_total"
INFINIBAND_PORT_ERRORS_RECEIVED_TOTAL = "node_infiniband_port_errors_received_total"
INFINIBAND_PORT_TRANSMIT_WAIT_TOTAL = "node_infiniband_port_transmit_wait_total"
INFINIBAND_RATE_BYTES_PER_SECOND = "node_infiniband_rate_bytes_per_second"
INFINIBAND_ROCE_ADP_RETRANSMITS_TOTAL = "node_infiniband_roce_adp_retransmits_total"
INFINIBAND_RP_CNP_PACKETS_HANDLED_TOTAL = "node_infiniband_rp_cnp_packets_handled_total"
INFINIBAND_STATE_ID = "node_infiniband_state_id"
INFINIBAND_SYMBOL_ERROR_TOTAL = "node_infiniband_symbol_error_total"

# Network interfaces and TCP (node_exporter)

NETSTAT_TCP_RETRANSSEGS = "node_netstat_Tcp_RetransSegs"
NETWORK_CARRIER = "node_network_carrier"
NETWORK_CARRIER_CHANGES_TOTAL = "node_network_carrier_changes_total"
NETWORK_RECEIVE_BYTES_TOTAL = "node_network_receive_bytes_total"
NETWORK_RECEIVE_DROP_TOTAL = "node_network_receive_drop_total"
NETWORK_RECEIVE_ERRS_TOTAL = "node_network_receive_errs_total"
NETWORK_SPEED_BYTES = "node_network_speed_bytes"
NETWORK_TRANSMIT_BYTES_TOTAL = "node_network_transmit_bytes_total"
NETWORK_TRANSMIT_DROP_TOTAL = "node_network_transmit_drop_total"
NETWORK_TRANSMIT_ERRS_TOTAL = "node_network_transmit_errs_total"

# PCIe devices

DEVICE_PCIE_TRANSFERS_PER_SECOND = "paceline_device_pcie_transfers_per_second"
DEVICE_PCIE_TRANSFERS_PER_SECOND_MAX = "paceline_device_pcie_transfers_per_second_max"
DEVICE_PCIE_WIDTH = "paceline_device_pcie_width"
DEVICE_PCIE_WIDTH_MAX = "paceline_device_pcie_width_max"

# Host (node_exporter)

NODE_CONTEXT_SWITCHES_TOTAL = "node_context_switches_total"
DISK_IO_TIME_SECONDS_TOTAL = "node_disk_io_time_seconds_total"
DISK_IO_TIME_WEIGHTED_SECONDS_TOTAL = "node_disk_io_time_weighted_seconds_total"
FILESYSTEM_AVAIL_BYTES = "node_filesystem_avail_bytes"
FILESYSTEM_SIZE_BYTES = "node_filesystem_size_bytes"
FILESYSTEM_READONLY = "node_filesystem_readonly"
NODE_LOAD1 = "node_load1"
MEMORY_MEMAVAILABLE_BYTES = "node_memory_MemAvailable_bytes"
MEMORY_MEMTOTAL_BYTES = "node_memory_MemTotal_bytes"
PRESSURE_CPU_WAITING_SECONDS_TOTAL = "node_pressure_cpu_waiting_seconds_total"
PRESSURE_IO_STALLED_SECONDS_TOTAL = "node_pressure_io_stalled_seconds_total"
PRESSURE_IO_WAITING_SECONDS_TOTAL = "node_pressure_io_waiting_seconds_total"
PRESSURE_MEMORY_STALLED_SECONDS_TOTAL = "node_pressure_memory_stalled_seconds_total"
PRESSURE_MEMORY_WAITING_SECONDS_TOTAL = "node_pressure_memory_waiting_seconds_total"
VMSTAT_PGMAJFAULT = "node_vmstat_pgmajfault"
VMSTAT_PSWPIN = "node_vmstat_pswpin"
VMSTAT_PSWPOUT = "node_vmstat_pswpout"

# Ranks and their processes

KERNEL_PROCESS_XIDS_TOTAL = "paceline_kernel_process_xids_total"
OTHER_PROCESSES_CPUS = "paceline_other_processes_cpus"
OTHER_PROCESSES_PID = "paceline_other_processes_pid"
RANK_GPU_OTHER_PROCESSES = "paceline_rank_gpu_other_processes"
RANK_GPU_OTHERS_UTILIZATION_RATIO = "paceline_rank_gpu_others_utilization_ratio"
RANK_GPU_UTILIZATION_RATIO = "paceline_rank_gpu_utilization_ratio"
RANK_KERNEL_EVENTS_TOTAL = "paceline_rank_kernel_events_total"
RANK_MEMORY_MISBOUND = "paceline_rank_memory_misbound"
RANK_NIC_MISPLACED = "paceline_rank_nic_misplaced"
RANK_NUMA_MISBOUND = "paceline_rank_numa_misbound"
RANK_PROCESS_CONTEXT_SWITCHES_TOTAL = "paceline_rank_process_context_switches_total"
RANK_PROCESS_CPU_SECONDS_TOTAL = "paceline_rank_process_cpu_seconds_total"
RANK_PROCESS_MAJOR_FAULTS_TOTAL = "paceline_rank_process_major_faults_total"
RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL = "paceline_rank_process_run_queue_wait_seconds_total"
RANK_PROCESS_WRITTEN_BYTES_TOTAL = "paceline_rank_process_written_bytes_total"
RANK_READ_BYTES_TOTAL = "paceline_rank_read_bytes_total"
RANK_TCP_INTERFACE_INFO = "paceline_rank_tcp_interface_info"
RANK_TCP_RETRANSMITTED_SEGMENTS_TOTAL = "paceline_rank_tcp_retransmitted_segments_total"
RANK_TCP_SENDING_SECONDS_TOTAL = "paceline_rank_tcp_sending_seconds_total"
RANK_TCP_SENT_BYTES_TOTAL = "paceline_rank_tcp_sent_bytes_total"

# Kernel log

KERNEL_EVENTS_TOTAL = "paceline_kernel_events_total"
KERNEL_LOG_LOST_TOTAL = "paceline_kernel_log_lost_total"
KERNEL_XID_INFO = "paceline_kernel_xid_info"
