from __future__ import annotations

import pytest

from paceline_agent.collect.visible_gpus import visible_gpu
from paceline_wire.batch import GpuInfo

GPUS = [GpuInfo(index, f"GPU-{index}{index}-f0", "H200", f"00:{index}") for index in range(4)]


@pytest.mark.parametrize(
    ("environment", "local_rank", "index"),
    [
        ("CUDA_VISIBLE_DEVICES=2", 1, 2),
        ("CUDA_VISIBLE_DEVICES=3,2,1,0", 1, 2),
        ("CUDA_VISIBLE_DEVICES=GPU-11-f0, GPU-33-f0", 1, 3),
        ("CUDA_VISIBLE_DEVICES=GPU-33", 0, 3),  # a unique prefix is enough
        ("CUDA_VISIBLE_DEVICES=MIG-GPU-22-f0/7/0", 0, 2),
        ("NVIDIA_VISIBLE_DEVICES=GPU-33-f0,GPU-22-f0", 1, 2),
        ("NVIDIA_VISIBLE_DEVICES=2,3 CUDA_VISIBLE_DEVICES=1", 0, 3),
        ("NVIDIA_VISIBLE_DEVICES=all CUDA_VISIBLE_DEVICES=1", 0, 1),
        ("NVIDIA_VISIBLE_DEVICES=all", 2, 2),
        ("CUDA_VISIBLE_DEVICES=", 0, None),
        ("CUDA_VISIBLE_DEVICES=-1", 0, None),
        ("CUDA_VISIBLE_DEVICES=9", 0, None),
        ("CUDA_VISIBLE_DEVICES=0,1", 2, None),
        ("NVIDIA_VISIBLE_DEVICES=void", 0, None),
        ("HOME=/root", 0, None),  # nothing is guessed
    ],
)
def test_the_gpu_that_a_rank_may_see(procfs_with, environment, local_rank, index):
    procfs = procfs_with(environment.replace(", ", ",").replace(" ", "\0"))
    found = visible_gpu(GPUS, procfs, 100, local_rank)
    assert (None if found is None else found.index) == index


def test_a_process_that_is_gone_sees_none(tmp_path):
    assert visible_gpu(GPUS, tmp_path, 100, 0) is None


def test_a_later_process_with_the_same_pid_has_an_environment_of_its_own(procfs_with):
    procfs = procfs_with("CUDA_VISIBLE_DEVICES=2")
    assert visible_gpu(GPUS, procfs, 100, 0) is GPUS[2]
    procfs_with("CUDA_VISIBLE_DEVICES=1", started_ticks=2)
    assert visible_gpu(GPUS, procfs, 100, 0) is GPUS[1]


@pytest.fixture
def procfs_with(tmp_path):
    def write(environment: str, started_ticks: int = 1):
        (tmp_path / "100").mkdir(exist_ok=True)
        (tmp_path / "100" / "environ").write_text(environment)
        (tmp_path / "100" / "stat").write_text(f"100 (python) S {'0 ' * 18}{started_ticks} 0")
        return tmp_path

    return write
