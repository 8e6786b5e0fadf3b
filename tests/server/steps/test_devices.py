"""Peaks by the names that drivers report."""

import pytest

from paceline_server.steps.devices import peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_peak_belongs_to_the_whole_name(name: str, teraflops: float | None) -> None:
    found = peak_flops(name)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))
