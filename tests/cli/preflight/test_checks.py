"""Each check, on four nodes with eight H200s and eight ports each: one node differs and is
named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from paceline_cli.preflight.checks import all_checks
from paceline_cli.preflight.facts import (
    CheckpointPath,
    Interface,
    NodeFacts,
    PreflightGpu,
    RdmaPort,
)
from paceline_cli.preflight.traffic import matches, traffic_interface
from paceline_cli.preflight.verdict import Check, compare

OUTLIER = "node-2"


def gpu(index: int) -> PreflightGpu:
    return PreflightGpu(
        index=index,
        name="NVIDIA H200",
        pci_bus_id=f"00000000:{0x1A + index:02X}:00.0",
        sm_clock_max_mhz=1980.0,
        memory_clock_max_mhz=3201.0,
        power_limit_watts=700.0,
        memory_total_mebibytes=143_771.0,
        memory_used_mebibytes=620.0,
        utilization_percent=0.0,
        throttle_reasons=["gpu_idle"],
        pcie_width=16.0,
        pcie_width_max=16.0,
        nvlinks_active=18.0,
        ecc_uncorrected_volatile=0.0,
        remap_pending=0.0,
        remap_failure=0.0,
        vbios="96.01",
        ecc_mode=1.0,
        mig_mode=0.0,
        persistence_mode=1.0,
        pci_path=["pci0000:15", "0000:15:01.0", f"0000:16:0{index}.0", f"0000:{0x1A + index:x}"],
        numa_node=0,
    )


def port(index: int) -> RdmaPort:
    return RdmaPort(
        device=f"mlx5_{index}",
        port="1",
        state=4,
        physical_state=5,
        rate_bits_per_second=400e9,
        link_layer="InfiniBand",
        subnet_prefix="fe80:0000:0000:0000",
        firmware="28.39.2048",
        pcie_width=16.0,
        pcie_width_max=16.0,
        pci_path=["pci0000:15", "0000:15:01.0", f"0000:16:1{index}.0", f"0000:3{index}"],
        numa_node=0,
    )


def node(number: int) -> NodeFacts:
    eth0 = Interface(
        name="eth0",
        up=True,
        speed_bits_per_second=100e9,
        mtu_bytes=9000.0,
        addresses=[f"10.0.0.{number + 1}/24"],
        physical=True,
    )
    return NodeFacts(
        node=f"node-{number}",
        hostname=f"node-{number}",
        time_ns=0,
        versions={
            "kernel": "5.15.0-113-generic",
            "driver": "570.86.15",
            "cuda driver": "12.8",
            "nccl": "2.26.2",
            "torch": "2.7.0",
            "python": "3.11.9",
        },
        gpus=[gpu(index) for index in range(8)],
        rdma_ports=[port(index) for index in range(8)],
        interfaces=[eth0],
        environment={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"},
        modules=["nvidia", "nvidia_peermem", "mlx5_ib"],
        rdma_devices_open=True,
        limits={"memlock": None, "nofile": 1_048_576},
        shm_size_bytes=1 << 40,
        shm_available_bytes=1 << 40,
        clock_synchronised=True,
        clock_error_seconds=0.001,
        cpu_count=192,
        cpu_governors=["performance"],
        memory_bytes=2 << 40,
        numa_balancing=False,
        numa_nodes=2,
        checkpoints=[
            CheckpointPath(
                path="/ckpt",
                filesystem="lustre",
                size_bytes=100 << 40,
                available_bytes=60 << 40,
                write_bytes_per_second=2e9,
            )
        ],
    )


def checked(*changes: Callable[[NodeFacts], NodeFacts]) -> dict[str, Check]:
    nodes = [node(number) for number in range(4)]
    for change in changes:
        nodes[2] = change(nodes[2])
    return {check.name: check for check in all_checks(nodes)}


def with_(**fields: Any) -> Callable[[NodeFacts], NodeFacts]:
    return lambda facts: msgspec.structs.replace(facts, **fields)


def gpu_3(**fields: Any) -> Callable[[NodeFacts], NodeFacts]:
    def change(facts: NodeFacts) -> NodeFacts:
        gpus = list(facts.gpus)
        gpus[3] = msgspec.structs.replace(gpus[3], **fields)
        return msgspec.structs.replace(facts, gpus=gpus)

    return change


def port_5(**fields: Any) -> Callable[[NodeFacts], NodeFacts]:
    def change(facts: NodeFacts) -> NodeFacts:
        ports = list(facts.rdma_ports)
        ports[5] = msgspec.structs.replace(ports[5], **fields)
        return msgspec.structs.replace(facts, rdma_ports=ports)

    return change


def eth0(**fields: Any) -> Callable[[NodeFacts], NodeFacts]:
    return lambda facts: msgspec.structs.replace(
        facts, interfaces=[msgspec.structs.replace(facts.interfaces[0], **fields)]
    )


def version(**versions: str) -> Callable[[NodeFacts], NodeFacts]:
    return lambda facts: msgspec.structs.replace(facts, versions={**facts.versions, **versions})


def checkpoint(**fields: Any) -> Callable[[NodeFacts], NodeFacts]:
    return lambda facts: msgspec.structs.replace(
        facts, checkpoints=[msgspec.structs.replace(facts.checkpoints[0], **fields)]
    )


def test_healthy_nodes_pass_every_check_that_can_be_made() -> None:
    found = checked()
    assert {name for name, check in found.items() if check.status in ("fail", "warn")} == set()
    assert {name for name, check in found.items() if check.status == "skip"} == {
        "version of paceline",
        "version of mlx5_core",
        "version of gdrdrv",
    }


FAR = ["pci0000:80", "0000:80:01.0", "0000:81:00.0", "0000:82:00.0"]


@pytest.mark.parametrize(
    ("change", "name", "status", "words"),
    [
        (version(driver="550.54.15"), "version of driver", "fail", "others 570.86.15"),
        (version(nccl="2.25.1"), "version of nccl", "fail", "2.25.1"),
        (version(kernel="5.15.0-91-generic"), "version of kernel", "warn", "5.15.0-91"),
        (with_(gpus=[gpu(i) for i in range(7)]), "GPU count", "fail", "others 8"),
        (gpu_3(trouble="is lost"), "GPUs answer", "fail", "GPU 3 is lost"),
        (with_(gpus=[], gpu_problem="no answer"), "GPUs answer", "fail", "no answer"),
        (gpu_3(sm_clock_max_mhz=1410.0), "GPU clock limits", "fail", "1410/3201 (1 GPU)"),
        (gpu_3(power_limit_watts=500.0), "GPU power limit", "fail", "500 (1 GPU)"),
        (gpu_3(vbios="96.00"), "GPU VBIOS", "fail", "96.00 (1 GPU)"),
        (gpu_3(ecc_mode=0.0), "GPU modes (ECC, MIG, persistence)", "fail", "0/0/1 (1 GPU)"),
        (gpu_3(remap_pending=1.0), "GPU memory health", "fail", "GPU 3: row remapping is pending"),
        (gpu_3(ecc_uncorrected_volatile=2.0), "GPU memory health", "fail", "uncorrected"),
        (gpu_3(pcie_width=8.0), "GPU PCIe width", "fail", "GPU 3: x8 of x16"),
        (gpu_3(nvlinks_active=17.0), "NVLink", "fail", "17 of 18 links"),
        (gpu_3(nvlinks_active=0.0), "NVLink", "fail", "0 of 18 links"),
        (gpu_3(throttle_reasons=["hw_power_brake"]), "GPU throttling", "fail", "hw_power_brake"),
        (gpu_3(memory_used_mebibytes=70_000.0), "GPU idle", "warn", "70000 MiB in use"),
        (gpu_3(pci_path=FAR, numa_node=1), "GPU to NIC", "warn", "GPU 3: SYS"),
        (port_5(state=1), "RDMA ports up", "fail", "mlx5_5:1 is down"),
        (with_(rdma_ports=[port(i) for i in range(7)]), "RDMA ports up", "fail", "is missing"),
        (port_5(rate_bits_per_second=200e9), "RDMA link rate", "fail", "7 x 400, 1 x 200"),
        (port_5(subnet_prefix="fec0:0:0:1"), "InfiniBand subnet", "fail", "fec0"),
        (port_5(pcie_width=4.0), "RDMA PCIe width", "fail", "mlx5_5: x4 of x16"),
        (with_(rdma_devices_open=False), "RDMA devices open", "fail", "no access"),
        (with_(modules=["nvidia"]), "peer memory", "fail", "none"),
        (eth0(mtu_bytes=1500.0), "MTU", "fail", "1500 bytes; others 9000 bytes"),
        (eth0(mtu_bytes=1500.0), "jumbo frames", "warn", "eth0: 1500 bytes"),
        (eth0(speed_bits_per_second=25e9), "interface speed", "fail", "25 Gb/s"),
        (eth0(up=False), "interface", "fail", "no interface is up"),
        (eth0(name="ens3"), "NCCL_SOCKET_IFNAME", "fail", "'eth0' names no interface"),
        (with_(environment={"NCCL_IB_HCA": "mlx5"}), "environment", "warn", "NCCL_IB_HCA=mlx5"),
        (
            with_(environment={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "=mlx5_9"}),
            "NCCL_IB_HCA",
            "fail",
            "'=mlx5_9' names no device",
        ),
        (
            with_(environment={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"}),
            "NCCL_IB_DISABLE",
            "fail",
            "NCCL_IB_DISABLE=1",
        ),
        (with_(clock_synchronised=False), "clock", "warn", "not synchronized"),
        (with_(limits={"memlock": 65_536, "nofile": 1 << 20}), "locked memory", "fail", "64 KiB"),
        (with_(limits={"memlock": None, "nofile": 1024}), "open files", "warn", "1024 files"),
        (with_(shm_size_bytes=64 << 20), "/dev/shm", "fail", "64 MiB"),
        (with_(shm_available_bytes=9 << 20), "/dev/shm", "fail", "9 MiB left"),
        (with_(cpu_governors=["powersave"]), "CPU governor", "warn", "powersave"),
        (with_(memory_bytes=(2 << 40) - (64 << 30)), "memory", "fail", "1984 GiB"),
        (with_(numa_balancing=True), "NUMA balancing", "warn", "on"),
        (checkpoint(problem="Read-only file system"), "checkpoint path /ckpt", "fail", "Read-only"),
        (checkpoint(available_bytes=1 << 40), "checkpoint path /ckpt", "fail", "1% free"),
        (checkpoint(filesystem="ext4"), "filesystem of /ckpt", "fail", "ext4; others lustre"),
        (checkpoint(write_bytes_per_second=1e8), "write speed of /ckpt", "warn", "95 MiB/s"),
    ],
)
def test_the_outlier_is_named(
    change: Callable[[NodeFacts], NodeFacts], name: str, status: str, words: str
) -> None:
    check = checked(change)[name]
    assert (check.status, check.nodes) == (status, [OUTLIER]), check
    assert words in check.evidence
    assert check.fix


def test_what_a_node_does_not_say_is_no_pass() -> None:
    check = checked(with_(versions={}))["version of driver"]
    assert (check.status, check.nodes) == ("warn", [OUTLIER])


def test_two_nodes_that_differ_are_both_named() -> None:
    found = compare({"a": "1", "b": "2"})
    assert (found.usual, set(found.outliers)) == (None, {"a", "b"})


def test_the_open_driver_on_a_recent_kernel_needs_no_module() -> None:
    assert checked(with_(modules=["nvidia", "nvidia-open"]))["peer memory"].status == "pass"


def test_the_module_of_aws_is_one_for_peer_memory() -> None:
    assert checked(with_(modules=["nvidia", "efa_nv_peermem"]))["peer memory"].status == "pass"


@pytest.mark.parametrize("mtu_bytes", [4092.0, 8244.0, 8896.0])
def test_frames_as_long_as_a_network_has_them_are_jumbo(mtu_bytes: float) -> None:
    nodes = [eth0(mtu_bytes=mtu_bytes)(node(number)) for number in range(3)]
    (check,) = [check for check in all_checks(nodes) if check.name == "jumbo frames"]
    assert check.status == "pass"


def test_a_port_that_is_down_everywhere_is_not_cabled() -> None:
    nodes = [port_5(state=1)(node(number)) for number in range(3)]
    (check,) = [check for check in all_checks(nodes) if check.name == "RDMA ports up"]
    assert check.status == "pass"


@pytest.mark.parametrize(
    ("setting", "name", "expected"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "lo", False),
        ("^=eth0", "eth01", True),
        ("eth0,ib", "ib3", True),
    ],
)
def test_names_are_matched_as_nccl_matches_them(setting: str, name: str, expected: bool) -> None:
    assert matches(setting, name) is expected


def test_a_device_may_be_named_with_its_port() -> None:
    assert matches("=mlx5_0:1,mlx5_1", "mlx5_0", "1")
    assert not matches("=mlx5_0:1,mlx5_1", "mlx5_0", "2")
    assert matches("=mlx5_0:1,mlx5_1", "mlx5_1", "2")


def test_a_bridge_of_containers_connects_no_nodes() -> None:
    """Each rack has its own network, and each node a docker0 with the same address."""
    docker0 = Interface(name="docker0", up=True, addresses=["172.17.0.1/16"])
    nodes = [
        msgspec.structs.replace(
            node(number),
            environment={},
            interfaces=[
                docker0,
                Interface(name="eth0", up=True, addresses=[f"10.0.{number}.7/24"], physical=True),
            ],
        )
        for number in range(3)
    ]
    chosen = [traffic_interface(each, nodes) for each in nodes]
    assert [each.name for each in chosen if each] == ["eth0"] * 3
