"""The facts of one node that are compared with those of other nodes.

A value that could not be read is None or absent, never 0. Fields are only added, never changed, so
that nodes with different versions can be compared.
"""

from __future__ import annotations

import msgspec

# Kernel modules that let RDMA read a GPU's memory: the driver's, its predecessor, and AWS'.
PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")


class PreflightGpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int  # NVML index
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    vbios: str | None = None
    trouble: str | None = None  # "is lost" or "does not answer"; the other fields are then unknown
    sm_clock_max_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    power_limit_watts: float | None = None
    memory_total_mebibytes: float | None = None
    memory_used_mebibytes: float | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    throttle_reasons: list[str] = []
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    pcie_generation_max: float | None = None
    nvlinks_active: float | None = None
    ecc_uncorrected_volatile: float | None = None
    remapped_rows_uncorrectable: float | None = None
    remap_pending: float | None = None
    remap_failure: float | None = None
    ecc_mode: float | None = None
    mig_mode: float | None = None
    persistence_mode: float | None = None
    pci_path: list[str] = []  # host bridge, bridges and the device
    numa_node: int | None = None


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    device: str  # "mlx5_0"
    port: str
    state: int | None = None  # ib_verbs.h: 4 is active
    physical_state: int | None = None  # 5 is link up
    rate_bits_per_second: float | None = None
    link_layer: str | None = None  # "InfiniBand" or "Ethernet"
    subnet_prefix: str | None = None  # the upper half of the first GID
    firmware: str | None = None
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    pci_path: list[str] = []
    numa_node: int | None = None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool | None = None
    speed_bits_per_second: float | None = None
    mtu_bytes: float | None = None
    addresses: list[str] = []  # IPv4, "10.0.0.1/24"
    physical: bool = False  # it has a hardware device


class CheckpointPath(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    problem: str | None = None  # why the directory cannot be written
    filesystem: str | None = None
    size_bytes: int | None = None
    available_bytes: int | None = None
    write_bytes_per_second: float | None = None  # speed of one file, fsync included


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    node: str  # name given on the command line, else the host's own name
    hostname: str
    time_ns: int  # CLOCK_REALTIME when the facts were complete
    versions: dict[str, str] = {}  # kernel, driver, cuda, nccl, torch, python, paceline ...
    gpus: list[PreflightGpu] = []
    gpu_absence: str | None = None  # why there are no GPUs, for example no driver
    gpu_problem: str | None = None  # why the GPUs do not respond
    rdma_ports: list[RdmaPort] = []
    interfaces: list[Interface] = []
    environment: dict[str, str] = {}  # NCCL_*, GLOO_* and UCX_* of the collecting process
    modules: list[str] = []  # loaded kernel modules that concern RDMA from GPU memory
    rdma_devices_open: bool | None = None  # whether this user may open /dev/infiniband/uverbs*
    limits: dict[str, int | None] = {}  # soft limits; None: unlimited
    shm_size_bytes: int | None = None
    shm_available_bytes: int | None = None
    clock_synchronised: bool | None = None
    clock_error_seconds: float | None = None  # the kernel's estimate of the maximum error
    cpu_count: int | None = None
    cpu_governors: list[str] = []
    memory_bytes: int | None = None
    numa_balancing: bool | None = None
    numa_nodes: int | None = None
    checkpoints: list[CheckpointPath] = []
    free_port: int | None = None  # rendezvous port for the micro-benchmarks
